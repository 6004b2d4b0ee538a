"""Use case: measure the operators of one traced workload in place, and add them to a profile."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

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


def measure_workload(
    file: Path,
    *,
    micro_batch: int,
    code: str | None,
    folder: Path,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> str:
    """Train a model and replay its step on one device, beside its calibration; say why it did not train, if so.

    ``code``: Of the model, as FILE.py:FACTORY; None where it is known by its trace alone. ``folder``: Of the
    calibration. The machine is not waited for, and a failure not repeated: who asks wants an answer.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine.
    """
    document = WorkloadDocument.read(file)
    here = placement_of(profile, num_ranks=1, where=str(folder))
    name = document.workload.name
    task = ReplayTask(
        name=_task_name(name, micro_batch, code),
        round=0,
        workload=name,
        micro_batch=micro_batch,
        document=str(file.resolve()),
        code=code,
        target_s=_TARGET_S,
    )
    plan = {"stage": "workload", "workload": name, "micro_batches": (micro_batch,)}
    observations = measure(
        Campaign(
            folder=_folder(document, folder, micro_batch),
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
    if not replays:
        raise MeasurementFailed(f"{name} cannot be replayed: {first_failure_in(observations)}")
    return next((entry.untrained for entry in replays if entry.untrained), "")


def is_unfinished(
    document: WorkloadDocument, folder: Path, *, micro_batch: int, code: str | None
) -> bool:
    """Whether a measurement of this workload was stopped before its last round. ``folder``: Of the calibration."""
    observations = _folder(document, folder, micro_batch) / OBSERVATIONS
    if not observations.exists():
        return False
    name = _task_name(document.workload.name, micro_batch, code)
    found = [
        entry
        for entry in read_observations(observations)
        if isinstance(entry, ReplayObservation | FailedObservation)
        and entry.task.partition(": ")[2] == name
    ]
    return 0 < len({entry.task for entry in found}) < _NUM_ROUNDS


def _task_name(workload: str, micro_batch: int, code: str | None) -> str:
    return f"{'train' if code else 'replay'} {workload} micro_batch={micro_batch}"


def _folder(document: WorkloadDocument, folder: Path, micro_batch: int) -> Path:
    """What was measured of a workload at a micro-batch, in the folder of a calibration."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", document.workload.name)
    return folder / WORKLOADS / f"{label}-{_content(document.trace, micro_batch)}"


def repeated(task: ReplayTask, num_rounds: int) -> tuple[ReplayTask, ...]:
    """Runs of a task in a row, each a process of its own: one launch saves the seconds that starting ranks takes."""
    return tuple(
        task.model_copy(update={"name": f"{index}: {task.name}", "round": index})
        for index in range(num_rounds)
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
