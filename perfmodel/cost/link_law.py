"""Collectives of ranks that have links of their own (NCCL, MPI): their time over the array and the group.

A collective costs its launch once, a P2P latency for every message that waits for another one, and bytes twice: what
crosses a link, which grows with the group, and the rank's own array, which does not. Large arrays go by
other protocols, whose starts are longer in any group:

    time(n, size) = start + steps(n) p2p + size (sent(n) / link rate + 1 / own rate)
                    + later start * size / (size + half size sqrt(n))

``steps`` and ``sent`` are those of the fastest algorithm: a ring has ``2 (n - 1)`` and ``2 (n - 1) / n`` in an
all-reduce. So a larger group reaches a higher bus bandwidth, as published tables of 2, 4 and 8 GPUs show. They
also show that protocols change at larger arrays in larger groups: between the same array and the same share.

What protocols add, by size, is carried from the measured groups to others as a factor on the law.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.cost import CurveDraws, Samples, deviates
from perfmodel.cost.collectives import (
    LATER_BYTES,
    LATER_START_S,
    START_LOG_ERROR,
    START_S,
    TREE_EFFICIENCY,
    Algorithm,
    Transfer,
    library_of,
    message_bytes,
    num_messages,
)
from perfmodel.cost.group_cost import GroupCost, Law, joined
from perfmodel.machine.measured import MeasuredCollective

#: Beliefs inside a node and between nodes, as medians and standard deviations of the logarithm: start [s], P2P latency
#: [s], link rate [B/s], own rate [B/s], later start [s], half size [B]. Those inside a node but the link rate
#: are of 20 published series of 2 to 8 GPUs (A100, H100, B200: 5 to 10 us, 0.8 to 1.4 us, 0.6 to 1.4 TB/s: some
#: passes over the memory, 8 to 50 us), the rest are priors.
_INSIDE: Final = (
    (START_S, 1.2e-6, 5e10, 7e11, LATER_START_S, LATER_BYTES),
    (START_LOG_ERROR, 0.7, 3.0, 0.5, 1.0, 1.0),
)
_BETWEEN: Final = (
    (15e-6, 10e-6, 5e9, 7e11, LATER_START_S, LATER_BYTES),
    (1.0, 1.0, 3.0, 1.0, 1.0, 1.0),
)
NUM_PARAMETERS: Final = 6
#: Error of a point, in log, against which parameters are read.
_POINT_ERROR: Final = 0.1
#: Weight of a point of another collective on the same rings, where one group was measured. It alone tells neither
#: a start from latencies nor a link from the rank's own memory. Of 0, 1/4, 1/2 and 1, a quarter tells published
#: all-reduces of 4 and 8 GPUs best from all-reduces, all-gathers and reduce-scatters of 2.
_OTHERS_WEIGHT: Final = 0.25
_ON_RINGS: Final = frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter"})
#: Sizes, in doublings, over which the factor on the law is averaged before other groups take it: protocols
#: change at other sizes in other groups.
_SMOOTHING_DOUBLINGS: Final = 1.0
#: Uncertainty, in log, of that factor per square root of a doubling of the group, before groups told it, and
#: for how many differences between groups it counts.
_UNCERTAINTY_PER_DOUBLING: Final = 0.08
_PRIOR_WEIGHT: Final = 1.0


class Path(NamedTuple):
    """What an algorithm makes of a collective: messages that follow one another, and arrays sent over a link."""

    steps: float | Samples
    sent: float | Samples
    ranks: float | Samples


def paths(collective: str, ranks: int, nodes: int, library: str) -> list[Path]:
    """The algorithms that a library has for a group; trees are chains inside a node, no better than rings."""
    found = library_of(library)
    if _is_chain(collective, library):
        return [Path(ranks - 1, 1.0, ranks)]
    count = num_messages(collective, ranks)
    sent = count * message_bytes(collective, 1.0, ranks, nodes, library)
    # Messages to all others leave at once.
    ring = Path(math.log2(ranks) if collective == "all_to_all" else count, sent, ranks)
    if collective != "all_reduce":
        return [ring]
    chosen = [ring]
    if Algorithm.TREE in found.algorithms and nodes > 1:
        inside = max(1.0, ranks / nodes)
        halves = 1 if nodes == 2 else 2
        steps = 2 * (inside - 1 + math.ceil(math.log2(nodes)))
        chosen.append(Path(steps, halves / TREE_EFFICIENCY, ranks))
    if Algorithm.HALVING_DOUBLING in found.algorithms:
        chosen.append(Path(2 * math.ceil(math.log2(ranks)), sent, ranks))
    return chosen


def _beside(every: Sequence[Sequence[Path]], counts: Sequence[int]) -> list[Path]:
    """The ways of several groups as arrays, a row for each of their points; who has fewer repeats the last."""
    most = max(map(len, every))
    return [
        Path(
            *(
                np.repeat(np.array(column, np.float64), counts)[:, np.newaxis]
                for column in zip(*(ways[min(k, len(ways) - 1)] for ways in every), strict=True)
            )
        )
        for k in range(most)
    ]


def _is_chain(collective: str, library: str) -> bool:
    """Whether an array goes along a chain of all ranks once, in pieces."""
    return collective == "broadcast" and library_of(library).chained_broadcast


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkLaw(Law):
    """The constants of the law."""

    @classmethod
    def fit(
        cls, collective: str, groups: Sequence[MeasuredCollective], library: str, drawn: Samples
    ) -> "LinkLaw":
        """Fit to the points of all groups, robust least squares on logarithms.

        Points of other collectives on rings weigh less; those of others than these are left out.

        ``drawn``: Of a standard normal distribution, shape ``(NUM_PARAMETERS, num_draws)``.
        """
        medians, spreads = _BETWEEN if any(group.num_nodes > 1 for group in groups) else _INSIDE
        centre, spread = np.log(medians), np.array(spreads)[:, np.newaxis]
        used = [
            group
            for group in groups
            if group.collective == collective or {group.collective, collective} <= _ON_RINGS
        ]
        sizes = np.array([[point.at] for group in used for point in group.points])
        ways = _beside(
            [paths(group.collective, group.world_size, group.num_nodes, library) for group in used],
            [len(group.points) for group in used],
        )
        logs = np.log([[point.time_s] for group in used for point in group.points])
        weights = np.array(
            [
                [1.0 if group.collective == collective else _OTHERS_WEIGHT]
                for group in used
                for _ in group.points
            ]
        )

        def residuals(p: Samples) -> Samples:
            law = cls(logs=p)
            data: Samples = weights * (np.log(law.time_s(sizes, ways)) - logs) / _POINT_ERROR
            return np.concatenate([data, (p - centre[:, np.newaxis]) / spread])

        # The largest array is all bytes: a start from which the rest is found.
        start = centre.copy()
        own = [group for group in used if group.collective == collective]
        size, time_s = max((p.at, p.time_s) for group in own for p in group.points)
        start[2] = math.log(2 * size / time_s)
        return cls.fitted(residuals, [start], drawn)

    def time_s(self, size_bytes: Samples, ways: Iterable[Path]) -> Samples:
        """By the fastest of several ways, shape ``(num_sizes, num_draws)`` for sizes ``(num_sizes, 1)``. [s]"""
        start_s, p2p_s, link_rate, own_rate, later_s, half_size = np.exp(self.logs)
        own_s = size_bytes / own_rate
        sent_s = size_bytes / link_rate
        times_s = [
            start_s
            + own_s
            + way.steps * p2p_s
            + way.sent * sent_s
            + later_s * size_bytes / (size_bytes + half_size * np.sqrt(way.ranks))
            for way in ways
        ]
        return np.asarray(np.minimum.reduce(times_s))


class Factor(NamedTuple):
    """What a group took over what the law says, by size."""

    sizes_bytes: Samples
    """Shape ``(num_sizes,)``, ascending. [B]"""
    logs: Samples
    """Shape ``(num_sizes, num_draws)``; draw 0 is as measured."""

    def at(self, sizes_bytes: Samples) -> Samples:
        """Between sizes, one row each: straight lines over the logarithm of the size."""
        x, known = np.log(sizes_bytes), np.log(self.sizes_bytes)
        right = np.clip(np.searchsorted(known, x), 1, max(1, len(known) - 1))
        if len(known) == 1:
            return np.repeat(self.logs, len(x), axis=0)
        left = right - 1
        weight = np.clip((x - known[left]) / (known[right] - known[left]), 0.0, 1.0)[:, np.newaxis]
        return np.asarray(self.logs[left] * (1 - weight) + self.logs[right] * weight)

    def smoothed(self, growth: float) -> "Factor":
        """Averaged over neighbouring sizes, for a group ``growth`` times as large, whose protocols change later."""
        moved = self.sizes_bytes * math.sqrt(growth)
        return Factor(self.sizes_bytes, _near(self.sizes_bytes, moved) @ self.logs)


def _near(at_bytes: Samples, sizes_bytes: Samples) -> Samples:
    """Weights of measured sizes at others, shape ``(num_at, num_sizes)``; rows sum to 1."""
    distance = np.log2(at_bytes)[:, np.newaxis] - np.log2(sizes_bytes)
    nearest = np.abs(distance).min(axis=1, keepdims=True)
    weights = np.exp(-((distance**2 - nearest**2) / (2 * _SMOOTHING_DOUBLINGS**2)))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCost(GroupCost):
    """A collective of any group: measured groups come out as they were, others by the law and their factor."""

    nodes: tuple[int, ...]
    """Of each measured group."""
    factors: tuple[Factor, ...]
    """The same."""
    law: LinkLaw
    deviates: Samples
    """Of the factor in groups that were not measured, shape ``(num_draws,)``; draw 0 is 0."""
    _curves: dict[tuple[int, int], tuple[CurveDraws, Samples]] = field(
        default_factory=dict, init=False
    )

    @classmethod
    def sample(
        cls,
        groups: Iterable[MeasuredCollective],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
        others: Iterable[MeasuredCollective] = (),
    ) -> "LinkCost":
        """Draw the law of a collective, and the factors of its groups, at least one.

        ``others``: Groups of other collectives on the same links.
        """
        found = joined(groups)
        collective = found[0].collective
        drawn = deviates(rng, NUM_PARAMETERS + 2, num_draws)
        others = tuple(others)
        # Links inside a node tell nothing of those between.
        crosses = any(group.num_nodes > 1 for group in found)
        told = [group for group in found if (group.num_nodes > 1) == crosses]
        # Several groups tell a start from latencies; one alone needs the other collectives.
        if len(told) == 1:
            told += [group for group in others if (group.num_nodes > 1) == crosses]
        law = LinkLaw.fit(collective, told, library, drawn[:NUM_PARAMETERS])

        def factor(group: MeasuredCollective) -> Factor:
            sizes = np.array([point.at for point in group.points])
            ways = paths(group.collective, group.world_size, group.num_nodes, library)
            errors = np.array([[point.relative_error] for point in group.points])
            noise = errors * deviates(rng, len(sizes), num_draws)
            logs = np.log([[point.time_s] for point in group.points]) + noise
            return Factor(sizes, logs - np.log(law.time_s(sizes[:, np.newaxis], ways)))

        return cls(
            collective=collective,
            library=library,
            ranks=tuple(group.world_size for group in found),
            nodes=tuple(group.num_nodes for group in found),
            factors=tuple(map(factor, found)),
            law=law,
            deviates=drawn[-2],
            between_sizes=drawn[-1],
        )

    @property
    def sizes_bytes(self) -> tuple[float, float]:
        """Smallest and largest message measured in any group. [B]"""
        parts = [num_messages(self.collective, ranks) for ranks in self.ranks]
        return (
            min(float(f.sizes_bytes[0]) / n for f, n in zip(self.factors, parts, strict=True)),
            max(float(f.sizes_bytes[-1]) / n for f, n in zip(self.factors, parts, strict=True)),
        )

    def group_s(self, size_bytes: ArrayLike, ranks: int, *, nodes: int | None = None) -> Samples:
        """By the law and the group's factor on it. [s]

        If ``nodes`` is unknown, as many ranks share one as in the largest group measured.
        """
        spanned = self._spanned(ranks, nodes)
        ways = paths(self.collective, ranks, spanned, self.library)
        sizes = np.asarray(size_bytes, np.float64)
        column = sizes.reshape(-1, 1)
        curve, known = self._curve(ranks, spanned)
        at = self.law.nominal().time_s(column, ways)[:, 0]
        rows_s = curve.read_many(at) * self.away_from_sizes(column[:, 0], known)
        return rows_s if sizes.ndim else rows_s[0]

    def message(self, members: int, *, nodes: int | None) -> tuple[Samples, Samples, Transfer]:
        """Start and P2P latency are the law's; the rest of a ring is transfer. [s]"""
        start_s, p2p_s = np.exp(self.law.logs[:2])
        (ring, *_) = paths(self.collective, members, self._spanned(members, nodes), self.library)
        latencies_s = start_s + ring.steps * p2p_s
        # An array goes along a chain once.
        chained = _is_chain(self.collective, self.library)
        count = 1 if chained else num_messages(self.collective, members)

        def transfer_s(size_bytes: float | Samples) -> Samples:
            whole = np.asarray(size_bytes) * count / ring.sent
            whole_s = self.group_s(whole, members, nodes=nodes)
            return np.asarray((whole_s - latencies_s) / count)

        return start_s, p2p_s, transfer_s

    def _spanned(self, ranks: int, nodes: int | None) -> int:
        if nodes is not None:
            return min(nodes, ranks)
        groups = zip(self.ranks, self.nodes, strict=True)
        measured, of_these = min(groups, key=lambda g: (g[0] < ranks, abs(g[0] - ranks)))
        return of_these if ranks <= measured else math.ceil(ranks * of_these / measured)

    def _curve(self, ranks: int, nodes: int) -> tuple[CurveDraws, Samples]:
        """Times over what the law says, and the sizes at which they are known."""
        if (ranks, nodes) not in self._curves:
            sizes, logs = self._factor(ranks)
            ways = paths(self.collective, ranks, nodes, self.library)
            law_s = self.law.time_s(sizes[:, np.newaxis], ways)
            if ranks > self.ranks[-1]:
                # A better algorithm does not make more ranks faster than those that were measured.
                fewer = paths(self.collective, self.ranks[-1], self.nodes[-1], self.library)
                law_s = np.maximum(law_s, self.law.time_s(sizes[:, np.newaxis], fewer))
            time_s = np.maximum.accumulate(law_s * np.exp(logs), axis=0)
            at = self.law.nominal().time_s(sizes[:, np.newaxis], ways)[:, 0]
            self._curves[ranks, nodes] = CurveDraws(at, time_s, self.between_sizes), sizes
        return self._curves[ranks, nodes]

    def _factor(self, ranks: int) -> Factor:
        """On the law in a group: measured, between two measured ones, or carried to others with its uncertainty."""
        right, weight = self.neighbours(ranks)
        nearest, found = self.ranks[right], self.factors[right]
        if ranks == nearest:
            return found
        if weight < 1.0:
            left = self.factors[right - 1]
            sizes = np.union1d(left.sizes_bytes, found.sizes_bytes)
            return Factor(sizes, left.at(sizes) * (1 - weight) + found.at(sizes) * weight)
        smooth = found.smoothed(ranks / nearest)
        distance = math.sqrt(abs(math.log2(ranks / nearest)))
        spread = distance * self._spread(found.sizes_bytes)[:, np.newaxis]
        return smooth._replace(logs=smooth.logs + spread * self.deviates)

    def _spread(self, sizes_bytes: Samples) -> Samples:
        """Uncertainty of a factor, in log, per square root of a doubling: how much measured groups differ there.

        Shape ``(num_sizes,)``; a belief where there is one group.
        """
        squares = np.full(len(sizes_bytes), _PRIOR_WEIGHT * _UNCERTAINTY_PER_DOUBLING**2)
        pairs = list(zip(self.ranks, self.factors, strict=True))
        for (fewer, left), (more, right) in itertools.pairwise(pairs):
            known = right.sizes_bytes
            change = (right.at(known) - left.at(known))[:, 0]
            squares += _near(sizes_bytes, known) @ change**2 / math.log2(more / fewer)
        return np.asarray(np.sqrt(squares / (_PRIOR_WEIGHT + len(pairs) - 1)))
