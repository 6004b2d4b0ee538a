"""A training step as ordered operations on named streams, and what its pipeline stages hold.

It knows work, never seconds. A stage holds pieces of both passes and the buckets of its gradients, which need no
trace. Orders of stages are GPipe, 1F1B and interleaved.
"""

import enum
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import check_fraction
from perfmodel.layout import Layout, Recompute, Schedule
from perfmodel.statistics import FloatArray
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Parameter, Phase, Workload


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


class Piece(NamedTuple):
    """A part of one pass of a stage that computes, and then communicates, on its own."""

    share: float
    """Of the work of its cause in one micro-batch, such as the whole forward pass of one rank."""
    issue_share: float = 0.0
    """Of the host's work to issue that pass."""
    size_bytes: Bytes = 0
    """Of the parameters that it gathers, of the gradients that it exchanges. [B]"""
    all_reduces: float = 0.0
    """Of activations between the ranks that share its matrices."""
    exchange: float = 1.0
    """Share of its cause's exchange, where the size is not known."""
    regathers: float = 1.0
    """Gathers of its sharded parameters for the backward pass; 0 where they stay whole since the forward pass."""
    gradients: int = 1
    """Tensors that it exchanges in one bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDivision:
    """What one rank of a pipeline stage does in a micro-batch."""

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    """In the order of the backward pass."""
    optimizer: float = 1.0
    """Share of the whole optimizer's work, per step."""
    issue_optimizer: float = 1.0
    """Share of the host's work to issue it."""
    activation_bytes: Bytes = 0
    """Of the tensor that enters its first block: what stages send, what tensor parallelism reduces. [B]"""
    parameters_bytes: tuple[Bytes, ...] = ()
    """Of each parameter on one rank. [B]"""


def gradient_buckets(workload: Workload, layout: Layout) -> tuple[Piece, ...]:
    """Pieces of the backward pass, each of which fills a bucket, in the order in which DDP reduces them."""
    return _gradient_buckets(workload.parameters, layout.bucket_limits_bytes)


@lru_cache(maxsize=64)
def _gradient_buckets(
    parameters: tuple[Parameter, ...], limits: tuple[Bytes, ...]
) -> tuple[Piece, ...]:
    sizes = [parameter.size_bytes for parameter in parameters]
    ready = [parameter.ready_fraction for parameter in parameters]
    return tuple(bucketed(Piece(share=1.0, issue_share=1.0), sizes, ready, limits))


def undivided(workload: Workload, layout: Layout) -> StageDivision:
    """A step whose only pieces are the buckets of its gradients: all that parameters alone tell."""
    whole = Piece(share=1.0, issue_share=1.0)
    return StageDivision(forward=(whole,), backward=gradient_buckets(workload, layout))


def equal_pieces(layout: Layout, layers: int, *, most: int) -> tuple[StageDivision, ...]:
    """Stages of a model of which the layers alone are known.

    Every chunk has as many pieces as layers if parameters are sharded, else at most that. A share of 1
    is the work of the fullest stage. Full recomputation repeats the collectives of the forward pass.
    """
    held = max(layers // (layout.pp * layout.interleave), 1)
    count = held if layout.zero == 3 else min(held, most)
    stages = layout.stages(layers)
    passes = 3 if layout.recompute is Recompute.FULL else 2
    shared = layout.tp * layout.cp * layout.ep > 1
    exchange = 1 / (count * layout.interleave)

    def pieces(share: float, part: float) -> tuple[Piece, ...]:
        all_reduces = share * part if shared else 0.0
        return (Piece(share=share, all_reduces=all_reduces, exchange=exchange),) * count

    return tuple(
        StageDivision(
            forward=pieces(exchange * own / max(stages), 1 / passes),
            backward=pieces(exchange * own / max(stages), (passes - 1) / passes),
        )
        for own in stages
    )


@lru_cache(maxsize=256)
def together(pieces: tuple[Piece, ...]) -> Piece:
    """A pass in one piece; of every micro-batch the same."""
    return Piece(*(sum(column) for column in zip(*pieces, strict=True)))


def bucketed(
    whole: Piece, sizes_bytes: Sequence[Bytes], ready: Sequence[float], limits: Sequence[Bytes]
) -> list[Piece]:
    """The backward pass of a stage, cut where DDP's buckets are full."""
    groups = assign_buckets(sizes_bytes, limits_bytes=limits)
    pieces, before = [], 0.0
    for number, group in enumerate(groups):
        # What autograd does after the last gradient belongs to the pass.
        until = 1.0 if number == len(groups) - 1 else max(before, ready[group[-1]])
        part, before = until - before, until
        pieces.append(
            Piece(
                share=whole.share * part,
                issue_share=whole.issue_share * part,
                size_bytes=sum(sizes_bytes[i] for i in group),
                all_reduces=whole.all_reduces * part,
                gradients=len(group),
            )
        )
    return pieces or [whole._replace(size_bytes=0)]


def assign_buckets(
    sizes_bytes: Sequence[Bytes], *, limits_bytes: Sequence[Bytes]
) -> tuple[tuple[int, ...], ...]:
    """Group gradients, listed in the order they become ready, into buckets.

    A bucket closes after the tensor that reaches its limit, so it may exceed the limit; the last
    limit repeats. From its second step on, DDP forms its buckets this way in gradient-ready order.

    ``sizes_bytes``: Size of each gradient in the order in which backward produces them. [B]
    ``limits_bytes``: Limit of the first, second, ... bucket; see ``Layout.bucket_limits_bytes``. [B]

    Returns
    -------
    tuple
        For each bucket the indices into ``sizes_bytes``, in order.

    References
    ----------
    .. [1] ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    if not limits_bytes:
        raise ValueError("limits_bytes must hold at least one limit, got none")
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    current_bytes = 0
    for index, size_bytes in enumerate(sizes_bytes):
        current.append(index)
        current_bytes += size_bytes
        if current_bytes >= limits_bytes[min(len(buckets), len(limits_bytes) - 1)]:
            buckets.append(tuple(current))
            current, current_bytes = [], 0
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def assign_shards(sizes_bytes: Sequence[Bytes], *, num_ranks: int) -> tuple[Bytes, ...]:
    """Bytes of the parameters that each rank updates: the largest goes to whoever has least.

    References
    ----------
    .. [1] ``ZeroRedundancyOptimizer._partition_parameters`` in torch/distributed/optim.
    """
    shards = [0] * num_ranks
    for size_bytes in sorted(sizes_bytes, reverse=True):
        shards[shards.index(min(shards))] += size_bytes
    return tuple(shards)


class Work(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage's layers."""

    kind: Phase
    micro_batch: int
    chunk: int = 0
    """Which of the stage's ``interleave`` pieces; the model runs through chunk 0 of all stages first."""


def stage_order(layout: Layout, stage: int) -> tuple[Work, ...]:
    """Everything that one stage does in a step, in order.

    References
    ----------
    .. [1] Y. Huang et al., "GPipe", arXiv 1811.06965.
    .. [2] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
       Megatron-LM", arXiv 2104.04473: 1F1B and interleaved stages.
    """
    # Chunk after chunk for as many micro-batches as there are stages, then the next ones.
    group = layout.pp if layout.interleave > 1 else layout.accumulation
    forward = [
        Work(Phase.FORWARD, first + index, chunk)
        for first in range(0, layout.accumulation, group)
        for chunk in range(layout.interleave)
        for index in range(group)
    ]
    backward = [
        Work(Phase.BACKWARD, work.micro_batch, layout.interleave - 1 - work.chunk)
        for work in forward
    ]
    # Forward passes before the first that is followed by a backward pass.
    ahead = layout.pp - stage - 1
    if layout.schedule is Schedule.GPIPE:
        ahead = len(forward)
    elif layout.interleave > 1:
        ahead = 2 * ahead + (layout.interleave - 1) * layout.pp
    ahead = min(ahead, len(forward))
    order = list(forward[:ahead])
    for position, work in enumerate(forward[ahead:]):
        order += [work, backward[position]]
    return (*order, *backward[len(forward) - ahead :])
