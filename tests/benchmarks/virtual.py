"""Predictions of calibrations of virtual GPUs with random truths, against an independent plain loop.

``python -m tests.benchmarks.virtual run FOLDER SEED...`` calibrates and judges one truth per seed, with what
``tests.benchmarks.virtual_record`` left in a folder; ``... report FOLDER`` prints the verdict.
Gates: MAPE 2 %, worst 6 %, coverage 85 to 97 %.
"""

import itertools
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrate import worker
from calibrate.environment import describe_environment
from calibrate.experiment import BUDGETS, Experiment
from calibrate.fit.profile import fit_profile
from calibrate.placement import provenance
from calibrate.task import CollectiveTask, OverlapTask, StepTask, Task, num_ranks
from calibrate.virtual.truth import Device, Host, Network, Noise, Truth
from perfmodel.documents.observation import EnvironmentObservation, WorkloadObservation
from perfmodel.layout.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import Seconds
from perfmodel.workload.workload import Parameter
from tests.benchmarks.virtual_record import CAPS_MB, Recorded, loaded
from tests.virtual_ranks import Mark, Team, TeamSession, plain_loop_s, replaying
from validate.validate import predict


def random_truth(seed: int) -> Truth:
    """A GPU somewhere between a slow and a fast one, behind a slow or a fast host."""
    draw = random.Random(seed)  # noqa: S311 - a machine, not a secret

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    flop_per_s = between(4e12, 8e13)
    return Truth(
        name=f"seed {seed}",
        host=Host(
            launch_s=between(3e-6, 3e-5),
            view_s=between(3e-7, 1.5e-6),
            backward=draw.uniform(0.6, 1.0),
        ),
        device=Device(
            flop_per_s={"fp32": flop_per_s},
            bytes_per_s=flop_per_s * between(0.03, 0.12),
            kernel_s=between(1e-6, 4e-6),
            half_flop=between(5e7, 5e8),
            half_bytes=between(5e5, 5e6),
            convolution=draw.uniform(0.4, 0.9),
            speed=tuple(draw.uniform(0.98, 1.0) for _ in range(16)),
        ),
        network=Network(
            devices_per_node=16,
            launch_s=between(8e-6, 3e-5),
            inner_hop_s=between(1e-6, 1e-5),
            inner_bytes_per_s=between(5e9, 4e11),
            compute_slowdown=draw.uniform(1.0, 1.15),
        ),
        noise=Noise(kernel=0.03, window=0.01, run=0.005, occasion=0.005),
        devices=16,
        seed=seed,
    )


def calibrated(
    truth: Truth, models: dict[str, Recorded], ranks: int, folder: Path
) -> MeasuredMachine:
    """The profile of a quick calibration."""
    team = Team(truth=truth, size=ranks, occasion="calibrate")
    sessions = [TeamSession(team, rank) for rank in range(ranks)]
    world_sizes = tuple(2**power for power in range(ranks.bit_length()))
    experiment = Experiment(
        device_kind="virtual", world_sizes=world_sizes, models=tuple(models), budget=_budget()
    )
    path = folder / "observations.jsonl"
    facts = describe_environment(observe_s=0.0)
    facts["virtual"] = {"truth": truth.name, **truth.facts}
    lines = [EnvironmentObservation(task="environment", round=0, facts=facts).model_dump_json()]
    for name, model in models.items():
        assert model.workload is not None, name
        workload = replace(model.workload, name=name, parameters=_parameters(model, team))
        lines.append(
            WorkloadObservation(task=f"trace {name}", round=0, workload=workload).model_dump_json()
        )
    probes: dict[type[Any], Any] = {
        StepTask: worker._steps,
        CollectiveTask: worker._collective,
        OverlapTask: worker._overlap,
    }
    with replaying(lambda setting: models[setting.workload].items(setting)):
        for task in itertools.chain.from_iterable(experiment.rounds()):
            if type(task) in probes:
                found = team.run(num_ranks(task), partial(_observed, sessions, task, probes))
                lines.append(found[0])
    path.write_text("\n".join(lines) + "\n")
    return fit_profile(path, provenance=provenance(facts, seed=0)).machine


def _budget() -> Any:
    return replace(BUDGETS["quick"], repetition_s=0.0, min_steps=4)


def _observed(
    sessions: list[TeamSession], task: Task, probes: dict[type[Any], Any], rank: int
) -> str:
    session = sessions[rank]
    session.measured.begin(task.name)
    found: str = probes[type(task)](session, task).model_dump_json()
    return found


def _parameters(model: Recorded, team: Team) -> tuple[Parameter, ...]:
    """When gradients are ready, the host waiting for each as the probe does."""
    assert model.workload is not None
    gpu, ready_s = team.gpus[0], list[Seconds]()
    gpu.synchronise()
    start_s = gpu.host_s
    for item in model.backward:
        if isinstance(item, Mark):
            gpu.synchronise()
            ready_s.append(gpu.host_s - start_s)
        else:
            gpu.execute(item)
    gpu.synchronise()
    span_s = gpu.host_s - start_s
    known = {parameter.name: parameter for parameter in model.workload.parameters}
    return tuple(
        replace(known[name], ready_fraction=min(1.0, at_s / span_s))
        for name, at_s in zip(model.names, ready_s, strict=True)
    )


def judged(
    truth: Truth, models: dict[str, Recorded], machine: MeasuredMachine
) -> Iterable[dict[str, Any]]:
    """Held-out settings: predictions first, then the loop, at another occasion."""
    most = machine.max_world_size
    for name, model in models.items():
        for (how, cap_mb, batch, asks), items in model.held_out.items():
            if asks or cap_mb == CAPS_MB[1] or (most == 1 and how != "none"):
                continue
            for world_size in (1,) if how == "none" else sorted({2, most, min(16, 2 * most)}):
                setting = RunSetting(
                    workload=name,
                    world_size=world_size,
                    micro_batch=batch,
                    synchronisation=Synchronisation(how),
                    bucket_cap_mb=cap_mb,
                )
                step = predict(machine, (setting,)).steps_s[setting]
                team = Team(truth=truth, size=world_size, occasion="judge")
                step_s = plain_loop_s(team, setting.label, items, world_size=world_size)
                yield {
                    "seed": truth.seed,
                    "setting": setting.label,
                    "ranks": world_size,
                    "calibrated": most,
                    "step_s": step_s,
                    "nominal": step.nominal,
                    "p5": step.p5,
                    "p95": step.p95,
                }


def run(folder: Path, seed: int) -> None:
    """Calibrate and judge one truth."""
    started_s = time.monotonic()
    draw = random.Random(f"models {seed}")  # noqa: S311
    known = sorted({file.name.split("-")[0] for file in folder.glob("*.pickle")})
    chosen = sorted(draw.sample(known, min(2, len(known))))
    models = {name: loaded(folder, name) for name in chosen}
    truth = random_truth(seed)
    machine = calibrated(truth, models, draw.choice((1, 2, 2, 4)), folder)
    rows = list(judged(truth, models, machine))
    (folder / f"rows-{seed}.json").write_text(json.dumps(rows))
    sys.stdout.write(f"seed {seed}: {summary(rows)}, {time.monotonic() - started_s:.0f} s\n")


def summary(rows: list[dict[str, Any]]) -> str:
    """MAPE, worst error and coverage."""
    errors = [row["nominal"] / row["step_s"] - 1 for row in rows]
    inside = [row["p5"] <= row["step_s"] <= row["p95"] for row in rows]
    return (
        f"{len(rows)} settings, MAPE {100 * np.mean(np.abs(errors)):.2f} %, "
        f"worst {100 * max(errors, key=abs):+.1f} %, coverage {100 * np.mean(inside):.0f} %"
    )


def main() -> None:
    """Carry out the command line."""
    command, folder, *names = sys.argv[1:]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if command == "run":
        for seed in names:
            run(path, int(seed))
    else:
        found = [json.loads(file.read_text()) for file in sorted(path.glob("rows-*.json"))]
        rows = list(itertools.chain.from_iterable(found))
        sys.stdout.write(f"{len(found)} truths, {summary(rows)}\n")


if __name__ == "__main__":
    main()
