"""A pipeline with many micro-batches: those between are counted, once all streams keep one beat.

Under 1F1B a stage alternates forward and backward passes. What ends in one period depends on this and the last one
alone, through maxima and sums: a recursion that is homogeneous. So if every end of a period is later by the same
time than that of the period before, it stays so until the last micro-batch has entered, and every further one adds
that time [Baccelli et al., "Synchronization and Linearity", Wiley 1992, chapter 3].
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from perfmodel.engine import algebra
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Lane, StepProgram, Trace, time_by_cause
from perfmodel.units import Seconds

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
    """The trace of a 1F1B pipeline without the micro-batches that only repeat others; ``algebra.trace`` of few.

    ``step``: The program of some micro-batches.
    ``durations_s``: Shape ``(num_operations,)`` of a program; that of an operation knows no micro-batch. [s]
    """
    # Enough to fill and to drain the stages, and for a stretch between that all streams share.
    few = 3 * (stages + 2 * _MARGIN)
    if micro_batches > few + 1:
        first, second = (
            algebra.trace(program, durations_s(program)) for program in (step(few), step(few + 1))
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
    return algebra.trace(program, durations_s(program))


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
