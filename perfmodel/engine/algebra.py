"""A step program as a recursion in max-plus algebra: ``end = max(end of predecessors) + duration``.

Where nothing interferes this says the same as the simulation, for thousands of draws at once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel import checks
from perfmodel.statistics import BoolArray, FloatArray
from perfmodel.step import Cause, Lane, StepProgram, Stream, Trace, time_by_cause
from perfmodel.units import Seconds

#: Draws evaluated together: rows this long hide what calling numpy costs, and the few ends that are
#: still needed stay in the cache (with 200 buckets 0.8 million steps/s at 1024, 2.4 from 16384 on).
CHUNK: Final = 16384


def step_times(program: StepProgram, durations_s: ArrayLike) -> FloatArray:
    """Duration of the step on a rank that stands for all, without interference, shape ``batch``. [s]

    An operation ends its duration after the last of its predecessors, or of the start of the step
    [Baccelli et al., "Synchronization and Linearity", Wiley 1992, chapter 2]. An end is forgotten when nothing
    needs it any more.

    ``durations_s``: Shape ``(num_operations, *batch)``. Durations are not checked: a check costs as much as the
    evaluation, and NaN comes out as NaN. [s]
    """
    table_s, batch = _flattened(program, durations_s)
    awaited, rows, last_rows = _with_shared_rows(program.awaited())
    step_s = np.empty(table_s.shape[1])
    kept_s = np.empty((max(rows) + 1, min(CHUNK, table_s.shape[1])))
    for first in range(0, table_s.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        ends_s = kept_s[:, : step_s[part].size]
        _evaluate(awaited, rows, list(table_s[:, part]), list(ends_s))
        np.max(ends_s[last_rows], axis=0, out=step_s[part])
    return step_s.reshape(batch)


def trace(program: StepProgram, durations_s: FloatArray) -> Trace:
    """Start and end of every operation on a rank that stands for all, without interference. [s]

    As ``step_times`` at one duration of each, shape ``(num_operations,)``, which are finite and >= 0: in
    plain numbers, since arrays of one number take ten times as long.
    """
    table_s = _checked_durations(program, np.asarray(durations_s)[:, np.newaxis])
    starts_s: list[Seconds] = []
    ends_s: list[Seconds] = []
    free_s: dict[Lane, Seconds] = {}
    for operation, duration_s in zip(program.operations, table_s[:, 0].tolist(), strict=True):
        lane = (operation.stage, operation.stream)
        start_s = free_s.get(lane, 0.0)
        for position in operation.after:
            start_s = max(start_s, ends_s[position])
        starts_s.append(start_s)
        free_s[lane] = start_s + duration_s
        ends_s.append(free_s[lane])
    return Trace(program=program, start_s=np.array([starts_s]), end_s=np.array([ends_s]))


#: Sums of equal numbers may differ by rounding.
_TOLERANCE: Final = 1e-9
#: Periods beyond those by which stages lie apart.
_MARGIN: Final = 2


def steady_trace(
    step: Callable[[int], StepProgram],
    durations_s: Callable[[StepProgram], FloatArray],
    *,
    micro_batches: int,
    stages: int,
) -> Trace:
    """The trace of a 1F1B pipeline without the micro-batches that only repeat others; ``trace`` of few.

    Under 1F1B a stage alternates forward and backward passes. What ends in one period depends on this and the last one
    alone, through maxima and sums: a recursion that is homogeneous. So if every end of a period is later by the same
    time than that of the period before, it stays so until the last micro-batch has entered, and every further one adds
    that time [Baccelli et al., "Synchronization and Linearity", Wiley 1992, chapter 3].

    ``step``: The program of some micro-batches.
    ``durations_s``: Shape ``(num_operations,)`` of a program; that of an operation knows no micro-batch. [s]
    """
    # Enough to fill and to drain the stages, and for a stretch between that all streams share.
    few = 3 * (stages + 2 * _MARGIN)
    if micro_batches > few + 1:
        first, second = (
            trace(program, durations_s(program)) for program in (step(few), step(few + 1))
        )
        if _keeps_beat(first, second, stages):
            before, after = time_by_cause(first), time_by_cause(second)
            count = micro_batches - few
            skipped_s = {
                cause: count * (after.get(cause, 0.0) - before.get(cause, 0.0)) for cause in Cause
            }
            # Of paths that take equally long, two traces may find different ones.
            if min(skipped_s.values()) >= -_TOLERANCE * first.step_s:
                return replace(first, skipped_s=skipped_s)
    program = step(micro_batches)
    return trace(program, durations_s(program))


def _keeps_beat(first: Trace, second: Trace, stages: int) -> bool:
    """Whether all that repeats repeats after the same time, in periods that all streams share.

    Streams hold forward passes up to ``stages`` periods ahead: the middle of one is another's later period.
    """
    lines, longer = _ends(first), _ends(second)
    beats_s = []
    for lane, ends_s in lines.items():
        # What one more micro-batch adds to a stream is its period.
        period = len(longer[lane]) - len(ends_s)
        if period:
            reach = period * (stages // 2 + _MARGIN)
            middle = len(ends_s) // 2
            window_s = ends_s[middle - reach : middle + reach + period]
            beats_s.append(window_s[period:] - window_s[:-period])
    beat_s = np.concatenate(beats_s)
    return bool(np.ptp(beat_s) <= _TOLERANCE * beat_s.max())


def _ends(trace: Trace) -> dict[Lane, FloatArray]:
    lines: defaultdict[Lane, list[Seconds]] = defaultdict(list)
    for operation, end_s in zip(trace.program.operations, trace.end_s[0].tolist(), strict=True):
        lines[operation.stage, operation.stream].append(end_s)
    return {lane: np.array(ends_s) for lane, ends_s in lines.items()}


def _flattened(program: StepProgram, durations_s: ArrayLike) -> tuple[FloatArray, tuple[int, ...]]:
    table_s = np.asarray(durations_s, dtype=np.float64, order="C")
    num_operations = len(program.operations)
    if table_s.ndim < 1 or table_s.shape[0] != num_operations:
        raise ValueError(
            f"durations_s must have shape (num_operations = {num_operations}, *batch), "
            f"got {table_s.shape}"
        )
    batch = table_s.shape[1:]
    return table_s.reshape(num_operations, int(np.prod(batch))), batch


def _with_shared_rows(
    awaited: Sequence[tuple[int, ...]],
) -> tuple[list[list[int]], list[int], list[int]]:
    """Rows of the ends that each operation awaits, the row of its own end, and rows that nothing follows.

    Ends share rows unless they are needed together.
    """
    last_use = {i: position for position, before in enumerate(awaited) for i in before}
    rows: list[int] = []
    free: list[int] = []
    num_rows = 0
    for position, before in enumerate(awaited):
        num_rows += not free
        rows.append(free.pop() if free else num_rows - 1)
        free.extend(rows[i] for i in before if last_use[i] == position)
    needed = [[rows[i] for i in before] for before in awaited]
    return needed, rows, [row for i, row in enumerate(rows) if i not in last_use]


def _evaluate(
    awaited: Sequence[Sequence[int]],
    rows: Sequence[int],
    durations_s: Sequence[FloatArray],
    ends_s: Sequence[FloatArray],
) -> None:
    for duration_s, row, before in zip(durations_s, rows, awaited, strict=True):
        end_s = ends_s[row]
        if not before:
            np.copyto(end_s, duration_s)
            continue
        ready_s = ends_s[before[0]]
        for other in before[1:]:
            ready_s = np.maximum(ready_s, ends_s[other], out=end_s)
        np.add(ready_s, duration_s, out=end_s)


_NEVER: Final = np.iinfo(np.intp).max


class Queues:
    """The operations of each stream, and how many must have ended elsewhere before each."""

    def __init__(self, program: StepProgram) -> None:
        self.lanes = program.lanes
        lines: list[list[int]] = [[] for _ in self.lanes]
        for position, operation in enumerate(program.operations):
            lines[self.lanes.index(operation.lane)].append(position)
        # Behind its last operation a stream has one more place, from which nothing ever starts.
        shape = (len(lines), max(map(len, lines)) + 1)
        self.operations = np.zeros(shape, dtype=np.intp)
        """Shape ``(num_streams, places)``: the operation in each place of a stream."""
        self.awaited = np.full((len(lines), *shape), _NEVER, dtype=np.intp)
        """Shape ``(num_streams, num_streams, places)``: ends on the first that a place awaits."""
        count = {
            i: (row, place + 1) for row, line in enumerate(lines) for place, i in enumerate(line)
        }
        for i, (row, after) in count.items():
            place = after - 1
            self.operations[row, place] = i
            self.awaited[:, row, place] = 0
            for dependency in program.operations[i].after:
                other, ends = count[dependency]
                self.awaited[other, row, place] = max(self.awaited[other, row, place], ends)

    def rows(self, stream: Stream) -> list[int]:
        """Rows of a stream, one for every stage that uses it."""
        return [row for row, (_, name) in enumerate(self.lanes) if name is stream]

    def rivals(self) -> list[tuple[int, int]]:
        """Rows of compute and collectives of the same stage."""
        return [
            (compute, comm)
            for compute in self.rows(Stream.COMPUTE)
            for comm in self.rows(Stream.COMM)
            if self.lanes[compute][0] == self.lanes[comm][0]
        ]


class Draws:
    """Where all draws stand: each has its own clock."""

    def __init__(self, queues: Queues, durations_s: FloatArray, speeds: FloatArray) -> None:
        self._queues = queues
        self._durations_s = durations_s
        self._contended_speed = speeds
        self._rivals = queues.rivals()
        self._rows = np.arange(len(queues.lanes))[:, np.newaxis]
        self._places = np.zeros((len(queues.lanes), durations_s.shape[1]), dtype=np.intp)
        """Which place each stream has come to; as many of its operations have ended."""
        self._left_s = durations_s[queues.operations[:, 0]]
        """What is left, alone, of the operation in that place."""
        self._now_s = np.zeros(durations_s.shape[1])
        self.ends_s = np.zeros_like(durations_s)

    def advance(self) -> None:
        """Step every draw to its next end."""
        is_running = self._are_running()
        speed = self._speeds(is_running)
        wait_s = np.where(is_running, self._left_s / speed, np.inf)
        step_s = wait_s.min(axis=0)
        step_s[np.isinf(step_s)] = 0.0
        self._now_s += step_s
        self._left_s = np.where(
            is_running, np.maximum(self._left_s - step_s * speed, 0.0), self._left_s
        )
        self._end(is_running & (wait_s <= step_s))

    def _are_running(self) -> BoolArray:
        is_running = np.ones(self._places.shape, dtype=np.bool_)
        for awaited, ended in zip(self._queues.awaited, self._places, strict=True):
            is_running &= awaited[self._rows, self._places] <= ended
        return is_running

    def _speeds(self, is_running: BoolArray) -> FloatArray:
        speeds = np.ones(is_running.shape)
        for compute, comm in self._rivals:
            is_contended = is_running[compute] & is_running[comm]
            for row in (compute, comm):
                speeds[row] = np.where(is_contended, self._contended_speed[row], 1.0)
        return speeds

    def _end(self, has_ended: BoolArray) -> None:
        rows, draws = has_ended.nonzero()
        ended = self._queues.operations[rows, self._places[rows, draws]]
        self.ends_s[ended, draws] = self._now_s[draws]
        self._places += has_ended
        following = self._queues.operations[rows, self._places[rows, draws]]
        self._left_s[rows, draws] = self._durations_s[following, draws]


def end_times_with_interference(
    program: StepProgram, durations_s: ArrayLike, *, compute_speed: ArrayLike, comm_speed: ArrayLike
) -> FloatArray:
    """Ends since the start of the step, on a rank that stands for all, when overlap is not free. [s]

    While a collective is under way the compute stream runs at ``compute_speed``, and the collective
    at ``comm_speed`` while the compute stream is busy. Other streams are not affected.

    ``durations_s``: how long each takes alone, of the shape of the ends: ``(num_operations, num_draws)``. [s]
    ``compute_speed``, ``comm_speed``: Fraction of the speed alone, in (0, 1]: one number, or shape
    ``(num_draws,)``.
    """
    table_s = _checked_durations(program, durations_s)
    num_draws = table_s.shape[1]
    queues = Queues(program)
    speeds = np.ones((len(queues.lanes), num_draws))
    for stream, name, speed in (
        (Stream.COMPUTE, "compute_speed", compute_speed),
        (Stream.COMM, "comm_speed", comm_speed),
    ):
        checked = _checked_speed(name, speed, num_draws)
        for row in queues.rows(stream):
            speeds[row] = checked
    draws = Draws(queues, table_s, speeds)
    # Every pass ends at least one operation of every draw that has not ended.
    for _ in program.operations:
        draws.advance()
    return draws.ends_s


def _checked_durations(program: StepProgram, durations_s: ArrayLike) -> FloatArray:
    table_s = np.asarray(durations_s, dtype=np.float64)
    num_operations = len(program.operations)
    if table_s.ndim != 2 or table_s.shape[0] != num_operations:
        raise ValueError(
            f"durations_s must have shape (num_operations = {num_operations}, num_draws), "
            f"got {table_s.shape}"
        )
    is_bad = ~(np.isfinite(table_s) & (table_s >= 0))
    if is_bad.any():
        position, draw = np.argwhere(is_bad)[0]
        raise ValueError(
            f"durations_s of {program.operations[position].name} must be finite and >= 0, "
            f"got {table_s[position, draw]} in draw {draw}"
        )
    return table_s


def _checked_speed(name: str, speed: ArrayLike, num_draws: int) -> FloatArray:
    speeds = np.asarray(speed, dtype=np.float64)
    if speeds.shape not in ((), (num_draws,)):
        raise ValueError(
            f"{name} must be one number or have shape (num_draws = {num_draws},), "
            f"got {speeds.shape}"
        )
    is_good = (speeds > 0) & (speeds <= 1)
    if not is_good.all():
        raise checks.WrongArgument(name, f"must be > 0 and <= 1, got {speeds[~is_good].flat[0]}")
    return speeds
