"""What a step program is and refuses to be."""

import pytest

from perfmodel.step import Cause, Operation, StepProgram, Stream


def operation(stream: Stream, *after: int) -> Operation:
    return Operation(name="some", stream=stream, cause=Cause.FORWARD, after=after)


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one operation"):
        StepProgram(())


@pytest.mark.parametrize("dependency", [-1, 1, 2])
def test_dependencies_must_point_backwards(dependency: int) -> None:
    with pytest.raises(
        ValueError, match=rf"operation 1 \(some\) .* earlier operations, got {dependency}"
    ):
        StepProgram((operation(Stream.HOST), operation(Stream.HOST, dependency)))
