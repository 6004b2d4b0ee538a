"""What a step program is and refuses to be."""

import pytest

from perfmodel.step import Cause, Operation, StepProgram, Stream


def operation(stream: Stream, *after: int) -> Operation:
    return Operation(name="some", stream=stream, cause=Cause.FORWARD, after=after)


def test_a_program_has_operations_that_wait_for_earlier_ones() -> None:
    with pytest.raises(ValueError, match="at least one operation"):
        StepProgram(())
    for at in (-1, 1, 2):
        with pytest.raises(
            ValueError, match=rf"operation 1 \(some\) .* earlier operations, got {at}"
        ):
            StepProgram((operation(Stream.HOST), operation(Stream.HOST, at)))
