"""Which operations a step waited for, and what a program refuses to be."""

import numpy as np
import pytest

from perfmodel.engine.simulate import simulate
from perfmodel.step import (
    Cause,
    Operation,
    StepProgram,
    Stream,
    critical_path,
    time_by_cause,
)


def operation(stream: Stream, cause: Cause, *after: int) -> Operation:
    return Operation(name=cause.value, stream=stream, cause=cause, after=after)


#: The all-reduce runs beside the backward pass; the optimizer waits for both.
PROGRAM = StepProgram(
    (
        operation(Stream.COMPUTE, Cause.FORWARD),
        operation(Stream.COMPUTE, Cause.BACKWARD),
        operation(Stream.COMM, Cause.ALL_REDUCE, 0),
        operation(Stream.COMPUTE, Cause.OPTIMIZER, 2),
    )
)


def test_the_path_goes_through_what_ended_last() -> None:
    """Forward 2, then backward 3 beside all-reduce 4: ends 2, 5, 6; the optimizer ends at 7."""
    trace = simulate(PROGRAM, np.array([[2.0, 3.0, 4.0, 1.0]]))
    assert critical_path(trace) == (0, 2, 3)
    assert time_by_cause(trace) == pytest.approx(
        {Cause.FORWARD: 2.0, Cause.ALL_REDUCE: 4.0, Cause.OPTIMIZER: 1.0}
    )


def test_hidden_communication_takes_no_time() -> None:
    """Backward 5 beside all-reduce 4: 2 + 5 + 1 = 8."""
    trace = simulate(PROGRAM, np.array([[2.0, 5.0, 4.0, 1.0]]))
    assert critical_path(trace) == (0, 1, 3)
    assert time_by_cause(trace) == pytest.approx(
        {Cause.FORWARD: 2.0, Cause.BACKWARD: 5.0, Cause.OPTIMIZER: 1.0}
    )


def test_operations_of_no_length_are_not_a_cause() -> None:
    trace = simulate(PROGRAM, np.array([[2.0, 0.0, 4.0, 0.0]]))
    assert set(time_by_cause(trace)) == {Cause.FORWARD, Cause.ALL_REDUCE}


def test_a_program_has_operations_that_wait_for_earlier_ones() -> None:
    with pytest.raises(ValueError, match="at least one operation"):
        StepProgram(())
    for at in (-1, 1, 2):
        with pytest.raises(
            ValueError, match=rf"operation 1 \(forward\) .* earlier operations, got {at}"
        ):
            StepProgram(
                (operation(Stream.HOST, Cause.FORWARD), operation(Stream.HOST, Cause.FORWARD, at))
            )
