"""Use case: measure the operators of one traced workload in place, and add them to a profile."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.environment import placement_of
from calibrate.launch import Launcher
from calibrate.locks import LOCK_TIMEOUT_S
from calibrate.replays import first_failure_in, replays_in, with_replays
from calibrate.task import ReplayTask, Task
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.workload.step import SymbolicStep, parameters_signature, signature

#: Folder, inside that of a calibration, with one folder per workload that was measured in place.
WORKLOADS: Final = "workloads"
#: As the judge of drawn models: one round scatters by a tenth.
_NUM_ROUNDS: Final = 8
_TARGET_S: Final = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """What the user asked for."""

    folder: Path
    """Of the calibration that is added to."""
    document: Path
    micro_batches: tuple[int, ...] = ()
    """Where the step is replayed; by default where it was traced."""
    resume: bool = False
    waits: bool = True
    """For the machine, where another measurement has it."""
    by_content: bool = False
    """Whether the folder of its measurements is named by what is measured, and not by the workload alone."""


def measure_workload(
    request: WorkloadRequest,
    launcher: Launcher,
    *,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> MeasuredMachine:
    """Replay a traced step on one device and return the profile with its operators.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine or has no costs of operators.
    """
    document = WorkloadDocument.read(request.document)
    here = placement_of(profile, num_ranks=1, where=str(request.folder))
    if profile.operators is None:
        raise CalibrationUnavailable(
            f"{request.folder}: must hold a profile with costs of operators, got none; "
            "run perfmodel calibrate without --workload first"
        )
    micro_batches = request.micro_batches or (document.trace.traced_micro_batches[0],)
    name = document.workload.name
    # Each task is a new process; one launch saves the seconds that starting ranks takes.
    tasks = tuple(
        _task(request, name, micro_batch, index)
        for index in range(_NUM_ROUNDS)
        for micro_batch in micro_batches
    )
    plan = {"stage": "workload", "workload": name, "micro_batches": micro_batches}
    label = _file_name(name)
    if request.by_content:
        label = f"{label}-{_content(document.trace, micro_batches)}"
    observations = measure(
        Campaign(
            folder=request.folder / WORKLOADS / label,
            plan=plan,
            rounds=(tasks,),
            placement=here,
            lock_timeout_s=LOCK_TIMEOUT_S if request.waits else 0.0,
            # Who only asks for a prediction does not wait for the same failure each time.
            tries_again=not request.by_content,
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    replays = replays_in(observations)
    if not replays:
        raise MeasurementFailed(f"{name} cannot be replayed: {first_failure_in(observations)}")
    return with_replays(profile, replays)


def _content(trace: SymbolicStep, micro_batches: Sequence[int]) -> str:
    """The operators of a step at some micro-batches, as 12 hexadecimal digits."""
    steps = [trace.at(micro_batch=batch) for batch in micro_batches]
    operators = sorted({signature(operator) for step in steps for operator in step.operators})
    text = " ".join([parameters_signature(trace), *map(str, micro_batches), *operators])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _task(request: WorkloadRequest, name: str, micro_batch: int, index: int) -> Task:
    return ReplayTask(
        name=f"{index}: replay {name} micro_batch={micro_batch}",
        round=index,
        workload=name,
        micro_batch=micro_batch,
        document=str(request.document.resolve()),
        target_s=_TARGET_S,
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def with_stored_workloads(profile: MeasuredMachine, folder: Path) -> MeasuredMachine:
    """The profile with every workload that was measured in place in the folder of its calibration."""
    if profile.operators is None:
        return profile
    for observations in sorted((folder / WORKLOADS).glob(f"*/{OBSERVATIONS}")):
        profile = with_replays(profile, replays_in(observations))
    return profile
