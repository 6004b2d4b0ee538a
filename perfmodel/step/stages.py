"""What every pipeline stage of a step holds: pieces of both passes, and the buckets of its gradients.

Nothing here needs a trace: parameters, or the number of layers, are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from perfmodel.layout.layout import Layout, Recompute
from perfmodel.units import Bytes
from perfmodel.workload.workload import Workload


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
    parameters = workload.parameters
    sizes = [parameter.size_bytes for parameter in parameters]
    ready = [parameter.ready_fraction for parameter in parameters]
    whole = Piece(share=1.0, issue_share=1.0)
    return tuple(bucketed(whole, sizes, ready, layout.bucket_limits_bytes))


def undivided(workload: Workload, layout: Layout) -> StageDivision:
    """A step whose only pieces are the buckets of its gradients: all that parameters alone tell."""
    whole = Piece(share=1.0, issue_share=1.0)
    return StageDivision(forward=(whole,), backward=gradient_buckets(workload, layout))


def equal_pieces(layout: Layout, layers: int, *, most: int) -> tuple[StageDivision, ...]:
    """Stages of a model of which the layers alone are known.

    Every chunk has as many pieces as layers if parameters are sharded, else at most so many. A share of 1
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
            )
        )
    return pieces or [whole._replace(size_bytes=0)]


def assign_buckets(
    sizes_bytes: Sequence[Bytes], *, limits_bytes: Sequence[Bytes]
) -> tuple[tuple[int, ...], ...]:
    """Group gradients, listed in the order they become ready, into buckets.

    A bucket closes after the tensor that reaches its limit, so it may exceed the limit; the last
    limit repeats. From its second step on, DDP forms its buckets this way in gradient-ready order.

    Parameters
    ----------
    sizes_bytes
        Size of each gradient in the order in which backward produces them. [B]
    limits_bytes
        Limit of the first, second, ... bucket; see ``Layout.bucket_limits_bytes``. [B]

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
