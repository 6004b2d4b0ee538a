"""A training step as ordered operations on named streams; it knows work, never seconds."""

import enum
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import check_fraction
from perfmodel.statistics import FloatArray
from perfmodel.units import Seconds


class Stream(enum.StrEnum):
    """A queue of one rank whose operations run one after another, like a CUDA stream."""

    # That of enumerations is written in Python, and programs ask for it at every operation.
    __hash__ = str.__hash__

    LOADER = "loader"
    HOST = "host"
    COMPUTE = "compute"
    COMM = "comm"
    """Data-parallel collectives."""
    TENSOR = "tensor"
    """Collectives inside a layer, which compute waits for."""
    SEND_FORWARD = "send_forward"
    """Activations to the next pipeline stage."""
    SEND_BACKWARD = "send_backward"
    """Gradients to the one before."""


Lane: TypeAlias = tuple[int, Stream]
"""A stream of one pipeline stage."""


class Cause(enum.StrEnum):
    """Which part of the step an operation belongs to; the vocabulary of breakdowns and explanations."""

    __hash__ = str.__hash__

    INPUT = "input"
    DISPATCH = "dispatch"
    FORWARD = "forward"
    BACKWARD = "backward"
    BUCKET = "bucket"
    """DDP's own work on a bucket: hook, copy in, copy out."""
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    OPTIMIZER = "optimizer"
    EMBEDDING = "embedding"
    HEAD = "head"
    """Output head and loss, both passes."""
    TENSOR = "tensor"
    """Collectives of tensor, context and expert parallelism."""
    P2P = "p2p"
    """Between pipeline stages."""
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    CONTENTION = "contention"
    """What compute and collectives lose by running beside each other."""


class Operation(NamedTuple):
    """One piece of work of every rank; a tuple, because a large step has 20,000 and more of them.

    It starts when the operation before it on its stream (of its stage) and all of ``after`` have
    ended. On the ``COMM`` stream it is a collective: it starts when that holds on every rank, and ends
    on all at once.
    """

    name: str
    stream: Stream
    cause: Cause
    after: tuple[int, ...] = ()
    """Positions, in the program, of the operations that must end first."""
    share: float = 1.0
    """Which fraction of its cause's work this is, such as a backward segment; of collectives with a size, how
    many of them follow one another."""
    size_bytes: int = 0
    """Bytes of the array that is reduced, gathered, sent or copied."""
    issues: Cause | None = None
    """On the host stream: which kind of work is being issued to the device."""
    stage: int = 0
    """Pipeline stage whose ranks do it."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part together."""
        return self.stream is Stream.COMM


@contextmanager
def collector_paused() -> Iterator[None]:
    """Search for no cyclic garbage meanwhile: it takes a tenth of a trace, and frees little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class StepProgram:
    """Operations in an order in which every dependency points backwards."""

    operations: tuple[Operation, ...]
    host_waits: bool = False
    """Whether the host waits for the device at the end of every step, as ``loss.item()`` lets it."""

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

    @cached_property
    def lanes(self) -> Mapping[Lane, Sequence[int]]:
        """Positions of the operations of every stream in use, stage by stage, in order."""
        found: defaultdict[Lane, list[int]] = defaultdict(list)
        for position, operation in enumerate(self.operations):
            found[operation.stage, operation.stream].append(position)
        rank = {stream: position for position, stream in enumerate(Stream)}
        return {lane: found[lane] for lane in sorted(found, key=lambda at: (at[0], rank[at[1]]))}

    @cached_property
    @collector_paused()
    def awaited(self) -> Sequence[Sequence[int]]:
        """What must end before each operation: all that it comes after, and the one before it on its stream."""
        last: dict[Lane, int] = {}
        found = []
        for position, operation in enumerate(self.operations):
            lane, after = (operation.stage, operation.stream), operation.after
            before = last.get(lane, -1)
            last[lane] = position
            found.append(after if before < 0 or before in after else (*after, before))
        return found

    @property
    def num_stages(self) -> int:
        """Pipeline stages, 1 without a pipeline."""
        return 1 + max(operation.stage for operation in self.operations)

    def on_stream(self, stream: Stream) -> tuple[int, ...]:
        """Positions of the operations of one stream, in order."""
        return tuple(i for i, operation in enumerate(self.operations) if operation.stream is stream)

    def checked(self, durations_s: ArrayLike, *, column: str) -> FloatArray:
        """Durations as an array of shape ``(num_operations, num_columns)``; refused unless finite and >= 0. [s]

        ``column``: What a column is, for errors: a draw or a rank.
        """
        table_s = np.asarray(durations_s, dtype=np.float64)
        if table_s.ndim != 2 or len(table_s) != len(self.operations):
            raise ValueError(
                f"durations_s must have shape (num_operations = {len(self.operations)}, num_{column}s), "
                f"got {table_s.shape}"
            )
        is_bad = ~(np.isfinite(table_s) & (table_s >= 0))
        if is_bad.any():
            position, at = np.argwhere(is_bad)[0]
            raise ValueError(
                f"durations_s of {self.operations[position].name} must be finite and >= 0, "
                f"got {table_s[position, at]} in {column} {at}"
            )
        return table_s


#: Parts of a phase that the host issues one after another, while the device works on those before.
_SLICES: Final = 64


def with_waiting_host(program: StepProgram) -> StepProgram:
    """The step of an asynchronous device whose host waits for it at the end.

    The device then has nothing to do while the host issues the first kernels; of a long phase it works on
    those that have been issued. So phases are cut into slices.
    """
    operations: list[Operation] = []
    ends: list[int] = []
    issue: Operation | None = None
    for operation in program.operations:
        after = tuple(ends[position] for position in operation.after if position < len(ends))
        if operation.stream is Stream.HOST:
            issue = operation._replace(after=after)
            # What waits for the launch alone is its kernel, which comes next.
            ends.append(-1)
            continue
        after = tuple(position for position in after if position >= 0)
        if issue is None:
            operations.append(operation._replace(after=after))
        else:
            count = max(1, round(_SLICES * operation.share))
            for number in range(count):
                operations.append(_slice(issue, number, count, issue.after))
                waits = (*(after if number == 0 else ()), len(operations) - 1)
                operations.append(_slice(operation, number, count, waits))
            issue = None
        ends.append(len(operations) - 1)
    return StepProgram(tuple(operations), host_waits=True)


def _slice(operation: Operation, number: int, count: int, after: tuple[int, ...]) -> Operation:
    return operation._replace(
        name=f"{operation.name} {number + 1}/{count}",
        share=operation.share / count,
        after=after if number == 0 or operation.stream is not Stream.HOST else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Speed of each side while both are busy, as a fraction of its speed alone.

    Fractions of 1 mean free overlap; two fractions that add up to 1 mean that the two share one
    resource and overlap gains nothing, as on a CPU whose cores also move the bytes.
    """

    compute_speed: float = 1.0
    comm_speed: float = 1.0

    def __post_init__(self) -> None:
        """Refuse speeds outside (0, 1]."""
        check_fraction("compute_speed", self.compute_speed)
        check_fraction("comm_speed", self.comm_speed)

    @property
    def is_none(self) -> bool:
        """Whether overlap costs nothing."""
        return self.compute_speed == 1.0 and self.comm_speed == 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Start and end of every operation of every simulated rank."""

    program: StepProgram
    start_s: FloatArray
    """Shape ``(num_ranks, num_operations)``. [s]"""
    end_s: FloatArray
    """Shape ``(num_ranks, num_operations)``; a collective ends on all ranks at once. [s]"""
    skipped_s: Mapping[Cause, Seconds] = field(default_factory=dict)
    """Of micro-batches that repeat others and are no operations: what they add to the critical path. [s]"""

    @property
    def step_s(self) -> Seconds:
        """From the start of the step to the end of the last operation of any rank. [s]"""
        return float(self.end_s.max()) + sum(self.skipped_s.values())


#: Ends and starts that should be equal may differ by rounding of long sums.
_TOLERANCE = 1e-9


def critical_path(trace: Trace) -> tuple[int, ...]:
    """Positions of the operations that determine the end of the step of the first rank, first to last.

    From the last operation backwards, always to the predecessor that ended last: it is the one
    that the operation waited for.
    """
    ends_s, awaited = trace.end_s[0].tolist(), trace.program.awaited
    position = ends_s.index(max(ends_s))
    path = [position]
    while before := awaited[position]:
        position = max(sorted(before), key=ends_s.__getitem__)
        path.append(position)
    return tuple(reversed(path))


def time_by_cause(trace: Trace) -> dict[Cause, Seconds]:
    """Time on the critical path of the first rank by cause; sums to the step. [s]"""
    result = {cause: time_s for cause, time_s in trace.skipped_s.items() if time_s}
    done_s = 0.0
    for position in critical_path(trace):
        cause = trace.program.operations[position].cause
        end_s = float(trace.end_s[0][position])
        if end_s > done_s * (1 + _TOLERANCE):
            result[cause] = result.get(cause, 0.0) + end_s - done_s
            done_s = end_s
    return result
