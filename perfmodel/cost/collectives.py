"""How long a measured collective takes in any group, inside a node and between nodes."""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.cost.messages import MessageCost, message_bytes, num_messages
from perfmodel.cost.terms import Samples
from perfmodel.documents.importers import MeasuredCollective
from perfmodel.units import Bytes

#: Rate of a tree over that of a ring through the same links: NCCL's tuner [1]_ grants 0.92, times a
#: factor that falls to 0.4 at middle sizes. Its least is taken, so that a tree has to win by latency.
#:
#: .. [1] NCCL, src/graph/tuning.cc.
_TREE_EFFICIENCY: Final = 0.92 * 0.4

_PAIR: Final = 2

#: Until a switch has added up the first piece and handed it back: NVLS over NVLink in NCCL's tuner. [s]
SWITCH_LATENCY_S: Final = 25e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedSum:
    """An all-reduce of the members of one tier by its switches."""

    latency_s: Samples
    transfer_s: Callable[[float | Samples], Samples]
    """Over the size of the whole array, of shapes as a level's own. [s]"""


def switched_bytes(size_bytes: float | Samples, members: int) -> float | Samples:
    """What a member sends, and receives, while a switch adds up an array. [B]

    Every member is in charge of a part: the switch pulls that part from all, hands the sum to the one
    in charge, and its result to all. So each sends the whole array once, and the result of its part.

    References
    ----------
    .. [1] B. Klenk, N. Jiang, G. Thorson, L. Dennison, "An in-network architecture for accelerating
       shared-memory multiprocessor collectives", ISCA 2020.
    """
    return size_bytes * (1 + 1 / members)


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
    switch: SwitchedSum | None = None
    """Of the innermost tier, if its switches can add."""


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
    HALVING_DOUBLING = "halving-doubling"
    """The same in each tier, by exchanges of a half, a quarter ... with a partner twice as far each
    time: as many bytes as rings in ``2 log2(m)`` messages [1]_.

    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
       MPICH", Int. J. High Perform. Comput. Appl. 19(1):49-66, 2005.
    """
    NVLS = "NVLS"
    """The switch of the only tier adds."""
    NVLS_TREE = "NVLS tree"
    """The switches of the innermost tier add, its members pass their parts up and down trees outside."""


#: What a library may choose from; it takes the fastest [1]_ [2]_. Others than these are taken for MPI,
#: which has rings and halving-doubling.
#:
#: .. [1] gloo, as ``torch.distributed`` calls it (allreduce.cc, no algorithm named), has rings alone.
#: .. [2] NCCL, src/graph/tuning.cc: the algorithm with the least predicted time.
_CHOICES: Final[Mapping[str, tuple[Algorithm, ...]]] = MappingProxyType(
    {
        "gloo": (Algorithm.RING,),
        "nccl": tuple(name for name in Algorithm if name is not Algorithm.HALVING_DOUBLING),
    }
)
_OF_OTHERS: Final = (Algorithm.RING, Algorithm.HALVING_DOUBLING)


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
    taken = {
        name: float(_total(_parts(name, levels, size_bytes))[0])
        for name in _choices(levels, library)
    }
    name = min(taken, key=lambda key: taken[key])
    return {
        level.tier: float(np.clip(seconds.flat[0] / taken[name], 0.0, 1.0))
        for level, seconds in zip(levels, _transfers(name, levels, size_bytes), strict=True)
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
    left_out = set()
    if len(levels) == 1:
        left_out |= {Algorithm.HIERARCHICAL, Algorithm.NVLS_TREE}
    else:
        left_out.add(Algorithm.NVLS)
    if levels[0].switch is None:
        left_out |= {Algorithm.NVLS, Algorithm.NVLS_TREE}
    # One chain through all ranks of a node is no better than their ring.
    if all(level.inside_node for level in levels):
        left_out.add(Algorithm.TREE)
    return tuple(name for name in _CHOICES.get(library, _OF_OTHERS) if name not in left_out)


def _total(parts: Sequence[_Part]) -> Samples:
    """Latencies add up; of a pipeline's transfers each is listed once, by its slowest tier."""
    result: Samples = sum((seconds for _, seconds, _ in parts), start=np.zeros(1))
    return result


def _parts(
    algorithm: Algorithm, levels: Sequence[PricedLevel], size_bytes: float | Samples
) -> list[_Part]:
    times_s = _transfers(algorithm, levels, size_bytes)
    latencies: list[_Part] = [
        ("latency", seconds, level)
        for level, seconds in zip(levels, _latencies(algorithm, levels), strict=True)
    ]
    if algorithm in {Algorithm.HIERARCHICAL, Algorithm.HALVING_DOUBLING}:
        in_turn: list[_Part] = [
            ("bandwidth", seconds, level) for level, seconds in zip(levels, times_s, strict=True)
        ]
        return [*latencies, *in_turn]
    # Of a pipeline through all tiers the slowest one decides, in every draw on its own.
    worst = levels[int(np.argmax([seconds.flat[0] for seconds in times_s]))]
    return [*latencies, ("bandwidth", np.maximum.reduce(times_s), worst)]


def _latencies(algorithm: Algorithm, levels: Sequence[PricedLevel]) -> list[Samples]:
    """Of each tier, all that follow one another. [s]"""
    inner, *outer = levels
    match algorithm:
        case Algorithm.RING:
            counts = [2 * level.crossings for level in levels]
        case Algorithm.TREE:
            counts = [
                2 * (level.members - 1 if chained else _doublings(level))
                for level, chained in zip(levels, _chained(levels), strict=True)
            ]
        case Algorithm.HIERARCHICAL:
            counts = [2 * (level.members - 1) for level in levels]
        case Algorithm.HALVING_DOUBLING:
            counts = [2 * _doublings(level) for level in levels]
        case Algorithm.NVLS | Algorithm.NVLS_TREE:
            assert inner.switch is not None, "chosen where switches add"
            return [inner.switch.latency_s, *(2 * _doublings(o) * o.latency_s for o in outer)]
    return [count * level.latency_s for count, level in zip(counts, levels, strict=True)]


def _transfers(
    algorithm: Algorithm, levels: Sequence[PricedLevel], size_bytes: float | Samples
) -> list[Samples]:
    """How long the links of each tier are busy. [s]"""
    inner, *outer = levels
    match algorithm:
        case Algorithm.RING:
            num_ranks = sum(level.crossings for level in levels) + 1
            sent = [(2 * (num_ranks - 1), size_bytes / num_ranks)] * len(levels)
        case Algorithm.TREE:
            sent = [
                (2 if chained else _passes(levels), size_bytes / _TREE_EFFICIENCY)
                for chained in _chained(levels)
            ]
        case Algorithm.HIERARCHICAL:
            sent = [(2 * (level.members - 1), size_bytes / level.members) for level in levels]
        case Algorithm.HALVING_DOUBLING:
            return [_halved_s(level, size_bytes) for level in levels]
        case Algorithm.NVLS | Algorithm.NVLS_TREE:
            assert inner.switch is not None, "chosen where switches add"
            passes = _passes(levels)
            return [
                inner.switch.transfer_s(size_bytes),
                *(passes * level.transfer_s(size_bytes) for level in outer),
            ]
    return [
        count * level.transfer_s(of_one)
        for level, (count, of_one) in zip(levels, sent, strict=True)
    ]


def _halved_s(level: PricedLevel, size_bytes: float | Samples) -> Samples:
    """A half, a quarter ... of the array, there and back; whoever has no partner sends all of it first."""
    rounds = level.members.bit_length() - 1
    total_s: Samples = sum(
        (level.transfer_s(size_bytes / 2**k) for k in range(1, rounds + 1)), start=np.zeros(1)
    )
    if level.members != 2**rounds:
        total_s = total_s + level.transfer_s(size_bytes)
    result: Samples = 2 * total_s
    return result


def _passes(levels: Sequence[PricedLevel]) -> int:
    """How often trees send an array over the links between members of the outer tiers.

    Up and down; but of two members each is the root of one of two trees with a half of the array: it
    sends one half up and the other one down.
    """
    joined = math.prod(level.members for level in levels[1:]) if levels[1:] else levels[0].members
    return 1 if joined == _PAIR else 2


def _chained(levels: Sequence[PricedLevel]) -> list[bool]:
    """In which tiers a tree is a chain."""
    several = len(levels) > 1
    return [level.inside_node or (several and level is levels[0]) for level in levels]


def _doublings(level: PricedLevel) -> int:
    return math.ceil(math.log2(level.members))


#: Uncertainty per doubling of the group beyond the largest one measured, inside a node and between nodes:
#: priors.
UNCERTAINTY_PER_DOUBLING: Final = 0.05
_UNCERTAINTY_BETWEEN_NODES: Final = 0.15
#: Messages between nodes over those inside, where only the latter were measured, and its factor of
#: uncertainty: data sheets range from 1 (an adapter of 400 Gb/s for each H100) to 5 (four of 100 Gb/s for
#: eight A100).
_BETWEEN_RATIO: Final = 2.0
_BETWEEN_UNCERTAINTY: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCost:
    """Messages of a collective, of groups inside a node and of groups over several."""

    collective: str
    inside: MessageCost | None
    between: MessageCost | None
    deviates: Samples
    """Of the uncertainty beyond what was measured, shape ``(num_draws,)``; draw 0 is 0."""

    @classmethod
    def sample(
        cls,
        groups: Iterable[MeasuredCollective],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "CollectiveCost":
        """Draw from the groups of one collective.

        Raises
        ------
        ValueError
            If there is no group, or they are of different collectives.
        """
        found = tuple(groups)
        names = {group.collective for group in found}
        if len(names) != 1:
            raise ValueError(f"groups must be of one collective, got {sorted(names)}")
        collective = names.pop()

        def messages(of: Sequence[MeasuredCollective]) -> MessageCost | None:
            if not of:
                return None
            return MessageCost.sample(
                collective,
                [(group.world_size, group.num_nodes, group.points) for group in of],
                library=library,
                num_draws=num_draws,
                rng=rng,
            )

        deviates = rng.standard_normal(num_draws)
        deviates[0] = 0.0
        return cls(
            collective=collective,
            inside=messages([group for group in found if group.num_nodes == 1]),
            between=messages([group for group in found if group.num_nodes > 1]),
            deviates=deviates,
        )

    def time_s(self, size_bytes: Bytes, *, world_size: int, num_nodes: int = 1) -> Samples:
        """Time of one collective alone, shape ``(num_draws,)``. [s]

        Parameters
        ----------
        size_bytes
            Whole array, as nccl-tests counts it.
        num_nodes
            Nodes that the group spans.
        """
        if world_size == 1:
            return np.zeros_like(self.deviates)
        own, other = (self.between, self.inside) if num_nodes > 1 else (self.inside, self.between)
        messages = own or other
        assert messages is not None, "sample refuses no groups"
        ratio, uncertainty = self._unseen(crosses=num_nodes > 1) if own is None else (1.0, 0.0)
        largest = messages.ranks[-1]
        per_doubling = _UNCERTAINTY_BETWEEN_NODES if num_nodes > 1 else UNCERTAINTY_PER_DOUBLING
        uncertainty = math.hypot(
            uncertainty, per_doubling * max(0.0, math.log2(world_size / largest))
        )
        alone_s = grouped_s(
            messages, size_bytes, self.collective, ranks=world_size, nodes=num_nodes
        )
        result: Samples = alone_s * ratio * np.exp(uncertainty * self.deviates)
        return result

    @staticmethod
    def _unseen(*, crosses: bool) -> tuple[float, float]:
        return (_BETWEEN_RATIO if crosses else 1 / _BETWEEN_RATIO), _BETWEEN_UNCERTAINTY


def grouped_s(
    messages: MessageCost,
    size_bytes: float | Samples,
    collective: str,
    *,
    ranks: int,
    nodes: int | None = None,
    rate: Samples | float = 1.0,
) -> Samples:
    """Time of a collective of one tier, shape ``(num_draws,)``; of many at once, one row for each. [s]

    Beyond the largest group measured a library may have a better algorithm than the one it took
    there, but the group is never faster than that one.

    Parameters
    ----------
    size_bytes
        One size, or many of shape ``(num_sizes, 1)``.
    nodes
        That the group spans, if known. Inside one node NCCL's trees are chains, no better than rings.
    rate
        What-if: bandwidth over what it is.
    """

    def in_group(members: int) -> Samples:
        level = single_level(messages, "links", members, rate=rate)
        spanned = min(nodes or 1, members)
        sent_bytes = size_bytes * message_bytes(collective, 1.0, members, spanned, messages.library)
        count = num_messages(collective, members)
        return count * (level.latency_s + level.transfer_s(sent_bytes))

    own_s, largest = in_group(ranks), messages.ranks[-1]
    has_others = messages.library == "unknown" or (messages.library == "nccl" and nodes != 1)
    if ranks <= largest or collective != "all_reduce" or not has_others:
        return own_s
    level = single_level(messages, "links", ranks, rate=rate)
    other_s = all_reduce_s([level], size_bytes, library=messages.library)
    result: Samples = np.minimum(own_s, np.maximum(other_s, in_group(largest)))
    return result


def single_level(
    messages: MessageCost,
    tier: str,
    members: int,
    *,
    crossings: int | None = None,
    rate: Samples | float = 1.0,
    inside_node: bool = False,
) -> PricedLevel:
    """A tier whose messages were measured; ``rate`` is the part of its bandwidth that is left."""
    latency_s = messages.latency_s(members)

    def transfer_s(size_bytes: float | Samples) -> Samples:
        if isinstance(size_bytes, np.ndarray):
            whole_s = messages.read_many(size_bytes[:, 0], members)
        else:
            whole_s = messages.read(size_bytes, members)
        # Below the smallest message measured this is negative, so that small ones cost less than it:
        # no transfer, which another rate would change.
        extra_s = whole_s - latency_s
        result: Samples = np.where(extra_s > 0, extra_s / rate, extra_s)
        return result

    return PricedLevel(
        tier=tier,
        members=members,
        crossings=members - 1 if crossings is None else crossings,
        latency_s=latency_s,
        transfer_s=transfer_s,
        inside_node=inside_node,
    )


def busbw_factor(collective: str, *, world_size: int) -> float | None:
    """Bus bandwidth over size per time, or ``None`` for a collective that has no convention.

    References
    ----------
    .. [1] nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    if collective == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if collective in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (world_size - 1) / world_size
    return 1.0 if collective in {"broadcast", "reduce", "send_recv"} else None
