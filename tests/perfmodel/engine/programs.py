"""Two programs whose times a reader can redo by hand."""

from perfmodel.step import Cause, Operation, StepProgram, Stream


def operation(name: str, stream: Stream, *after: int) -> Operation:
    return Operation(name=name, stream=stream, cause=Cause.BACKWARD, after=after)


TWO_BUCKETS = StepProgram(
    (
        operation("forward", Stream.COMPUTE),
        operation("backward[0]", Stream.COMPUTE),
        operation("all_reduce[0]", Stream.COMM, 1),
        operation("backward[1]", Stream.COMPUTE),
        operation("all_reduce[1]", Stream.COMM, 3),
        operation("optimizer", Stream.COMPUTE, 2, 4),
    )
)
#: A (compute), then B (compute) beside C (collective, after A).
OVERLAP = StepProgram(
    (operation("A", Stream.COMPUTE), operation("B", Stream.COMPUTE), operation("C", Stream.COMM, 0))
)
