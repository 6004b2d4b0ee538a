"""Use case: measure the operators of one traced workload in place, and add them to a profile."""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from calibrate import launch
from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure
from calibrate.environment import memory_facts, placement_of
from calibrate.replays import first_failure_in, replays_in, start_of, with_replays
from calibrate.task import ReplayTask
from perfmodel.cost.memory import TracedMemory, overhead_of
from perfmodel.documents.observation import is_sealed, read_observations
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UNSEALED, CalibrationUnavailable, MeasurementFailed
from perfmodel.files import is_edit_taken
from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import format_bytes
from perfmodel.workload.step import SymbolicStep, calls_signature, parameters_signature

#: Folder, inside that of a calibration, with one folder per workload that was measured in place.
WORKLOADS: Final = "workloads"
#: As the judge of drawn models on a processor at the standard budget. On a GPU each takes seconds to start CUDA.
_NUM_ROUNDS: Final = 8
_NUM_ROUNDS_OF_GPU: Final = 4
#: A host changes its speed by a tenth within 5 s: all rounds together span tens of seconds, with the starts. [s]
_TARGET_S: Final = 1.0


def in_place(
    document: WorkloadDocument, *, micro_batch: int, code: str | None, world_size: int
) -> ReplayTask:
    """What is measured of a workload.

    ``code``: Of the model, as FILE.py:FACTORY; None where it is known by its trace alone.
    ``world_size``: Ranks of this node on which it trains as well, under DistributedDataParallel.
    """
    name = document.workload.name
    return ReplayTask(
        name=f"{'train' if code else 'replay'} {name} micro_batch={micro_batch}",
        round=0,
        workload=name,
        micro_batch=micro_batch,
        code=code,
        world_size=world_size,
        target_s=_TARGET_S,
    )


def measure_workload(
    file: Path,
    task: ReplayTask,
    *,
    folder: Path,
    profile: MeasuredMachine,
    on_progress: Callable[[Progress], None],
) -> str:
    """Train a model and replay its step on one device, beside its calibration; say why it did not train, if so.

    ``folder``: Of the calibration. The machine is not waited for, and a failure not repeated: who asks wants an answer.
    Where memory does not hold all ranks, one trains alone.

    Raises
    ------
    CalibrationUnavailable
        If the profile describes another machine, or the folder is of no calibration: nothing is written there.
    """
    if not (folder / OBSERVATIONS).exists():
        raise CalibrationUnavailable(f"{folder} holds no {OBSERVATIONS} of a calibration")
    document = WorkloadDocument.read(file)
    task = task.model_copy(update={"document": str(file.resolve())})
    if lacking := _lack_of_memory(document, task):
        task = task.model_copy(update={"world_size": 1})
    here = placement_of(profile, num_ranks=task.world_size, where=str(folder))
    name = task.workload
    plan = {"stage": "workload", "workload": name, "micro_batches": (task.micro_batch,)}
    observations = measure(
        Campaign(
            folder=_folder(document, folder, task.micro_batch),
            plan=plan,
            rounds=_in_starts(task, profile),
            placement=here,
            lock_timeout_s=0.0,
            tries_again=False,
        ),
        launch.TorchrunLauncher(),
        resume=True,
        on_progress=on_progress,
    )
    replays = replays_in(observations)
    # Later rounds of a GPU train alone: without the operators of the first they tell nothing.
    if not any(entry.operators for entry in replays):
        raise MeasurementFailed(f"{name} cannot be replayed: {first_failure_in(observations)}")
    untrained = next((entry.untrained for entry in replays if entry.untrained), "")
    together = first_failure_in(observations, world_size=task.world_size)
    return untrained or lacking or (together if task.world_size > 1 else "")


def _lack_of_memory(document: WorkloadDocument, task: ReplayTask) -> str:
    """What ranks under DistributedDataParallel need if this host has not so much left; empty if it has."""
    if task.world_size == 1 or document.memory is None:
        return ""
    overhead = overhead_of(document.memory, "cpu")
    memory = TracedMemory(trace=document.trace, memory=document.memory, overhead=overhead)
    [rank] = memory.ranks(Layout(dp=task.world_size, micro_batch=task.micro_batch))
    facts, needed_bytes = memory_facts(), task.world_size * rank.needed_bytes
    left_bytes = min(facts["available_bytes"], facts["limit_bytes"] or math.inf)
    said = f"{format_bytes(needed_bytes)} of memory needed, {format_bytes(left_bytes)} left"
    return f"under DDP: {said}" if needed_bytes > left_bytes else ""


def is_unfinished(
    document: WorkloadDocument,
    folder: Path,
    task: ReplayTask,
    *,
    profile: MeasuredMachine,
    known_ranks: Collection[int],
) -> bool:
    """Whether rounds of a measurement that was begun are missing, or all that are not known by another name.

    ``folder``: Of the calibration. ``known_ranks``: Numbers of ranks on which the step was measured by any name.
    """
    observations = _folder(document, folder, task.micro_batch) / OBSERVATIONS
    entries = read_observations(observations) if observations.exists() else ()
    names = {each.name for start in _in_starts(task, profile) for each in start}
    done = names & {entry.task for entry in entries}
    return done < names if done else task.world_size not in known_ranks


def _folder(document: WorkloadDocument, folder: Path, micro_batch: int) -> Path:
    """What was measured of a workload at a micro-batch, in the folder of a calibration."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", document.workload.name)
    return folder / WORKLOADS / f"{label}-{_content(document.trace, micro_batch)}"


def _in_starts(task: ReplayTask, profile: MeasuredMachine) -> tuple[tuple[ReplayTask, ...], ...]:
    """All runs of a task on a machine."""
    return in_starts([task], _NUM_ROUNDS_OF_GPU if profile.asynchronous else _NUM_ROUNDS)


def in_starts(tasks: Sequence[ReplayTask], num_rounds: int) -> tuple[tuple[ReplayTask, ...], ...]:
    """Rounds of all tasks, by start of processes; each run is a copy of a process that has measured nothing.

    A copy has the addresses and the heap of what it was copied from, so that one start may be fast and another slow.
    Before each training on several ranks comes what one rank does; they share the time.
    """
    runs: list[ReplayTask] = []
    for task in tasks:
        if task.world_size == 1:
            runs.append(task)
            continue
        half = task.model_copy(update={"target_s": task.target_s / 2})
        name = f"{task.name} on {task.world_size} ranks"
        runs += [half.model_copy(update={"world_size": 1}), half.model_copy(update={"name": name})]
    rounds = (
        run.model_copy(update={"name": f"{index}: {run.name}", "round": index})
        for index in range(num_rounds)
        for run in runs
    )
    return tuple(tuple(start) for _, start in groupby(rounds, lambda run: start_of(run.round)))


def _content(trace: SymbolicStep, micro_batch: int) -> str:
    """The calls of a step at a micro-batch, as 12 hexadecimal digits."""
    calls = calls_signature(trace.at(micro_batch=micro_batch))
    text = " ".join([parameters_signature(trace), str(micro_batch), calls])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_stored_workloads(profile: MeasuredMachine, folder: Path) -> MeasuredMachine:
    """The profile with every workload that was measured in place in the folder of its calibration.

    Raises ``CalibrationUnavailable`` if one of them carries no seals: a changed digit would be believed.
    """
    if profile.operators is None:
        return profile
    for path in sorted((folder / WORKLOADS).glob(f"*/{OBSERVATIONS}")):
        replays = replays_in(path)
        if replays and not (is_sealed(path) or is_edit_taken(str(path))):
            raise CalibrationUnavailable(
                f"{path}: its lines carry no seals: an older version measured them; remove the file, and predict "
                f"measures again{UNSEALED}"
            )
        profile = with_replays(profile, replays)
    return profile
