"""What a step program is and refuses to be."""

import pytest

from perfmodel.step.program import Cause, Operation, StepProgram, Stream


def operation(stream: Stream, *after: int) -> Operation:
    return Operation(name="some", stream=stream, cause=Cause.FORWARD, after=after)


PROGRAM = StepProgram(
    (
        operation(Stream.COMPUTE),
        operation(Stream.HOST),
        operation(Stream.COMPUTE, 1),
        operation(Stream.COMM, 0, 2),
        operation(Stream.COMPUTE, 2, 2, 3),
    )
)


def test_the_one_before_is_on_the_same_stream() -> None:
    assert PROGRAM.previous() == [-1, -1, 0, -1, 2]


def test_only_used_streams_are_listed_in_a_fixed_order() -> None:
    assert PROGRAM.lanes == ((0, Stream.HOST), (0, Stream.COMPUTE), (0, Stream.COMM))


def test_operations_of_a_stream_keep_their_order() -> None:
    assert PROGRAM.on_stream(Stream.COMPUTE) == (0, 2, 4)
    assert PROGRAM.on_stream(Stream.LOADER) == ()


@pytest.mark.parametrize("stream", Stream)
def test_collectives_are_what_runs_on_the_comm_stream(stream: Stream) -> None:
    assert operation(stream).is_collective == (stream is Stream.COMM)


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one operation"):
        StepProgram(())


@pytest.mark.parametrize("dependency", [-1, 1, 2])
def test_dependencies_must_point_backwards(dependency: int) -> None:
    with pytest.raises(
        ValueError, match=rf"operation 1 \(some\) .* earlier operations, got {dependency}"
    ):
        StepProgram((operation(Stream.HOST), operation(Stream.HOST, dependency)))
