"""Where the time of a step went: the chain of operations that nothing else could have hidden."""

from perfmodel.step.program import Cause, Trace
from perfmodel.units import Seconds

#: Ends and starts that should be equal may differ by rounding of long sums.
_TOLERANCE = 1e-9


def critical_path(trace: Trace, *, rank: int = 0) -> tuple[int, ...]:
    """Positions of the operations that determine the end of the step, first to last.

    From the last operation backwards, always to the predecessor that ended last: it is the one
    that the operation waited for.
    """
    ends_s = trace.end_s[rank]
    predecessors = trace.program.predecessors()
    position = int(ends_s.argmax())
    path = [position]
    while predecessors[position]:
        position = max(predecessors[position], key=lambda index: float(ends_s[index]))
        path.append(position)
    return tuple(reversed(path))


def time_by_cause(trace: Trace, *, rank: int = 0) -> dict[Cause, Seconds]:
    """Time on the critical path by cause; sums to the step. [s]"""
    result: dict[Cause, Seconds] = {}
    done_s = 0.0
    for position in critical_path(trace, rank=rank):
        cause = trace.program.operations[position].cause
        end_s = float(trace.end_s[rank][position])
        if end_s > done_s * (1 + _TOLERANCE):
            result[cause] = result.get(cause, 0.0) + end_s - done_s
            done_s = end_s
    return result
