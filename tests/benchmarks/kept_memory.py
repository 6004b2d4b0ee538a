"""What a training pays for memory that it gives back: steps under both conditions, in turn.

``python -m tests.benchmarks.kept_memory docs/records/operators/kept_memory.json`` trains the held-out
models on one rank, each in a process of its own, and writes the median step of every repetition.
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean, median
from typing import Final

from calibrate.campaign import Campaign, measure
from calibrate.environment import describe_environment
from calibrate.fit.steps import repetition
from calibrate.launch import TorchrunLauncher
from calibrate.placement import KEPT_MEMORY, place
from calibrate.task import StepTask
from calibrate.topology import LaunchFlags
from perfmodel.documents.base import write_atomically
from perfmodel.documents.observation import StepObservation, read_observations
from validate.held_out_models import HELD_OUT, held_out_settings, write_configs

_NUM_ROUNDS: Final = 2
_REPETITION_S: Final = 0.6


def main() -> None:
    """Measure, print one line per run and the typical ratio."""
    steps_s: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for index in range(_NUM_ROUNDS):
        order = ("kept", "given back")
        for name in order if index % 2 == 0 else reversed(order):
            for label, step_s in _repetitions(kept=name == "kept").items():
                steps_s[label][name].append(step_s)
    ratios = {label: median(by["given back"]) / median(by["kept"]) for label, by in steps_s.items()}
    for label, by in sorted(steps_s.items(), key=lambda entry: ratios[entry[0]]):
        times = ", ".join(f"{name} {1e3 * median(found):.0f} ms" for name, found in by.items())
        sys.stdout.write(f"{label}: {times}, {ratios[label]:.2f} times\n")
    mean = geometric_mean(ratios.values())
    sys.stdout.write(f"typical {mean:.2f} times, at most {max(ratios.values()):.2f} times\n")
    write_atomically(Path(sys.argv[1]), json.dumps({"steps_s": steps_s}, indent=1) + "\n")


def _repetitions(*, kept: bool) -> dict[str, float]:
    """Median step of every model at its smallest micro-batch. [s]"""
    here = place(
        describe_environment(observe_s=0.0),
        "cpu",
        LaunchFlags(nproc_per_node=1),
        conditions={"OMP_NUM_THREADS": "1", **(KEPT_MEMORY if kept else {})},
    )
    smallest = {
        model.label(name): model.micro_batches[0] for model in HELD_OUT for name in model.optimizers
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configs(folder)
        tasks = tuple(
            StepTask(
                name=run.setting.label,
                round=0,
                setting=run.setting,
                model_spec=run.model_spec,
                target_s=_REPETITION_S,
            )
            for run in held_out_settings(1, folder)
            if run.setting.micro_batch == smallest[run.setting.workload]
        )
        campaign = Campaign(folder=folder, plan={}, rounds=(tasks,), placement=here)
        path = measure(
            campaign, TorchrunLauncher(), resume=False, on_progress=lambda _progress: None
        )
        found = [entry for entry in read_observations(path) if isinstance(entry, StepObservation)]
    return {
        f"{entry.setting.workload}, {entry.setting.micro_batch}": repetition(entry).step_s
        for entry in found
    }


if __name__ == "__main__":
    main()
