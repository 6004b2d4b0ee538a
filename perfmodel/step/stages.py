"""What every pipeline stage of a step holds and in which order it works.

It holds pieces of both passes and the buckets of its gradients. Orders are GPipe, 1F1B and interleaved. Where the
host waits, a stage offers its result until another one fetches it. Nothing here needs a trace: parameters, or the
number of layers, are enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from perfmodel.layout import Layout, Recompute, Schedule
from perfmodel.step import Cause, Stream
from perfmodel.units import Bytes
from perfmodel.workload import Parameter, Phase, Workload


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
    ahead = _ahead(layout, stage)
    order = list(forward[:ahead])
    for position, work in enumerate(forward[ahead:]):
        order += [work, backward[position]]
    return (*order, *backward[len(forward) - ahead :])


def _ahead(layout: Layout, stage: int) -> int:
    """Forward passes before the first that is followed by a backward pass."""
    total = layout.accumulation * layout.interleave
    if layout.schedule is Schedule.GPIPE:
        return total
    behind = layout.pp - stage - 1
    if layout.interleave > 1:
        behind = 2 * behind + (layout.interleave - 1) * layout.pp
    return min(behind, total)


Put: TypeAlias = Callable[..., int]
"""Appends an operation to a program and returns its position."""


class Parcel(NamedTuple):
    """What a stage offers to another until that one fetches it."""

    stage: int
    work: Work
    stream: Stream
    end: int
    """Of the compute that made it."""


@dataclass(slots=True, kw_only=True)
class WaitingSends:
    """What stages have offered, sent and done last."""

    last: dict[int, int] = field(default_factory=dict)
    """End of the last compute of a stage."""
    offered: dict[tuple[int, Work], Parcel] = field(default_factory=dict)
    """What a stage's work will fetch when it has nothing else to do."""
    between: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last point-to-point send between two stages."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """What a stage has sent since it last turned."""
    turned: dict[int, bool] = field(default_factory=dict)
    """Whether a stage's last pass was a forward one."""

    def offer(self, parcel: Parcel, other: int, received: Work) -> None:
        """Keep a parcel until another stage needs it for this work."""
        self.offered[other, received] = parcel

    def fetch(self, stage: int, work: Work, put: Put) -> int | None:
        """Append the point-to-point send of what is offered to a stage's next work, if anything is; its end."""
        parcel = self.offered.pop((stage, work), None)
        if parcel is None:
            return None
        between = (min(stage, parcel.stage), max(stage, parcel.stage))
        busy = [self.between[between]] if between in self.between else []
        # A sender knows that a stage is ready to receive when that one has ended what it did.
        idle = [self.last[stage]] if stage in self.last else []
        end = put(
            parcel.stage,
            parcel.work,
            Cause.P2P,
            stream=parcel.stream,
            after=(parcel.end, *idle, *busy),
        )
        self.sent.setdefault(parcel.stage, []).append(end)
        self.between[between] = end
        return end

    def must_wait(self, stage: int, work: Work) -> bool:
        """Whether a stage that turns still offers something that nobody fetched."""
        return self._turns(stage, work) and any(p.stage == stage for p in self.offered.values())

    def begin(self, stage: int, work: Work) -> list[int]:
        """Note a stage's next pass; what its compute waits for."""
        awaited = self.sent.pop(stage, []) if self._turns(stage, work) else []
        self.turned[stage] = work.kind is Phase.FORWARD
        return awaited

    def _turns(self, stage: int, work: Work) -> bool:
        """Whether a stage goes from forward to backward passes, or back."""
        before = self.turned.get(stage)
        return before is not None and before is not (work.kind is Phase.FORWARD)
