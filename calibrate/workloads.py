"""Use case: measure the operators of one traced workload in place, and add them to a profile."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from calibrate import launch
from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.environment import placement_of
from calibrate.replays import first_failure_in, replays_in, with_replays
from calibrate.task import ReplayTask
from perfmodel.documents.observation import (
    FailedObservation,
    ReplayObservation,
    read_observations,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import MeasurementFailed
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.workload.step import SymbolicStep, calls_signature, parameters_signature

#: Folder, inside that of a calibration, with one folder per workload that was measured in place.
WORKLOADS: Final = "workloads"
#: As the judge of drawn models: one round scatters by a tenth.
_NUM_ROUNDS: Final = 8
_TARGET_S: Final = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """What is measured of a workload."""

    micro_batch: int
    code: str | None = None
    """Of the model, as FILE.py:FACTORY; None where it is known by its trace alone."""
    world_size: int = 1
    """Ranks of this node on which it trains as well, under DistributedDataParallel."""

    def task_name(self, workload: str) -> str:
        """Of its runs on one rank, without their round."""
        return f"{'train' if self.code else 'replay'} {workload} micro_batch={self.micro_batch}"


def measure_workload(
    file: Path,
    asked: InPlace,
    *,
    folder: Path,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> str:
    """Train a model and replay its step on one device, beside its calibration; say why it did not train, if so.

    ``folder``: Of the calibration. The machine is not waited for, and a failure not repeated: who asks wants an answer.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine.
    """
    document = WorkloadDocument.read(file)
    here = placement_of(profile, num_ranks=asked.world_size, where=str(folder))
    name = document.workload.name
    task = ReplayTask(
        name=asked.task_name(name),
        round=0,
        workload=name,
        micro_batch=asked.micro_batch,
        document=str(file.resolve()),
        code=asked.code,
        world_size=asked.world_size,
        target_s=_TARGET_S,
    )
    plan = {"stage": "workload", "workload": name, "micro_batches": (asked.micro_batch,)}
    observations = measure(
        Campaign(
            folder=_folder(document, folder, asked.micro_batch),
            plan=plan,
            rounds=(repeated(task, _NUM_ROUNDS),),
            placement=here,
            lock_timeout_s=0.0,
            tries_again=False,
        ),
        launch.TorchrunLauncher(),
        resume=True,
        on_progress=on_progress,
    )
    replays = replays_in(observations)
    if not any(entry.world_size == 1 for entry in replays):
        raise MeasurementFailed(f"{name} cannot be replayed: {first_failure_in(observations)}")
    untrained = next((entry.untrained for entry in replays if entry.untrained), "")
    together = first_failure_in(observations, world_size=asked.world_size)
    return untrained or (together if asked.world_size > 1 else "")


def is_unfinished(document: WorkloadDocument, folder: Path, asked: InPlace) -> bool:
    """Whether rounds of a measurement that was begun are missing. ``folder``: Of the calibration."""
    observations = _folder(document, folder, asked.micro_batch) / OBSERVATIONS
    if not observations.exists():
        return False
    name = asked.task_name(document.workload.name)
    names = {name} if asked.world_size == 1 else {name, _on_ranks(name, asked.world_size)}
    found = {
        entry.task
        for entry in read_observations(observations)
        if isinstance(entry, ReplayObservation | FailedObservation)
        and entry.task.partition(": ")[2] in names
    }
    return 0 < len(found) < _NUM_ROUNDS * len(names)


def _folder(document: WorkloadDocument, folder: Path, micro_batch: int) -> Path:
    """What was measured of a workload at a micro-batch, in the folder of a calibration."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", document.workload.name)
    return folder / WORKLOADS / f"{label}-{_content(document.trace, micro_batch)}"


def _on_ranks(name: str, world_size: int) -> str:
    return f"{name} on {world_size} ranks"


def repeated(task: ReplayTask, num_rounds: int) -> tuple[ReplayTask, ...]:
    """Runs of a task in a row, each a process of its own: one launch saves the seconds that starting ranks takes.

    Before each training on several ranks comes what one rank does; they share the time.
    """
    tasks, ranks = [task], task.world_size
    if ranks > 1:
        share = {"target_s": task.target_s / 2}
        several: tuple[dict[str, Any], ...] = (
            {"world_size": 1},
            {"name": _on_ranks(task.name, ranks)},
        )
        tasks = [task.model_copy(update=share | update) for update in several]
    return tuple(
        each.model_copy(update={"name": f"{index}: {each.name}", "round": index})
        for index in range(num_rounds)
        for each in tasks
    )


def _content(trace: SymbolicStep, micro_batch: int) -> str:
    """The calls of a step at a micro-batch, as 12 hexadecimal digits."""
    calls = calls_signature(trace.at(micro_batch=micro_batch))
    text = " ".join([parameters_signature(trace), str(micro_batch), calls])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_stored_workloads(profile: MeasuredMachine, folder: Path) -> MeasuredMachine:
    """The profile with every workload that was measured in place in the folder of its calibration."""
    if profile.operators is None:
        return profile
    for observations in sorted((folder / WORKLOADS).glob(f"*/{OBSERVATIONS}")):
        profile = with_replays(profile, replays_in(observations))
    return profile
