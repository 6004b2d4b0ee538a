"""A step program as a recursion in max-plus algebra: ``end = max(end of predecessors) + duration``.

Where nothing interferes this says the same as the simulation, for thousands of draws at once.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import WrongArgument
from perfmodel.statistics import BoolArray, FloatArray, IntArray
from perfmodel.step import Cause, StepProgram, Stream, Trace, time_by_cause
from perfmodel.units import Seconds


def step_times(program: StepProgram, durations_s: ArrayLike) -> FloatArray:
    """Duration of the step on a rank that stands for all, without interference, shape ``batch``. [s]

    An operation ends its duration after the last of its predecessors, or of the start of the step
    [Baccelli et al., "Synchronization and Linearity", Wiley 1992, chapter 2].

    ``durations_s``: Shape ``(num_operations, *batch)``. Durations are not checked: a check costs as much as the
    evaluation, and NaN comes out as NaN. [s]
    """
    table_s = np.array(durations_s, dtype=np.float64)
    num_operations = len(program.operations)
    if table_s.ndim < 1 or len(table_s) != num_operations:
        raise ValueError(
            f"durations_s must have shape (num_operations = {num_operations}, *batch), "
            f"got {table_s.shape}"
        )
    rows_s = list(table_s.reshape(num_operations, int(np.prod(table_s.shape[1:]))))
    for end_s, before in zip(rows_s, program.awaited, strict=True):
        if before:
            np.add(end_s, functools.reduce(np.maximum, [rows_s[i] for i in before]), out=end_s)
    awaited = {i for before in program.awaited for i in before}
    last = [row_s for i, row_s in enumerate(rows_s) if i not in awaited]
    step_s: FloatArray = np.max(last, axis=0)
    return step_s.reshape(table_s.shape[1:])


def trace(program: StepProgram, durations_s: FloatArray) -> Trace:
    """Start and end of every operation on a rank that stands for all, without interference. [s]

    As ``step_times`` at one duration of each, shape ``(num_operations,)``, which are finite and >= 0: in
    plain numbers, since arrays of one number take ten times as long.
    """
    table_s = program.checked(np.asarray(durations_s)[:, np.newaxis], column="draw")
    starts_s: list[Seconds] = []
    ends_s: list[Seconds] = []
    for duration_s, before in zip(table_s[:, 0].tolist(), program.awaited, strict=True):
        start_s = 0.0
        for position in before:
            start_s = max(start_s, ends_s[position])
        starts_s.append(start_s)
        ends_s.append(start_s + duration_s)
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
    longer = second.program.lanes
    beats_s = []
    for lane, line in first.program.lanes.items():
        ends_s = first.end_s[0][line]
        # What one more micro-batch adds to a stream is its period.
        period = len(longer[lane]) - len(ends_s)
        if period:
            reach = period * (stages // 2 + _MARGIN)
            middle = len(ends_s) // 2
            window_s = ends_s[middle - reach : middle + reach + period]
            beats_s.append(window_s[period:] - window_s[:-period])
    beat_s = np.concatenate(beats_s)
    return bool(np.ptp(beat_s) <= _TOLERANCE * beat_s.max())


_NEVER: Final = np.iinfo(np.int64).max


def end_times_with_interference(
    program: StepProgram, durations_s: ArrayLike, *, compute_speed: ArrayLike, comm_speed: ArrayLike
) -> FloatArray:
    """Ends since the start of the step, on a rank that stands for all, when overlap is not free. [s]

    While a collective is under way the compute stream runs at ``compute_speed``, and the collective
    at ``comm_speed`` while the compute stream is busy. Other streams are not affected. Every draw has its own clock,
    which goes from one end of an operation to the next.

    ``durations_s``: how long each takes alone, of the shape of the ends: ``(num_operations, num_draws)``. [s]
    ``compute_speed``, ``comm_speed``: Fraction of the speed alone, in (0, 1]: one number, or shape
    ``(num_draws,)``.
    """
    table_s = program.checked(durations_s, column="draw")
    num_draws = table_s.shape[1]
    contended = {
        Stream.COMPUTE: _checked_speed("compute_speed", compute_speed, num_draws),
        Stream.COMM: _checked_speed("comm_speed", comm_speed, num_draws),
    }
    row_of = {lane: row for row, lane in enumerate(program.lanes)}
    rivals = [
        [(row_of[stage, stream], speed) for stream, speed in contended.items()]
        for stage in range(program.num_stages)
        if all((stage, stream) in row_of for stream in contended)
    ]
    operations, awaited = _queues(program)
    rows = np.arange(len(operations))[:, np.newaxis]
    # Which place each stream has come to: as many of its operations have ended.
    places = np.zeros((len(rows), num_draws), dtype=np.int64)
    # Of the operation in that place, what is left of its time alone.
    left_s = table_s[operations[:, 0]]
    now_s, ends_s = np.zeros(num_draws), np.zeros_like(table_s)
    # Every pass ends at least one operation of every draw that has not ended.
    for _ in program.operations:
        is_running: BoolArray = np.all(awaited[:, rows, places] <= places[:, np.newaxis], axis=0)
        speeds = np.ones(is_running.shape)
        for pair in rivals:
            is_contended = is_running[[row for row, _ in pair]].all(axis=0)
            for row, speed in pair:
                speeds[row] = np.where(is_contended, speed, 1.0)
        wait_s = np.where(is_running, left_s / speeds, np.inf)
        step_s = wait_s.min(axis=0)
        step_s[np.isinf(step_s)] = 0.0
        now_s += step_s
        left_s = np.where(is_running, np.maximum(left_s - step_s * speeds, 0.0), left_s)
        has_ended = is_running & (wait_s <= step_s)
        of, draws = has_ended.nonzero()
        ends_s[operations[of, places[of, draws]], draws] = now_s[draws]
        places += has_ended
        left_s[of, draws] = table_s[operations[of, places[of, draws]], draws]
    return ends_s


def _queues(program: StepProgram) -> tuple[IntArray, IntArray]:
    """The operation in each place of a stream; how many must have ended on every stream before it.

    Shapes ``(num_streams, places)`` and ``(num_streams, num_streams, places)``. Behind its last operation a stream has
    one more place, from which nothing ever starts.
    """
    lines = program.lanes.values()
    shape = (len(lines), max(map(len, lines)) + 1)
    operations = np.zeros(shape, dtype=np.int64)
    awaited = np.full((len(lines), *shape), _NEVER, dtype=np.int64)
    at = {i: (row, place) for row, line in enumerate(lines) for place, i in enumerate(line)}
    for i, (row, place) in at.items():
        operations[row, place] = i
        awaited[:, row, place] = 0
        for dependency in program.operations[i].after:
            other, before = at[dependency]
            awaited[other, row, place] = max(awaited[other, row, place], before + 1)
    return operations, awaited


def _checked_speed(name: str, speed: ArrayLike, num_draws: int) -> FloatArray:
    speeds = np.asarray(speed, dtype=np.float64)
    if speeds.shape not in ((), (num_draws,)):
        raise ValueError(
            f"{name} must be one number or have shape (num_draws = {num_draws},), "
            f"got {speeds.shape}"
        )
    is_good = (speeds > 0) & (speeds <= 1)
    if not is_good.all():
        raise WrongArgument(name, f"must be > 0 and <= 1, got {speeds[~is_good].flat[0]}")
    return speeds
