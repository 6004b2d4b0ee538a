"""A training step as ordered operations on named streams; it knows work, never seconds."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Stream(enum.StrEnum):
    """A queue of one rank whose operations run one after another, like a CUDA stream."""

    LOADER = "loader"
    HOST = "host"
    COMPUTE = "compute"
    COMM = "comm"


class Cause(enum.StrEnum):
    """Which part of the step an operation belongs to; the vocabulary of breakdowns and explanations."""

    INPUT = "input"
    DISPATCH = "dispatch"
    FORWARD = "forward"
    BACKWARD = "backward"
    BUCKET = "bucket"
    """DDP's own work on a bucket: hook, copy in, copy out."""
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One piece of work of every rank.

    It starts when the operation before it on its stream and all of ``after`` have ended. On the
    ``COMM`` stream it is a collective: it starts when that holds on every rank, and ends on all at once.
    """

    name: str
    stream: Stream
    cause: Cause
    after: tuple[int, ...] = ()
    """Positions, in the program, of the operations that must end first."""
    share: float = 1.0
    """Which fraction of its cause's work this is, such as a backward segment; unused by collectives."""
    size_bytes: int = 0
    """Bytes reduced, broadcast or copied."""
    issues: Cause | None = None
    """On the host stream: which kind of work is being issued to the device."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part together."""
        return self.stream is Stream.COMM


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Operations in an order in which every dependency points backwards."""

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        """Refuse empty programs and dependencies on later operations."""
        if not self.operations:
            raise ValueError("a StepProgram must hold at least one operation")
        for position, operation in enumerate(self.operations):
            for dependency in operation.after:
                if not 0 <= dependency < position:
                    raise ValueError(
                        f"operation {position} ({operation.name}) must depend on earlier operations, "
                        f"got {dependency}"
                    )

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Streams in use, in a fixed order."""
        used = {operation.stream for operation in self.operations}
        return tuple(stream for stream in Stream if stream in used)

    def on_stream(self, stream: Stream) -> tuple[int, ...]:
        """Positions of the operations of one stream, in order."""
        return tuple(i for i, operation in enumerate(self.operations) if operation.stream is stream)

    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operation what must end first: the one before it on its stream, and ``after``."""
        last: dict[Stream, int] = {}
        result = []
        for position, operation in enumerate(self.operations):
            before: Iterable[int] = (last[operation.stream],) if operation.stream in last else ()
            result.append(tuple(sorted({*before, *operation.after})))
            last[operation.stream] = position
        return tuple(result)
