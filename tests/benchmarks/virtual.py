"""The tool's answers about virtual GPUs, whose truths are drawn at random and known, judged blind.

``python -m tests.benchmarks.virtual run FOLDER SEED...`` calibrates and judges one truth for each seed, with what
``tests.benchmarks.virtual_record`` left in a folder; ``... report FOLDER [DATE]`` prints the verdict, with a date it
also keeps every judged row and writes the table of ``docs/virtual-gpus.md``.
"""

import functools
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate import worker
from calibrate.environment import describe_environment, provenance
from calibrate.experiment import BUDGETS, Experiment
from calibrate.fit.ddp import fit_host
from calibrate.fit.profile import fit_profile
from calibrate.probes.training import issued_steps
from calibrate.task import CollectiveTask, ComputeTask, OverlapTask, StepTask, Task, num_ranks
from calibrate.virtual import Device, Host, Network, Noise, Protocol, Truth
from calibrate.virtual.gpu import VirtualGpu
from perfmodel.answer import Question, stage_memory
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import cost_model
from perfmodel.cost.network import Group
from perfmodel.cost.traced import issued
from perfmodel.documents.hardware import DataSheet, shipped_catalogue
from perfmodel.documents.observation import (
    EnvironmentObservation,
    OperatorsObservation,
    WorkloadObservation,
)
from perfmodel.explanation import bottleneck
from perfmodel.layout import RunSetting
from perfmodel.machine import Cluster, Tier
from perfmodel.machine.measured import MeasuredMachine, TracedWorkload
from perfmodel.tracing.reference import GPU_MODELS
from perfmodel.units import KIB
from perfmodel.workload import Phase
from tests.benchmarks.virtual_record import ALONE, RECORDED, TWICE, Recorded, judged_batches, loaded
from tests.benchmarks.virtual_report import (
    OF_CLUSTER,
    PAGE,
    RECORD,
    record_of,
    table,
    text_of,
    written,
)
from tests.virtual_ranks import (
    REPLAYED_PROBES,
    Items,
    Mark,
    Team,
    TeamSession,
    plain_loop_s,
    play,
    replaying,
)

_MOST_RANKS: Final = 16
_MOST_OF_HEAVY: Final = 2
#: All-reduces that are compared: from 1 KiB to 1 GiB, measured sizes and those between.
_SIZES: Final = tuple(KIB * 2**power for power in range(21))
_FREE: Final = 1e30
#: Of a model that tells of its host.
_FEW_SAMPLES: Final = 4
#: Launches that hosts of GPUs take. [s]
_LAUNCHES_S: Final = (3e-6, 3e-5)
#: Memory of accelerators of 2016 to 2026. [B/s]
_MEMORY: Final = (3e11, 8e12)
#: Of a data sheet that tells enough; bf16 where it is known.
_ENOUGH: Final = frozenset({"fp32", "fp16"})
#: Rate of trees between nodes over that of rings, of arrays as buckets are. All-reduces of four DGX A100
#: (NVIDIA/deepops, 1 MiB to 4 GiB, latencies of NCCL's tuner times a factor) are told within 5 % by 0.2 to 0.46;
#: 0.5 to 0.9 leave 5 to 6 %, and need latencies of 2 to 3 times the tuner's. Trees above 0.41 would be faster than what
#: 20 racks of GB200 took (coreweave/nccl-tests, 512 MiB).
_TREES: Final = (0.25, 0.5)
#: Starts of small arrays, inside a node and between nodes, and what large arrays add inside. Published logs leave 5 to
#: 18 and 26 to 73 us to arrays below 128 KiB; to those of 1 to 64 MiB 5 to 58 and 40 to 118 us (links at the rate of
#: large arrays, with the latencies of NCCL's tuner). [s]
_STARTS_S: Final = (5.3e-6, 1.6e-5)
_OUTER_STARTS_S: Final = (2.7e-5, 8e-5)
_LATER_STARTS_S: Final = (5e-6, 2.5e-5)
#: Standard deviations, in log, of truths whose hosts are quiet.
_QUIET: Final = Noise(kernel=0.03, window=0.01, run=0.005, occasion=0.005)
#: Hosts of odd seeds vary by run as those of two real GPUs did (docs/real-gpus.md).
_NOISY: Final = (0.08, 0.17)
#: Ratios, in log, that are as wanted.
_NEAR: Final = 0.01


def random_truth(seed: int, models: Iterable[Recorded] = ()) -> Truth:
    """A GPU like one of the catalogue, whose steps of some models take 0.2 to 5 times what the host takes.

    Every second host is noisy. Python, launches and kernels cost each operator its own, as on real GPUs.

    Rates are shares of a data sheet; a launch takes 3 to 30 us. Data sheets are tried in random order until such a
    host gives the ratio that was drawn; where none does, the nearest is taken.
    """
    draw = random.Random(seed)  # noqa: S311 - a machine, not a secret

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    p2p = draw.uniform(0.4, 0.7)
    flop_share, byte_share = draw.uniform(0.6, 0.95), draw.uniform(0.7, 0.95)
    half_flop_s, half_bytes_s = between(2e-6, 1e-5), between(5e-7, 3e-6)
    kernel_s, convolution = between(1e-6, 4e-6), draw.uniform(0.4, 0.9)
    event_s, spread = between(5e-7, 3e-6), draw.uniform(0.1, 0.4)
    speed = tuple(draw.uniform(0.98, 1.0) for _ in range(_MOST_RANKS))
    host = _random_host(draw, between)
    network = Network(
        devices_per_node=draw.choice((8, 16)),
        launch_s=between(*_STARTS_S),
        outer_launch_s=between(*_OUTER_STARTS_S),
        inner_latency_s=between(1e-6, 1e-5),
        inner_bytes_per_s=between(5e9, 4e11),
        outer_latency_s=between(5e-6, 2e-5),
        outer_bytes_per_s=between(3e9, 5e10),
        tree_share=draw.uniform(*_TREES),
        protocols=_random_protocols(draw, p2p, between),
        memory_passes=draw.uniform(2.0, 4.0),
        skew_s=between(2e-7, 2e-6),
        compute_slowdown=draw.uniform(1.0, 1.15),
    )

    def device_of(sheet: DataSheet) -> Device:
        assert sheet.bandwidth is not None
        fp32 = flop_share * sheet.peaks["fp32"].flop_per_s
        half = sheet.peaks.get("bf16") or sheet.peaks["fp16"]
        bytes_per_s = min(max(_MEMORY[0], byte_share * sheet.bandwidth.bytes_per_s), _MEMORY[1])
        return Device(
            flop_per_s={"fp32": fp32, "bf16": flop_share * half.flop_per_s},
            bytes_per_s=bytes_per_s,
            kernel_s=kernel_s,
            half_flop=half_flop_s * fp32,
            half_bytes=half_bytes_s * bytes_per_s,
            convolution=convolution,
            event_s=event_s,
            spread=spread,
            speed=speed,
        )

    wanted = between(0.2, 5.0)
    hosts_vary = between(*_NOISY) if seed % 2 else 0.0
    sheets = [s for s in shipped_catalogue().devices if s.bandwidth and s.peaks.keys() >= _ENOUGH]
    draw.shuffle(sheets)
    truths = [
        Truth(
            name=f"seed {seed}",
            host=host,
            device=device_of(sheet),
            network=network,
            noise=replace(_QUIET, host=hosts_vary),
            devices=_MOST_RANKS,
            seed=seed,
        )
        for sheet in sheets
    ]
    steps = [items for model in models for items in model.plain[ALONE]]
    if not steps:
        return truths[0]
    hosted = [(truth, *_host_for(wanted, truth, steps)) for truth in truths]
    truth, factor, _ = next(
        (each for each in hosted if each[2] < _NEAR), min(hosted, key=lambda each: each[2])
    )
    return replace(truth, host=_scaled(host, factor))


def _random_host(draw: random.Random, between: Callable[[float, float], float]) -> Host:
    """Times are shares of a launch: a slow host is slow in all it does."""
    launch_s = between(*_LAUNCHES_S)
    return Host(
        launch_s=launch_s,
        view_s=launch_s * between(0.05, 0.3),
        event_s=launch_s * between(0.05, 0.3),
        module_s=launch_s * between(0.3, 1.5),
        phase_s=launch_s * between(2.0, 10.0),
        tensor_s=launch_s * between(0.03, 0.2),
        backward=draw.uniform(0.6, 1.0),
        spread=draw.uniform(0.1, 0.4),
    )


def _random_protocols(
    draw: random.Random, p2p: float, between: Callable[[float, float], float]
) -> dict[str, Protocol]:
    """Protocols like NCCL's; ``p2p``: latency of the second one over that of the simple one."""
    later_s = between(*_LATER_STARTS_S)
    return {
        "LL": Protocol(
            start_s=0.0, latency=p2p * draw.uniform(0.3, 0.5), rate=draw.uniform(0.25, 0.5)
        ),
        "LL128": Protocol(start_s=later_s, latency=p2p, rate=draw.uniform(0.88, 0.94)),
        "Simple": Protocol(start_s=later_s, latency=1.0, rate=1.0),
    }


def _host_for(wanted: float, truth: Truth, steps: Sequence[Items]) -> tuple[float, float]:
    """Factor on the host's times that brings device over host nearest to a mean over steps, and how far off it is."""
    ratio = statistics.fmean(math.log(device_over_host(truth, items)) for items in steps)
    exact = math.exp(ratio) / wanted
    low, high = (launch_s / truth.host.launch_s for launch_s in _LAUNCHES_S)
    factor = min(max(low, exact), high)
    return factor, abs(math.log(factor / exact))


def _scaled(host: Host, factor: float) -> Host:
    """A host that takes ``factor`` times as long for everything."""
    slower = {
        name.name: factor * getattr(host, name.name)
        for name in fields(Host)
        if name.name.endswith("_s")
    }
    return replace(host, **slower)


def device_over_host(truth: Truth, items: Items) -> float:
    """Time of the kernels of a recorded step over that of the host's calls, without noise."""
    gpu = VirtualGpu(replace(truth, noise=Noise()))
    device_s = host_s = 0.0
    for item in items:
        if isinstance(item, Mark):
            continue
        if item.kind == "kernel":
            kernel_s, launch_s = gpu.cost_of(item)
            device_s, host_s = device_s + kernel_s, host_s + launch_s
        elif item.kind in ("view", "module", "phase"):  # work of the host alone
            host_s += gpu.python_s(item)
    return device_s / host_s


def calibrated(
    truth: Truth,
    models: dict[str, Recorded],
    ranks: int,
    folder: Path,
    of_host: Mapping[str, Recorded] | None = None,
) -> MeasuredMachine:
    """The profile of a calibration with two batches of each model and all sizes of collectives.

    ``of_host``: Models that tell the law of the host, as drawn ones do on a real GPU.
    """
    team = Team(truth=truth, size=ranks, occasion="calibrate")
    sessions = [TeamSession(team, rank) for rank in range(ranks)]
    world_sizes = tuple(2**power for power in range(ranks.bit_length()))
    experiment = Experiment(
        device_kind="virtual", world_sizes=world_sizes, models=tuple(models), budget=_budget()
    )
    path = folder / f"observations-{truth.seed}-{ranks}.jsonl"
    facts = describe_environment(observe_s=0.0)
    facts["virtual"] = {"truth": truth.name, **truth.facts}
    lines = [EnvironmentObservation(task="environment", round=0, facts=facts).model_dump_json()]
    for name, model in models.items():
        workload = replace(model.traced.workload, name=name)
        lines.append(
            WorkloadObservation(task=f"trace {name}", round=0, workload=workload).model_dump_json()
        )
    probes: dict[type[Any], Any] = {
        kind: worker._PROBES[kind] for kind in (StepTask, CollectiveTask, OverlapTask, ComputeTask)
    }

    @functools.cache
    def items(setting: RunSetting) -> Items:
        return models[setting.workload].items(setting.workload, setting)

    with replaying(items):
        for task in itertools.chain.from_iterable(experiment.rounds()):
            is_replayed = not isinstance(task, ComputeTask) or task.probe in REPLAYED_PROBES
            if type(task) in probes and is_replayed:
                found = team.run(num_ranks(task), partial(_observed, sessions, task, probes))
                lines.append(found[0])
        drawn = [_issued(sessions[0], name, model) for name, model in (of_host or {}).items()]
    path.write_text("\n".join(lines) + "\n")
    machine = fit_profile(path, provenance=provenance(facts, seed=0)).machine
    view_s = next((rate.time_s for rate in machine.rates if rate.probe == "view"), None)
    host = fit_host((), (), drawn, dispatch_s=machine.dispatch_s, view_s=view_s)
    return replace(machine, host=host)


def _issued(session: TeamSession, name: str, model: Recorded) -> OperatorsObservation:
    """What the host takes to issue steps of few samples, as of a drawn model."""
    session.measured.begin(f"model {name}")
    items = model.items(name, TWICE.at(name, _FEW_SAMPLES))
    marks = [place for place, item in enumerate(items) if isinstance(item, Mark)]
    # Of the marks of a trainer, those behind copies of a batch stand inside of what is issued.
    ends = [place for number, place in enumerate(marks) if number not in (0, 3)]
    parts = itertools.cycle([items[i:j] for i, j in itertools.pairwise([0, *ends])])

    def act(*_: object) -> None:
        play(session.gpu, next(parts), world_size=1, mark=lambda: None)

    step = model.traced.step.at(micro_batch=_FEW_SAMPLES)
    counts = {phase: issued(step, phase) for phase in Phase}
    host = issued_steps(
        session, act, act, act, issued=counts, num_gradients=len(step.parameters), target_s=0.0
    )
    return OperatorsObservation(
        task=f"model {name}", round=0, model=name, operators=(), optimizers=(), host=host
    )


def _budget() -> Any:
    return replace(BUDGETS["standard"], repetition_s=0.0)


def _observed(
    sessions: list[TeamSession], task: Task, probes: dict[type[Any], Any], rank: int
) -> str:
    session = sessions[rank]
    session.measured.begin(task.name)
    found: str = probes[type(task)](session, task).model_dump_json()
    return found


def cluster_of(truth: Truth, num_nodes: int) -> Cluster:
    """What its owner would write into a cluster file: rates and latencies of links."""
    net = truth.network
    return Cluster(
        name=truth.name,
        tiers=(
            Tier(
                name="node",
                of="device",
                count=net.devices_per_node,
                link_bytes_per_s=net.inner_bytes_per_s,
                latency_s=net.inner_latency_s,
            ),
            Tier(
                name="fabric",
                of="node",
                count=num_nodes,
                links=net.devices_per_node,
                link_bytes_per_s=net.outer_bytes_per_s,
                latency_s=max(0.0, net.outer_latency_s - net.inner_latency_s),
            ),
        ),
    )


def judged_steps(
    truth: Truth,
    models: dict[str, Recorded],
    machine: MeasuredMachine,
    *,
    devices: Sequence[int] = (),
    of: str = "",
) -> Iterator[dict[str, Any]]:
    """Held-out settings: predictions first, then the plain loop, at another occasion."""
    most, node = machine.max_world_size, truth.network.devices_per_node
    doubled = (2, most, min(_MOST_RANKS, 2 * most)) if most > 1 else ()
    for name, model in models.items():
        calibrated_one = machine.workload(name)
        assert calibrated_one is not None
        workload = TracedWorkload.of(calibrated_one, model.traced.step, model.traced.memory)
        # Clusters are judged by steps of one micro-batch: many ranks take long.
        settings = (
            kind.at(name, batch, world_size=world_size)
            for kind in model.plain
            if not devices or (kind.is_parallel and kind.accumulation == 1)
            for batch in judged_batches(name, kind)
            for world_size in (sorted({*doubled, *devices}) if kind.is_parallel else (1,))
        )
        for setting in settings:
            world_size = setting.world_size
            crosses = world_size > node or devices
            question = Question(
                machine=machine,
                workload=workload,
                layout=setting.layout,
                cluster=cluster_of(truth, -(-world_size // node)) if crosses else None,
            )
            step = answer(question).step
            named = bottleneck(question) if not devices else None
            items = model.plain_items(name, setting)
            # Of many ranks fewer steps are enough: noise of their kernels is averaged.
            steps, warm_ups = (4, 3) if world_size > _MOST_RANKS else (8, 4)
            looped = partial(
                plain_loop_s,
                name=setting.label,
                items=items,
                world_size=world_size,
                occasion="judge",
                steps=steps // setting.accumulation,
                warm_ups=warm_ups // setting.accumulation,
            )
            row = {
                "of": of or ("calibrated ranks" if world_size <= most else "more ranks"),
                "seed": truth.seed,
                "setting": setting.label,
                "ranks": world_size,
                "accumulation": setting.accumulation,
                "calibrated": most,
                "nodes": -(-world_size // node),
                "step_s": looped(truth),
                "nominal": step.nominal,
                "p5": step.p5,
                "p95": step.p95,
            }
            if truth.noise.host:
                # Of a run as the mean of all runs is.
                row["typical_s"] = looped(replace(truth, noise=replace(truth.noise, host=0.0)))
            if named is not None:
                gains = true_gains(truth, setting, items)
                row |= {"named": named.value, "gains": gains}
            yield row


def true_gains(truth: Truth, setting: RunSetting, items: Items) -> dict[str, float]:
    """Part of a step without noise that goes if one term costs nothing."""
    slowest = (min(truth.device.speed[: setting.world_size]),)
    steps = max(1, 2 // setting.accumulation)
    quiet = replace(truth, noise=Noise(), device=replace(truth.device, speed=slowest))
    device, network = quiet.device, quiet.network
    passes = network.memory_passes * _FREE / device.bytes_per_s
    rates = dict.fromkeys(device.flop_per_s, _FREE)
    free = {
        "": quiet,
        "host": replace(quiet, host=_scaled(quiet.host, 0.0)),
        "compute": replace(quiet, device=replace(device, flop_per_s=rates, kernel_s=0.0)),
        "memory": replace(
            quiet,
            device=replace(device, bytes_per_s=_FREE),
            network=replace(network, memory_passes=passes),
        ),
        "communication": replace(
            quiet,
            network=replace(
                network,
                launch_s=0.0,
                outer_launch_s=0.0,
                inner_latency_s=0.0,
                outer_latency_s=0.0,
                inner_bytes_per_s=_FREE,
                outer_bytes_per_s=_FREE,
                protocols={"free": Protocol(start_s=0.0, latency=1.0, rate=1.0)},
                memory_passes=0.0,
                skew_s=0.0,
                compute_slowdown=1.0,
            ),
        ),
    }
    steps_s = {
        term: plain_loop_s(
            each,
            setting.label,
            items,
            world_size=setting.world_size,
            occasion="free",
            steps=steps,
            warm_ups=steps,
            are_alike=True,
        )
        for term, each in free.items()
    }
    whole_s = steps_s.pop("")
    return {term: 1 - step_s / whole_s for term, step_s in steps_s.items()}


def judged_law(truth: Truth, machine: MeasuredMachine) -> Iterator[dict[str, Any]]:
    """All-reduces alone by the fit, and in truth."""
    most, node = machine.max_world_size, truth.network.devices_per_node
    for ranks in sorted({2, 4, most, min(_MOST_RANKS, 2 * most)}):
        if ranks > min(2 * most, node):
            continue
        # The last of n ranks, each late by half a normal distribution.
        late = np.abs(np.random.default_rng(0).standard_normal((4000, ranks))).max(axis=1).mean()
        for size_bytes in _SIZES:
            fitted_s = cost_model(machine, None, 2).network.time_s(
                "all_reduce", size_bytes, Group(ranks)
            )
            true_s = truth.collective_s("all_reduce", size_bytes, ranks)
            yield {
                "seed": truth.seed,
                "ranks": ranks,
                "calibrated": most,
                "size_bytes": size_bytes,
                "error": float(fitted_s[0]) / (true_s + truth.network.skew_s * late) - 1,
            }


def judged_memory(name: str, model: Recorded, machine: MeasuredMachine) -> Iterator[dict[str, Any]]:
    """Peaks of held-out steps against the allocator; no truth changes them."""
    known = machine.workload(name)
    assert known is not None
    workload = TracedWorkload.of(known, model.traced.step, model.traced.memory)
    for kind, batch, peak_bytes in (
        (kind, *each)
        for kind, peaks in model.peak_bytes.items()
        for each in zip(RECORDED[name], peaks, strict=True)
    ):
        setting = kind.at(name, batch)
        [stage] = stage_memory(Question(machine=machine, workload=workload, layout=setting.layout))
        yield {"setting": setting.label, "error": stage.tensor_bytes / peak_bytes - 1}


def run(folder: Path, seed: int) -> None:
    """Calibrate and judge one truth."""
    started_s = time.monotonic()
    draw = random.Random(f"models {seed}")  # noqa: S311
    recorded = {path.stem: loaded(folder, path.stem) for path in sorted(folder.glob("*.pickle"))}
    known = [*recorded]
    ranks = draw.choice((1, 2, 4, 8))
    # Many ranks take long: one light model is enough there.
    if ranks > _MOST_OF_HEAVY:
        known = [name for name in known if name not in GPU_MODELS] or known
    chosen = sorted(draw.sample(known, min(2 if ranks <= _MOST_OF_HEAVY else 1, len(known))))
    models = {name: recorded[name] for name in chosen}
    truth = random_truth(seed, models.values())
    machine = calibrated(truth, models, ranks, folder, recorded)
    first = {chosen[0]: models[chosen[0]]}
    one = machine if ranks == 1 else calibrated(truth, first, 1, folder, recorded)
    shares = [
        device_over_host(truth, items) for model in models.values() for items in model.plain[ALONE]
    ]
    found = {
        "seed": seed,
        "models": chosen,
        "ranks": ranks,
        "device_over_host": shares,
        "host_noise": truth.noise.host,
        "steps": list(judged_steps(truth, models, machine)),
        "law": list(judged_law(truth, machine)) if ranks > 1 else [],
        "memory": [
            row for name, model in models.items() for row in judged_memory(name, model, machine)
        ],
        "cluster": list(judged_steps(truth, first, one, devices=OF_CLUSTER, of="cluster file")),
        "seconds": time.monotonic() - started_s,
    }
    (folder / f"rows-{seed}.json").write_text(json.dumps(found))
    sys.stdout.write(f"seed {seed}: {ranks} ranks, {', '.join(chosen)}, {found['seconds']:.0f} s\n")
    sys.stdout.write(table(record_of([found], date="")) + "\n")
    sys.stdout.flush()


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
        record = record_of(found, date=names[0] if names else "")
        sys.stdout.write(table(record) + "\n")
        if names:
            RECORD.write_text(text_of(record), encoding="utf-8")
            PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
