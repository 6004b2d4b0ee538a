"""Campaigns of real ranks under torchrun, and what holds for all of them."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from calibrate.campaign import OBSERVATIONS
from calibrate.processes import usable_cores
from calibrate.task import StepTask, Task, TraceTask
from perfmodel.documents.observation import (
    Observation,
    StepObservation,
    WorkloadObservation,
    read_observations,
)
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.step.stages import gradient_buckets
from perfmodel.workload import Workload

NEEDS_TWO_RANKS = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(usable_cores() < 2, reason="two ranks need two usable cores"),
]


def steps_of(*settings: RunSetting) -> tuple[Task, ...]:
    """Every model is traced, then every setting runs for a few steps."""
    models = dict.fromkeys(setting.workload for setting in settings)
    return (
        *(TraceTask(name=f"trace {model}", round=0, workload=model) for model in models),
        *(
            StepTask(name=setting.label, round=0, setting=setting, target_s=0.0)
            for setting in settings
        ),
    )


def traced(observations: list[Observation]) -> dict[str, Workload]:
    return {
        entry.workload.name: entry.workload
        for entry in observations
        if isinstance(entry, WorkloadObservation)
    }


def assert_buckets_are_those_of_ddp(observations: list[Observation]) -> int:
    """Compare every setting; return how many there were."""
    models = traced(observations)
    synchronised = [
        entry
        for entry in observations
        if isinstance(entry, StepObservation)
        and entry.setting.synchronisation is Synchronisation.DDP
    ]
    for entry in synchronised:
        ours = gradient_buckets(models[entry.setting.workload], entry.setting.layout)
        assert entry.bucket_bytes == tuple(bucket.size_bytes for bucket in ours), (
            entry.setting.label
        )
    return len(synchronised)


def observations_in(folder: Path) -> list[Observation]:
    return read_observations(folder / OBSERVATIONS)


def workers(folder: Path) -> list[psutil.Process]:
    """Ranks and their launchers at work for a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            argument.startswith(f"{folder}/orders/") for argument in command
        ):
            found.append(process)
    return found


def tasks_in(observations: Sequence[Observation]) -> list[str]:
    """What was measured, in order."""
    beside = ("environment", "processor")
    return [entry.task for entry in observations if entry.kind not in beside]


def rank_process(folder: Path, rank: int) -> psutil.Process:
    """One rank of the running group, found among our own descendants."""
    for process in psutil.Process().children(recursive=True):
        if process in workers(folder) and process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"rank {rank} does not run")
