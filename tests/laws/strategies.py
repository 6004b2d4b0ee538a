"""Random step programs, durations and speeds for the laws."""

import numpy as np
from hypothesis import strategies as st

from perfmodel.layout import Layout, Schedule
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Interference, Operation, StepProgram, Stream

#: Zero is likely, and spans of six orders of magnitude meet.
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0]))
speeds = st.floats(0.1, 1.0)
interferences = st.builds(Interference, compute_speed=speeds, comm_speed=speeds)


@st.composite
def programs(draw: st.DrawFn, *, max_operations: int = 12) -> StepProgram:
    """Operations on any stream of two stages, each after any earlier ones in any order."""
    operations = []
    for position in range(draw(st.integers(1, max_operations))):
        after: list[int] = []
        if position:
            after = draw(st.lists(st.integers(0, position - 1), max_size=3, unique=True))
        operations.append(
            Operation(
                name=f"operation[{position}]",
                stream=draw(st.sampled_from(Stream)),
                cause=Cause.FORWARD,
                after=tuple(after),
                stage=draw(st.integers(0, 1)),
            )
        )
    return StepProgram(tuple(operations))


@st.composite
def durations(draw: st.DrawFn, program: StepProgram, *, num_ranks: int = 1) -> FloatArray:
    """Shape ``(num_ranks, num_operations)``; one duration for all ranks of a collective. [s]"""
    columns = []
    for operation in program.operations:
        if operation.is_collective:
            columns.append([draw(seconds)] * num_ranks)
        else:
            columns.append(draw(st.lists(seconds, min_size=num_ranks, max_size=num_ranks)))
    return np.array(columns).T


@st.composite
def pipelines(draw: st.DrawFn) -> Layout:
    """Any schedule, also with fewer micro-batches than stages, and in multiples where it must be."""
    stages = draw(st.sampled_from([2, 3, 4, 8]))
    schedule = draw(st.sampled_from(Schedule))
    interleaves = schedule is Schedule.ONE_F_ONE_B
    interleave = draw(st.sampled_from([1, 2, 3])) if interleaves else 1
    rounds = draw(st.integers(1 if interleave > 1 else 0, 4))
    rest = draw(st.integers(0 if rounds else 1, stages - 1)) if interleave == 1 else 0
    return Layout(
        pp=stages, interleave=interleave, schedule=schedule, accumulation=rounds * stages + rest
    )
