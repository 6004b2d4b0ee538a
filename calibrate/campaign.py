"""Carry out rounds of tasks in fresh processes, so that an interruption loses seconds."""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from calibrate.environment import Placement
from calibrate.gpus import refuse_used, sampled
from calibrate.launch import Launch, Launcher
from calibrate.locks import LOCK_TIMEOUT_S, folder_to_itself, machine_to_itself
from calibrate.task import StepTask, Task, WorkOrder, failure_of
from calibrate.virtual import Truth
from perfmodel.documents.observation import (
    EnvironmentObservation,
    FailedObservation,
    Observation,
    failures,
    read_observations,
    tasks_done,
)
from perfmodel.errors import (
    IncomparableRuns,
    InvalidDocument,
    MeasurementFailed,
    PerfModelError,
    UsageError,
    reading,
    why,
)
from perfmodel.files import (
    append_line,
    is_edit_taken,
    read_json,
    read_text,
    seal_problem,
    sealed,
    trim_unfinished_line,
    unsealed_content,
    write_atomically,
)
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.units import Seconds

OBSERVATIONS: Final = "observations.jsonl"
PLAN: Final = "plan.json"
#: How rank 0 announces a finished task on its standard output.
DONE_PREFIX: Final = "done: "
#: How it announces one that begins.
BEGIN_PREFIX: Final = "begin: "
#: The slowest single task (the largest collective, a cold start of torch) is far below this.
STALL_TIMEOUT_S: Final = 180.0
#: New processes for a task on a GPU that ended its processes: errors of CUDA and NCCL come and go.
_TRIES: Final = 2
#: A device on which this number of tasks in a row end all processes is of no use.
_MOST_IN_A_ROW: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a campaign is."""

    done: int
    total: int
    task: str
    """The task that was finished last, or what is being waited for."""
    is_waiting: bool = False
    """Whether nothing is being measured: such time says nothing about the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Rounds of tasks, each round in a fresh process group, and the folder that they fill."""

    folder: Path
    plan: Mapping[str, object]
    """What is measured: a resumed campaign must have the same."""
    rounds: Sequence[Sequence[Task]]
    placement: Placement
    lock_timeout_s: Seconds = LOCK_TIMEOUT_S
    """How long to wait for a machine that another measurement holds."""
    tries_again: bool = True
    """Whether ``resume`` tries again what failed before."""


def measure(
    campaign: Campaign,
    launcher: Launcher,
    *,
    resume: bool,
    on_progress: Callable[[Progress], None],
) -> Path:
    """Run what is not done yet; return the file of observations.

    Raises
    ------
    UsageError
        If another campaign fills the folder, or it holds observations and ``resume`` is not given, or
        those of another plan.
    IncomparableRuns
        If the observations there come from another machine.
    MeasurementFailed, Interrupted
        From the launcher; everything finished is on disk.
    """
    here, output = campaign.placement, campaign.folder / OBSERVATIONS
    # Nodes of one run share the folder, and may share a machine: the first one holds both for all.
    is_first_node = here.topology.node_rank == 0
    with ExitStack() as held:
        if is_first_node:
            held.enter_context(folder_to_itself(campaign.folder))
        ranks = _Ranks(campaign, output, resume=resume, on_progress=on_progress)
        # Virtual time is no one's.
        if is_first_node and here.device_kind != "virtual":
            held.enter_context(machine_to_itself(ranks.wait, timeout_s=campaign.lock_timeout_s))
        refuse_used(here.gpus)
        slowed = None if here.truth is None else Truth.read(here.truth).throttling
        if slowed is not None:
            append_line(output, slowed.model_dump_json())
        for index, tasks in enumerate(campaign.rounds):
            while pending := ranks.pending(tasks):
                launch = Launch(
                    arguments=(str(_write_order(campaign, index, pending, output)),),
                    topology=here.topology,
                    conditions=here.conditions,
                    stall_timeout_s=STALL_TIMEOUT_S,
                    on_line=ranks.hear,
                    last_progress=ranks.last_progress,
                )
                try:
                    with sampled(output, here.gpus):
                        launcher.run(launch)
                except MeasurementFailed as error:
                    ranks.recover(error, pending)
                else:
                    break
    return output


class _Ranks:
    """How far the ranks of a campaign are; tasks that ended all of them are tried again once, then left out."""

    def __init__(
        self,
        campaign: Campaign,
        output: Path,
        *,
        resume: bool,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._done, self._too_large = _prepare(campaign, output, resume=resume)
        topology = campaign.placement.topology
        self._is_first_node = topology.node_rank == 0
        # Errors of a processor's ranks come back; other nodes would not know of another try.
        self._may_try = campaign.placement.device_kind != "cpu" and topology.num_nodes == 1
        self._output, self._on_progress = output, on_progress
        self._num_before = len(read_observations(output)) if output.exists() else 0
        self._total = sum(len(tasks) for tasks in campaign.rounds)
        self._num_done = sum(t.name in self._done for tasks in campaign.rounds for t in tasks)
        self._last_s: Seconds = 0.0
        self._begun = ""
        """The task under way, as rank 0 announced it."""
        self._tries: Counter[str] = Counter()
        self._in_a_row = 0

    def pending(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that a new launch is to carry out."""
        self._last_s, self._begun = time.monotonic(), ""
        return [
            task
            for task in tasks
            if task.name not in self._done
            and not (isinstance(task, StepTask) and is_too_large(task.setting, self._too_large))
        ]

    def hear(self, line: str) -> None:
        """Take note of what rank 0 announces."""
        if line.startswith(BEGIN_PREFIX):
            self._begun = line.removeprefix(BEGIN_PREFIX).strip()
        elif line.startswith(DONE_PREFIX):
            self._last_s, self._in_a_row = time.monotonic(), 0
            self._num_done += 1
            self._tell(line.removeprefix(DONE_PREFIX).strip(), is_waiting=False)

    def wait(self, words: str) -> None:
        """Tell what is being waited for."""
        self._tell(words, is_waiting=True)

    def _tell(self, words: str, *, is_waiting: bool) -> None:
        done, total = self._num_done, self._total
        self._on_progress(Progress(done=done, total=total, task=words, is_waiting=is_waiting))

    def last_progress(self) -> Seconds:
        """When a task ended last: the first node alone sees it, and torchrun ends the others with it. [s]"""
        return self._last_s if self._is_first_node else time.monotonic()

    def recover(self, error: MeasurementFailed, pending: Sequence[Task]) -> None:
        """Decide what need not run again after ranks have ended, and say so.

        Raises
        ------
        MeasurementFailed
            The error, where another try makes no sense.
        """
        words = "a step did not fit into memory; going on without it"
        if _found(self._output)[1] == self._too_large:
            words = self._next_try(error, pending)
        done, self._too_large = _found(self._output)
        entries = read_observations(self._output)[self._num_before :]
        self._done = done | {e.task for e in entries if isinstance(e, FailedObservation)}
        self.wait(words)

    def _next_try(self, error: MeasurementFailed, pending: Sequence[Task]) -> str:
        task = next((task for task in pending if task.name == self._begun), None)
        if task is None or not self._may_try:
            raise error
        self._tries[task.name] += 1
        if self._tries[task.name] < _TRIES:
            return f"{task.name} ended the ranks; it is tried again in new processes"
        self._in_a_row += 1
        if self._in_a_row == _MOST_IN_A_ROW:
            raise error
        reason = str(error).partition("; ")[0]
        append_line(self._output, failure_of(task, reason).model_dump_json())
        return f"{task.name} ended the ranks twice; going on without it"


def _found(output: Path) -> tuple[frozenset[str], frozenset[RunSetting]]:
    """Names of the tasks done before, and settings that memory did not hold."""
    trim_unfinished_line(output)
    observations = read_observations(output)
    return tasks_done(observations), too_large_of(observations)


def too_large_of(observations: Iterable[Observation]) -> frozenset[RunSetting]:
    """Settings that memory did not hold."""
    failed = (entry for entry in observations if isinstance(entry, FailedObservation))
    return frozenset(entry.setting for entry in failed if entry.is_too_large)


def is_too_large(setting: RunSetting, too_large: Collection[RunSetting]) -> bool:
    """Whether memory did not hold this, or less: no more samples of the same model, no more around it."""
    return any(
        failed.workload == setting.workload
        and failed.micro_batch <= setting.micro_batch
        and (
            failed.synchronisation is Synchronisation.NONE
            or setting.synchronisation is not Synchronisation.NONE
        )
        for failed in too_large
    )


def _prepare(
    campaign: Campaign, output: Path, *, resume: bool
) -> tuple[frozenset[str], frozenset[RunSetting]]:
    """What was found before; refuses to mix plans or machines."""
    plan, here = campaign.folder / PLAN, campaign.placement
    if here.topology.node_rank > 0:
        # Node 0 guards the shared folder and writes to it; the others only need the same tasks.
        return _found(output) if output.exists() else (frozenset(), frozenset())
    # Ranks that never started leave an empty file.
    if not output.exists() or output.stat().st_size == 0:
        write_plan(campaign.folder, campaign.plan)
        return frozenset(), frozenset()
    if not resume:
        raise UsageError(
            f"{campaign.folder}: holds observations already; "
            "add --resume to continue them, or choose another --out"
        )
    if not plan.exists():
        raise _other_plan(plan)
    keep_plan(plan, campaign.plan)
    trim_unfinished_line(output)
    observations = read_observations(output)
    for entry in observations:
        if isinstance(entry, EnvironmentObservation) and entry.fingerprint != here.fingerprint:
            raise IncomparableRuns(
                f"{output}: was measured on another machine (fingerprint {entry.fingerprint[:12]}, "
                f"this one is {here.fingerprint[:12]}); choose another --out"
            )
    done, too_large = _found(output)
    failed = () if campaign.tries_again else failures(observations)
    return done | {entry.task for entry in failed}, too_large


def write_plan(folder: Path, plan: Mapping[str, object]) -> None:
    """Say what a campaign sets out to measure, before it does."""
    write_atomically(folder / PLAN, _text(plan))


def keep_plan(path: Path, plan: Mapping[str, object]) -> None:
    """Write down what is to be done; if it is written, ``UsageError`` unless it is the same."""
    if not path.exists():
        write_atomically(path, _text(plan))
        return
    with reading(path, "plan"):
        written = read_text(path)
    if written != _text(plan):
        raise _other_plan(path)


def _other_plan(path: Path) -> UsageError:
    return UsageError(
        f"{path}: the interrupted run had another plan; repeat its options (budget, models, "
        "seed, ranks) with its version of perfmodel, or choose another --out"
    )


def _text(plan: Mapping[str, object]) -> str:
    return sealed(json.dumps(plan, indent=1)) + "\n"


def read_plan(folder: Path) -> dict[str, Any]:
    """What a campaign set out to measure; ``InvalidDocument`` if the folder does not say."""
    path = folder / PLAN
    with reading(path, "plan"):
        plan = read_json(path)
    if not isinstance(plan, dict):
        raise InvalidDocument(f"{path}: plan must be an object, got {plan!r:.40}")
    if (edited := seal_problem(plan)) and not is_edit_taken(str(path)):
        raise InvalidDocument(f"{path}: {edited}; measure again into another --out")
    return unsealed_content(plan)


def _write_order(campaign: Campaign, index: int, tasks: Sequence[Task], output: Path) -> Path:
    path = campaign.folder / "orders" / f"round-{index}.json"
    WorkOrder(
        device_kind=campaign.placement.device_kind,
        truth=campaign.placement.truth,
        output=str(output.resolve()),
        tasks=tuple(tasks),
    ).write(path)
    try:
        output.touch()
    except OSError as error:
        raise PerfModelError(f"{output}: cannot be written: {why(error)}") from error
    return path.resolve()
