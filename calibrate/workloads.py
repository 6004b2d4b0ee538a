"""Use case: measure the operators of one traced workload in place, and add them to a profile."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.environment import placement_of
from calibrate.launch import Launcher
from calibrate.replays import first_failure_in, replays_in, with_replays
from calibrate.task import ReplayTask
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import MeasurementFailed
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.workload.step import SymbolicStep, parameters_signature, signature

#: Folder, inside that of a calibration, with one folder per workload that was measured in place.
WORKLOADS: Final = "workloads"
#: As the judge of drawn models: one round scatters by a tenth.
_NUM_ROUNDS: Final = 8
_TARGET_S: Final = 1.2


def measure_workload(
    file: Path,
    launcher: Launcher,
    *,
    micro_batch: int,
    folder: Path,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> MeasuredMachine:
    """Replay a traced step at a micro-batch on one device and return the profile with its operators.

    ``folder``: Of the calibration. The machine is not waited for, and a failure not repeated: who asks wants an answer.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine.
    """
    document = WorkloadDocument.read(file)
    here = placement_of(profile, num_ranks=1, where=str(folder))
    name = document.workload.name
    # Each task is a new process; one launch saves the seconds that starting ranks takes.
    tasks = tuple(
        ReplayTask(
            name=f"{index}: replay {name} micro_batch={micro_batch}",
            round=index,
            workload=name,
            micro_batch=micro_batch,
            document=str(file.resolve()),
            target_s=_TARGET_S,
        )
        for index in range(_NUM_ROUNDS)
    )
    plan = {"stage": "workload", "workload": name, "micro_batches": (micro_batch,)}
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
    observations = measure(
        Campaign(
            folder=folder / WORKLOADS / f"{label}-{_content(document.trace, micro_batch)}",
            plan=plan,
            rounds=(tasks,),
            placement=here,
            lock_timeout_s=0.0,
            tries_again=False,
        ),
        launcher,
        resume=True,
        on_progress=on_progress,
    )
    replays = replays_in(observations)
    if not replays:
        raise MeasurementFailed(f"{name} cannot be replayed: {first_failure_in(observations)}")
    return with_replays(profile, replays)


def _content(trace: SymbolicStep, micro_batch: int) -> str:
    """The operators of a step at a micro-batch, as 12 hexadecimal digits."""
    operators = sorted(set(map(signature, trace.at(micro_batch=micro_batch).operators)))
    text = " ".join([parameters_signature(trace), str(micro_batch), *operators])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_stored_workloads(profile: MeasuredMachine, folder: Path) -> MeasuredMachine:
    """The profile with every workload that was measured in place in the folder of its calibration."""
    if profile.operators is None:
        return profile
    for observations in sorted((folder / WORKLOADS).glob(f"*/{OBSERVATIONS}")):
        profile = with_replays(profile, replays_in(observations))
    return profile
