"""What a collective does over the tiers of a cluster, by algorithm; one tier is the plain case."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.cost.curve import Samples

#: Rate of a tree over that of a ring through the same links: NCCL's tuner [1]_ grants 0.92, times a
#: factor that falls to 0.4 at middle sizes. Its least is taken, so that a tree has to win by latency.
#:
#: .. [1] NCCL, src/graph/tuning.cc.
_TREE_EFFICIENCY: Final = 0.92 * 0.4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLevel:
    """One tier in use; a message through it takes its latency and its transfer, one after the other."""

    tier: str
    members: int
    crossings: int
    """Edges of a chain through all ranks that end in another member of this tier."""
    latency_s: Samples
    transfer_s: Callable[[float | Samples], Samples]
    """Over the bytes that one member sends at once, through all its links; sizes of shape
    ``(num_sizes, 1)`` give one row each. [s]"""
    inside_node: bool = False
    """Whether it joins devices of one machine: NCCL's trees are chains there."""


class Algorithm(enum.StrEnum):
    """How an all-reduce goes over the tiers."""

    RING = "ring"
    """One ring through all ranks, ``2 (n - 1)`` messages of ``size / n``: every message waits for the
    slowest tier, and pays the latency of the tier that it crosses."""
    TREE = "tree"
    """Up and down a tree of the outer members, above a chain in the innermost of several tiers and in
    all that are inside a node."""
    HIERARCHICAL = "hierarchical"
    """Reduce-scatter inside, all-reduce across, all-gather inside: a ring in each tier."""


#: What a library may choose from; it takes the fastest [1]_ [2]_.
#:
#: .. [1] gloo, as ``torch.distributed`` calls it, has rings alone.
#: .. [2] NCCL, src/graph/tuning.cc: the algorithm with the least predicted time.
_CHOICES: Final[Mapping[str, tuple[Algorithm, ...]]] = MappingProxyType(
    {"gloo": (Algorithm.RING,), "nccl": tuple(Algorithm)}
)


def all_reduce_s(
    levels: Sequence[PricedLevel], size_bytes: float | Samples, *, library: str
) -> Samples:
    """Time of one all-reduce alone, shape ``(num_draws,)``; of many at once, one row for each. [s]

    Parameters
    ----------
    size_bytes
        One size, or many of shape ``(num_sizes, 1)``.
    """
    result: Samples = np.minimum.reduce(
        [_total(_parts(name, levels, size_bytes)) for name in _choices(levels, library)]
    )
    return result


def binding(levels: Sequence[PricedLevel], size_bytes: float, *, library: str) -> str:
    """Which tier costs most of an all-reduce at nominal parameters, by which algorithm, and why."""
    taken = {name: _parts(name, levels, size_bytes) for name in _choices(levels, library)}
    name = min(taken, key=lambda key: float(_total(taken[key])[0]))
    parts = [(float(s[0]), what, level) for what, s, level in taken[name]]
    _, what, level = max(parts, key=lambda part: part[0])
    return f"{level.tier} ({what}, {name} of {level.members})"


def occupancy(
    levels: Sequence[PricedLevel], size_bytes: float, *, library: str
) -> dict[str, float]:
    """For which part of an all-reduce, at nominal parameters, each tier's links are busy."""
    choices = _choices(levels, library)
    taken = {name: _total(_parts(name, levels, size_bytes)) for name in choices}
    name = min(taken, key=lambda key: float(taken[key][0]))
    busy_s = [
        count * level.transfer_s(sent_bytes)
        for level, (count, sent_bytes) in zip(levels, _sent(name, levels, size_bytes), strict=True)
    ]
    return {
        level.tier: float(np.clip(seconds[0] / taken[name][0], 0.0, 1.0))
        for level, seconds in zip(levels, busy_s, strict=True)
    }


def broadcast_s(levels: Sequence[PricedLevel], size_bytes: float | Samples) -> Samples:
    """Time of a binomial tree: ``ceil(log2 m)`` rounds in each tier of ``m`` members. [s]"""
    result: Samples = sum(
        (_doublings(level) * (level.latency_s + level.transfer_s(size_bytes)) for level in levels),
        start=np.zeros_like(levels[0].latency_s),
    )
    return result


_Part = tuple[str, Samples, PricedLevel]
"""What it is (latency or bandwidth), how long it takes, and where."""


def _choices(levels: Sequence[PricedLevel], library: str) -> tuple[Algorithm, ...]:
    choices = list(_CHOICES.get(library, (Algorithm.RING,)))
    if len(levels) == 1 and Algorithm.HIERARCHICAL in choices:
        choices.remove(Algorithm.HIERARCHICAL)
    # One chain through all ranks of a node is no better than their ring.
    if all(level.inside_node for level in levels) and Algorithm.TREE in choices:
        choices.remove(Algorithm.TREE)
    return tuple(choices)


def _total(parts: Sequence[_Part]) -> Samples:
    """Latencies add up; of a pipeline's transfers each is listed once, by its slowest tier."""
    result: Samples = sum((seconds for _, seconds, _ in parts), start=np.zeros(1))
    return result


def _parts(
    algorithm: Algorithm, levels: Sequence[PricedLevel], size_bytes: float | Samples
) -> list[_Part]:
    sent = _sent(algorithm, levels, size_bytes)
    transfers: list[_Part] = [
        ("bandwidth", count * level.transfer_s(sent_bytes), level)
        for level, (count, sent_bytes) in zip(levels, sent, strict=True)
    ]
    latencies: list[_Part] = [
        ("latency", count * level.latency_s, level)
        for level, count in zip(levels, _steps(algorithm, levels), strict=True)
    ]
    if algorithm is Algorithm.HIERARCHICAL:
        return [*latencies, *transfers]
    # Of a pipeline through all tiers the slowest one decides, in every draw on its own.
    times = [seconds for _, seconds, _ in transfers]
    worst = levels[int(np.argmax([seconds.flat[0] for seconds in times]))]
    return [*latencies, ("bandwidth", np.maximum.reduce(times), worst)]


def _steps(algorithm: Algorithm, levels: Sequence[PricedLevel]) -> list[int]:
    """Latencies of each tier that follow one another."""
    match algorithm:
        case Algorithm.RING:
            return [2 * level.crossings for level in levels]
        case Algorithm.TREE:
            return [
                2 * (level.members - 1 if chained else _doublings(level))
                for level, chained in zip(levels, _chained(levels), strict=True)
            ]
        case Algorithm.HIERARCHICAL:
            return [2 * (level.members - 1) for level in levels]


def _sent(
    algorithm: Algorithm, levels: Sequence[PricedLevel], size_bytes: float | Samples
) -> list[tuple[int, float | Samples]]:
    """How many messages of how many bytes a member of each tier sends."""
    match algorithm:
        case Algorithm.RING:
            num_ranks = sum(level.crossings for level in levels) + 1
            return [(2 * (num_ranks - 1), size_bytes / num_ranks)] * len(levels)
        case Algorithm.TREE:
            return [(2, size_bytes / _TREE_EFFICIENCY)] * len(levels)
        case Algorithm.HIERARCHICAL:
            return [(2 * (level.members - 1), size_bytes / level.members) for level in levels]


def _chained(levels: Sequence[PricedLevel]) -> list[bool]:
    """In which tiers a tree is a chain."""
    several = len(levels) > 1
    return [level.inside_node or (several and level is levels[0]) for level in levels]


def _doublings(level: PricedLevel) -> int:
    return math.ceil(math.log2(level.members))
