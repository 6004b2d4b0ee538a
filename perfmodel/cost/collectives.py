"""Collectives: what one consists of, by which algorithm it crosses tiers of links, and how long that takes.

Every collective is a number of equal messages one after another. A ring all-reduce of ``n`` ranks has
``2 (n - 1)`` messages of ``1 / n`` of the array [1]_; all-gather and reduce-scatter are its halves.

References
----------
.. [1] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
   J. Parallel Distrib. Comput. 69(2):117-124, 2009.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.cost import Samples
from perfmodel.statistics import FloatArray

_COPIED: Final = frozenset({"broadcast", "send_recv", "reduce"})
"""Collectives whose messages are the whole array."""
_PAIR: Final = 2


class Algorithm(enum.StrEnum):
    """How an all-reduce goes over the tiers."""

    RING = "ring"
    """One ring through all ranks: every message waits for the slowest tier, and pays the latency of the
    tier that it crosses."""
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


_SWITCHED: Final = frozenset({Algorithm.NVLS, Algorithm.NVLS_TREE})


class Protocol(NamedTuple):
    """What a library makes of a link; data sheets and cluster files tell the latency of its simple protocol."""

    latency: float
    """Part of the latency that remains."""
    rate: float
    """Part of the rate that remains."""


#: Whole pieces with a barrier each.
SIMPLE: Final = Protocol(1.0, 1.0)
#: A protocol spares barriers and copies by the host, 11 us of NCCL's 14 us, and no distance. [s]
_MOST_SPARED_S: Final = 12e-6


#: Start of NCCL, by 20 published series of 2 to 8 GPUs (5 to 10 us); what large arrays add, whose protocols start
#: later, and the array at which half of that is due, over the root of the ranks. [s, s, B]
START_S: Final = 8e-6
LATER_START_S: Final = 15e-6
LATER_BYTES: Final = 2e6
#: Start between nodes over that inside. Three published logs of 2 and 4 nodes (InfiniBand, RoCE) prefer 4 to 6; by what
#: the other two prefer each is 6, 14 and 23 % off, in log, by 1 24, 77 and 63 %. Virtual networks of clouds (TCPX,
#: SR-IOV) prefer 10 and more.
BETWEEN_STARTS: Final = 5.0
#: Standard deviation, in log, between systems.
START_LOG_ERROR: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What distinguishes a collective library; a new one is a new row of ``LIBRARIES``."""

    algorithms: tuple[Algorithm, ...]
    """Of an all-reduce; the fastest is taken."""
    latency_s: float
    """Of a message where one size was measured, so that nothing tells it from transfer. [s]"""
    starts: bool = False
    """Whether a collective of which none was measured takes a start."""
    protocols: tuple[Protocol, ...] = (SIMPLE,)
    """Of links that were not measured; the fastest is taken."""
    by_processors: bool = False
    """Whether ranks move the bytes themselves, so that those of one machine share its processors."""
    trees_of_two: bool = False
    """Whether an all-reduce between two nodes is a pair of trees with a half of the array each."""
    chained_broadcast: bool = False
    """Whether a broadcast goes in pieces along a chain of all ranks, instead of down a binomial tree."""
    scatter_passes: int = 1
    """How often a reduce-scatter moves the array past every rank; 2: it is an all-reduce."""


#: gloo has rings alone (allreduce.cc, no algorithm named), and torch's reduce-scatter is an all-reduce of
#: which each rank keeps a part. NCCL takes the algorithm with the least predicted time; latencies of its simple
#: protocol take 3.4 us (NVLink) to 14 us (network), of which flags in every 16 B (LL) leave 0.6 and 2.7 us at
#: 0.26 (tree) to 0.5 (ring) of the rate, flags in every 128 B 1.9 and 4 us at 120/128. Up to two nodes a graph
#: has the bandwidth that it has inside a node. A broadcast has its rings alone (src/graph/tuning.cc,
#: 2026-06-11). Others are taken for MPI.
LIBRARIES: Final[Mapping[str, Library]] = MappingProxyType(
    {
        "gloo": Library(
            algorithms=(Algorithm.RING,), latency_s=40e-6, by_processors=True, scatter_passes=2
        ),
        "nccl": Library(
            algorithms=(Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE),
            latency_s=7e-6,
            starts=True,
            protocols=(SIMPLE, Protocol(0.5, 120 / 128), Protocol(0.2, 0.4)),
            trees_of_two=True,
            chained_broadcast=True,
        ),
        "mpi": Library(
            algorithms=(Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.HALVING_DOUBLING),
            latency_s=7e-6,
        ),
    }
)


def library_of(name: str) -> Library:
    """The record of a library."""
    return LIBRARIES.get(name, LIBRARIES["mpi"])


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over size per time: bytes that a ring sends over each link, over the array's.

    Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    if collective in _COPIED:
        return 1.0
    return float(ring_share(ranks, passes=2 if collective == "all_reduce" else 1))


def ring_share(ranks: ArrayLike, *, passes: int = 1) -> FloatArray:
    """Part of an array that a ring sends over each link: ``passes (n - 1) / n``."""
    n = np.asarray(ranks, np.float64)
    return passes * (n - 1) / n


def num_messages(collective: str, ranks: int) -> int:
    """Messages that follow one another."""
    if collective == "broadcast":
        return math.ceil(math.log2(ranks))
    if collective == "send_recv":
        return 1
    return (ranks - 1) * (2 if collective == "all_reduce" else 1)


def message_bytes(
    collective: str, size_bytes: float, ranks: int, nodes: int = 1, library: str = "gloo"
) -> float:
    """Size of one of them, in proportion to ``size_bytes``, that of the whole array. [B]

    A ring sends a part of ``1 / ranks`` over every link, those between nodes too.
    """
    if collective in _COPIED:
        return size_bytes
    if collective == "all_to_all" and nodes > 1:
        # All pairs across: those inside a node need no link between nodes.
        return size_bytes * (nodes - 1) / nodes / (ranks - 1)
    if collective == "all_reduce" and nodes == _PAIR and library_of(library).trees_of_two:
        return size_bytes / 2 / (ranks - 1)
    return size_bytes / ranks


class Work(NamedTuple):
    """What one of gloo's equal messages stands for."""

    rounds: float
    """P2P latencies that follow one another."""
    loads: float
    """Messages that the busiest link carries one after another."""
    handled: float
    """Messages that all ranks together handle."""


def work(collective: str, ranks: int) -> Work:
    """What gloo does for one message of a collective (broadcast.cc, allgather.cc, alltoall.cc, allreduce.cc)."""
    count, passes = num_messages(collective, ranks), LIBRARIES["gloo"].scatter_passes
    match collective:
        case "broadcast":
            return Work(1.0, serial_copies(ranks) / count, (ranks - 1) / count)
        case "all_to_all":
            return Work(1 / count, 1.0, ranks)
        case "reduce_scatter":
            return Work(passes, passes, passes * ranks)
        case "send_recv":
            return Work(1.0, 1.0, 1.0)
        case _:
            return Work(1.0, 1.0, ranks)


def serial_copies(ranks: int) -> int:
    """Copies of an array that follow one another in gloo's broadcast until the last rank has it.

    Rank v sends to v + 2^k for every 2^k > v, all at once over one link (gloo/broadcast.cc).
    """
    done = [0] * ranks
    for rank in range(ranks):
        steps = (2**k for k in range(rank.bit_length(), (ranks - 1).bit_length()))
        children = [rank + step for step in steps if rank + step < ranks]
        for child in children:
            done[child] = done[rank] + len(children)
    return max(done)


#: Rate of a tree over that of a ring through the same links: NCCL's tuner grants 0.92, times a factor that
#: falls to 0.4 at middle sizes. Its least is taken: published all-reduces of 32 and 1,440 GPUs were 7 and 13 % off
#: with it, 7 and 37 % with a share that rises to 0.92 with the size. Of the first, 1 to 64 MiB, 0.2 to 0.46 leave
#: 4 to 5 %, 0.5 to 0.9 leave 5 to 6 %. Pairs of trees between two nodes reach 0.87 to 1.06 from 1 GB on.
MOST_OF_TREES: Final = 0.92
TREE_EFFICIENCY: Final = MOST_OF_TREES * 0.4
#: Until a switch has added up the first piece and handed it back: NVLS over NVLink in NCCL's tuner. [s]
SWITCH_LATENCY_S: Final = 25e-6

Transfer = Callable[[float | Samples], Samples]
"""Time over bytes, of shape ``(num_draws,)``; sizes of shape ``(num_sizes, 1)`` give one row each. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedSum:
    """An all-reduce of the members of one tier by its switches."""

    latency_s: Samples
    transfer_s: Transfer
    """Over the size of the whole array."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelCost:
    """One tier in use; a message through it takes its latency and its transfer, one after the other."""

    tier: str
    members: int
    crossings: int
    """Edges of a chain through all ranks that end in another member of this tier."""
    start_s: Samples | float = 0.0
    """Once for a collective that crosses the tier, whatever the algorithm. [s]"""
    latency_s: Samples
    transfer_s: Transfer
    """Over the bytes that one member sends at once, through all its links."""
    inside_node: bool = False
    """Whether it joins devices of one machine: NCCL's trees are chains there."""
    tree_share: Samples | float = TREE_EFFICIENCY
    """Rate of a tree over that of a ring."""
    switch: SwitchedSum | None = None
    """Of the innermost tier, if its switches can add."""
    is_measured: bool = True
    """Whether what it costs already is that of the fastest protocol."""

    def under(self, protocol: Protocol) -> "LevelCost":
        """The tier under a protocol."""
        if self.is_measured or protocol is SIMPLE:
            return self
        spared_s = np.minimum((1 - protocol.latency) * self.latency_s, _MOST_SPARED_S)
        return replace(
            self,
            latency_s=self.latency_s - spared_s,
            transfer_s=lambda size_bytes: self.transfer_s(size_bytes) / protocol.rate,
        )

    @property
    def doublings(self) -> int:
        """Rounds in which each member reaches another one."""
        return math.ceil(math.log2(self.members))


Levels = Sequence[LevelCost]


def all_reduce_s(levels: Levels, size_bytes: float | Samples, *, library: str) -> Samples:
    """Time of one all-reduce alone, shape ``(num_draws,)``; of many at once, one row for each. [s]

    ``size_bytes``: One size, or many of shape ``(num_sizes, 1)``.
    """
    times_s = [_total(_parts(*choice, size_bytes)) for choice in _choices(levels, library)]
    return np.asarray(np.minimum.reduce(times_s))


def start_s(size_bytes: float | Samples, ranks: int, *, library: str) -> Samples:
    """What a collective inside a node costs once, whatever the algorithm, where none was measured. [s]

    start + later start S / (S + half sqrt(n))
    """
    size = np.asarray(size_bytes, np.float64)
    later_s = LATER_START_S * size / (size + LATER_BYTES * math.sqrt(ranks))
    return (START_S + later_s) * library_of(library).starts


def half_s(levels: Levels, size_bytes: float | Samples, *, library: str) -> Samples:
    """Time of an all-gather, or of a reduce-scatter: half of an all-reduce without trees. [s]"""
    halves = {Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.HALVING_DOUBLING}
    choices = [choice for choice in _choices(levels, library) if choice[0] in halves]
    times_s = [_total(_parts(*choice, size_bytes)) for choice in choices]
    return np.asarray((np.minimum.reduce(times_s) + _start_s(levels)) / 2)


def broadcast_s(levels: Levels, size_bytes: float | Samples, *, library: str) -> Samples:
    """Time of a binomial tree, or of a chain that passes pieces on. [s]

    A tree has ``ceil(log2 m)`` rounds in each tier of ``m`` members. In a chain the slowest tier decides how
    long the array takes.
    """
    if library_of(library).chained_broadcast:
        times_s = [
            sum((level.crossings * level.latency_s for level in used), start=np.zeros(1))
            + np.maximum.reduce([level.transfer_s(size_bytes) for level in used])
            for used in _protocols(levels, library)
        ]
        return np.asarray(np.minimum.reduce(times_s) + _start_s(levels))
    rounds = (each.doublings * (each.latency_s + each.transfer_s(size_bytes)) for each in levels)
    return sum(rounds, start=_start_s(levels))


def _start_s(levels: Levels) -> Samples:
    """What a collective costs once, in all its tiers. [s]"""
    return sum((np.asarray(level.start_s) for level in levels), start=np.zeros(1))


def bottleneck(levels: Levels, size_bytes: float, *, library: str) -> str:
    """Which tier costs most of an all-reduce at nominal parameters, by which algorithm, and why."""

    def nominal_s(choice: _Choice) -> float:
        return float(_total(_parts(*choice, size_bytes))[0])

    name, used = min(_choices(levels, library), key=nominal_s)
    _, what, level = max(
        ((float(s[0]), what, level) for what, s, level in _parts(name, used, size_bytes)),
        key=lambda part: part[0],
    )
    return f"{level.tier} ({what}, {name} of {level.members})"


_Part = tuple[str, Samples, LevelCost]
"""What it is (latency or bandwidth), how long it takes, and where."""


_Choice = tuple[Algorithm, Levels]
"""An algorithm, and the tiers under a protocol."""


def _choices(levels: Levels, library: str) -> list[_Choice]:
    """Algorithms and protocols of a library that these tiers allow."""
    found = library_of(library)
    several, adds = len(levels) > 1, levels[0].switch is not None
    allowed = {
        Algorithm.HIERARCHICAL: several,
        Algorithm.NVLS: adds and not several,
        Algorithm.NVLS_TREE: adds and several,
        # One chain through all ranks of a node is no better than their ring.
        Algorithm.TREE: not all(level.inside_node for level in levels),
    }
    # Switches add under the simple protocol alone.
    protocols = _protocols(levels, library)
    return [
        (name, used)
        for name in found.algorithms
        if allowed.get(name, True)
        for used in (protocols[:1] if name in _SWITCHED else protocols)
    ]


def _protocols(levels: Levels, library: str) -> list[Levels]:
    """The tiers under each protocol of a library that changes them, the simple one first."""
    known = all(level.is_measured for level in levels)
    protocols = (SIMPLE,) if known else library_of(library).protocols
    return [[level.under(protocol) for level in levels] for protocol in protocols]


def _total(parts: Sequence[_Part]) -> Samples:
    """Latencies add up; of a pipeline's transfers each is listed once, by its slowest tier."""
    return sum((seconds for _, seconds, _ in parts), start=np.zeros(1))


def _parts(algorithm: Algorithm, levels: Levels, size_bytes: float | Samples) -> list[_Part]:
    times = _times(algorithm, levels, size_bytes)
    parts: list[_Part] = [
        ("latency", latency_s + level.start_s, level)
        for level, (latency_s, _) in zip(levels, times, strict=True)
    ]
    transfers = [transfer_s for _, transfer_s in times]
    if algorithm in {Algorithm.HIERARCHICAL, Algorithm.HALVING_DOUBLING}:
        parts += [("bandwidth", s, level) for s, level in zip(transfers, levels, strict=True)]
        return parts
    # Of a pipeline through all tiers the slowest one decides, in every draw on its own.
    slowest = levels[int(np.argmax([seconds.flat[0] for seconds in transfers]))]
    return [*parts, ("bandwidth", np.maximum.reduce(transfers), slowest)]


def _times(
    algorithm: Algorithm, levels: Levels, size_bytes: float | Samples
) -> list[tuple[Samples, Samples]]:
    """Of each tier all latencies that follow one another, and how long its links are busy. [s]"""
    inner, *outer = levels
    joined = math.prod(level.members for level in outer) if outer else inner.members
    # Up and down a tree; but of two members each is the root of one of two trees with a half of the array.
    passes = 1 if joined == _PAIR else 2
    match algorithm:
        case Algorithm.RING:
            num_ranks = sum(level.crossings for level in levels) + 1
            sent = [(num_messages("all_reduce", num_ranks), size_bytes / num_ranks)] * len(levels)
            counts = [2 * level.crossings for level in levels]
        case Algorithm.TREE:
            chained = [level.inside_node or (bool(outer) and level is inner) for level in levels]
            sent = [
                (2 if chain else passes, size_bytes / level.tree_share)
                for level, chain in zip(levels, chained, strict=True)
            ]
            counts = [
                2 * (level.members - 1 if chain else level.doublings)
                for level, chain in zip(levels, chained, strict=True)
            ]
        case Algorithm.HIERARCHICAL:
            counts = [num_messages("all_reduce", level.members) for level in levels]
            sent = [
                (times, size_bytes / v.members) for times, v in zip(counts, levels, strict=True)
            ]
        case Algorithm.HALVING_DOUBLING:
            return [
                (2 * level.doublings * level.latency_s, _halved_s(level, size_bytes))
                for level in levels
            ]
        case Algorithm.NVLS | Algorithm.NVLS_TREE:
            assert inner.switch is not None, "chosen where switches add"
            return [
                (inner.switch.latency_s, inner.switch.transfer_s(size_bytes)),
                *(
                    (2 * level.doublings * level.latency_s, passes * level.transfer_s(size_bytes))
                    for level in outer
                ),
            ]
    return [
        (times * level.latency_s, count * level.transfer_s(of_one))
        for level, times, (count, of_one) in zip(levels, counts, sent, strict=True)
    ]


def _halved_s(level: LevelCost, size_bytes: float | Samples) -> Samples:
    """A half, a quarter ... of the array, there and back; whoever has no partner sends all of it first."""
    rounds = level.members.bit_length() - 1
    parts = [level.transfer_s(size_bytes / 2**k) for k in range(1, rounds + 1)]
    if level.members != 2**rounds:
        parts.append(level.transfer_s(size_bytes))
    return 2 * sum(parts, start=np.zeros(1))
