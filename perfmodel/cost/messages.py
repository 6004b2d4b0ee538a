"""The time of one message of a collective, over its size and the size of the group.

Every collective is a number of equal messages one after another; so what was measured in any group
tells about one message. Links of its own make a message cost the same in every group; processors
that all ranks share make it cost more with every rank. Which of the two holds is read from the groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

import numpy as np

from perfmodel.cost.exchanges import soft_maximum
from perfmodel.cost.terms import CurveDraws, Samples
from perfmodel.errors import UsageError
from perfmodel.machine.measured import CurvePoint

#: Beliefs, as medians, each within a factor of exp(3): a hop and a byte of a link, handling a message
#: and a byte of it; and how much sharper than a sum the larger of the two wins. [s, s/B, s, s/B, 1]
_BELIEFS: Final = (40e-6, 1e-9, 1e-6, 1e-11, 7.0)
NUM_PARAMETERS: Final = len(_BELIEFS)
_SPREADS: Final = (3.0, 3.0, 3.0, 3.0, 1.0)
#: Error of a point, in log, against which parameters are read: points of a group err together.
_POINT_ERROR: Final = 0.05
#: Keeps the law rising in the size where it is flat to the last digit.
_TILT: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one of a collective's equal messages stands for."""

    rounds: float
    """Hops that follow one another."""
    loads: float
    """Messages that the busiest link carries one after another."""
    handled: float
    """Messages that all ranks together handle."""


def _everything_shared(
    groups: Mapping[int, Sequence[CurvePoint]], works: Mapping[int, Work]
) -> tuple[float, ...]:
    """Parameters by which the smallest group's messages show links, the largest's only processors."""
    smallest, largest = min(groups), max(groups)
    pairs = []
    for ranks, count in ((smallest, works[smallest].loads), (largest, works[largest].handled)):
        low, high = groups[ranks][0], groups[ranks][-1]
        pairs += [low.time_s / count, high.time_s / high.at / count]
    return (*pairs, _BELIEFS[-1])


def work(collective: str, ranks: int, num_messages: int) -> Work:
    """What gloo does, over the messages that the collective is counted as.

    References
    ----------
    .. [1] gloo, broadcast.cc, allgather.cc, alltoall.cc, allreduce.cc; reduce-scatter in torch is an
       all-reduce of which each rank keeps a part.
    """
    match collective:
        case "broadcast":
            return Work(
                rounds=1.0,
                loads=_tree_loads(ranks) / num_messages,
                handled=(ranks - 1) / num_messages,
            )
        case "all_to_all":
            return Work(rounds=1 / num_messages, loads=1.0, handled=ranks)
        case "reduce_scatter":
            return Work(rounds=2.0, loads=2.0, handled=2 * ranks)
        case "send_recv":
            return Work(rounds=1.0, loads=1.0, handled=1.0)
        case _:
            return Work(rounds=1.0, loads=1.0, handled=ranks)


def _tree_loads(ranks: int) -> int:
    """Messages on the slowest way from the root to a leaf of a binomial tree.

    A rank sends to all its children at once, so that they share its link and receive at the same time.
    """
    rounds = math.ceil(math.log2(ranks))
    done = [0] * ranks
    for rank in range(ranks):
        first = rank.bit_length()
        children = [rank + 2**i for i in range(first, rounds) if rank + 2**i < ranks]
        for child in children:
            done[child] = done[rank] + len(children)
    return max(done)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageLaw:
    """Logarithms of the parameters, shape ``(5, num_draws)``; draw 0 is the fit."""

    logs: Samples

    @classmethod
    def fit(
        cls,
        groups: Mapping[int, Sequence[CurvePoint]],
        works: Mapping[int, Work],
        deviates: Samples,
    ) -> "MessageLaw":
        """Fit to messages of several groups, least squares on logarithms.

        Parameters
        ----------
        deviates
            Of a standard normal distribution, shape ``(5, num_draws)``.
        """
        from scipy.optimize import least_squares  # noqa: PLC0415 - slow, and one group needs none

        sizes = [np.array([point.at for point in points]) for points in groups.values()]
        logs = np.log([point.time_s for points in groups.values() for point in points])
        centre = np.log(_BELIEFS)

        def residuals(p: Samples) -> Samples:
            law = cls(logs=p[:, np.newaxis])
            found = [
                law.message_s(of_one[:, np.newaxis], works[ranks])[:, 0]
                for ranks, of_one in zip(groups, sizes, strict=True)
            ]
            data: Samples = (np.log(np.concatenate(found)) - logs) / _POINT_ERROR
            return np.concatenate([data, (p - centre) / _SPREADS])

        # What is hidden at the start stays hidden: begin without shared processors, and with them.
        shared = np.log(_everything_shared(groups, works))
        starts = (centre, shared, np.where(np.arange(NUM_PARAMETERS) == 0, shared - 2.0, shared))
        solution = min(
            (least_squares(residuals, start, loss="soft_l1") for start in starts),
            key=lambda found: float(found.cost),
        )
        jacobian = np.asarray(solution.jac, dtype=np.float64)
        covariance = np.linalg.inv(jacobian.T @ jacobian)
        # What the law misses makes its parameters more uncertain than points alone.
        excess = max(1.0, float(np.mean(residuals(solution.x)[: len(logs)] ** 2)))
        spread = np.linalg.cholesky(covariance) * math.sqrt(excess)
        shifts = spread @ deviates
        shifts[:, 0] = 0.0
        return cls(logs=solution.x[:, np.newaxis] + np.clip(shifts, -3.0, 3.0))

    def message_s(self, message_bytes: Samples, of: Work) -> Samples:
        """Time of one message, shape ``(num_sizes, num_draws)`` for sizes of shape ``(num_sizes, 1)``. [s]"""
        p2p_s, s_per_byte, handling_s, handling_s_per_byte, sharpness = np.exp(self.logs)
        link_s = of.rounds * p2p_s + of.loads * s_per_byte * message_bytes
        host_s = of.handled * (handling_s + handling_s_per_byte * message_bytes)
        return soft_maximum(link_s, host_s, 1.0 + sharpness) * (1 + _TILT * np.log1p(message_bytes))

    def nominal(self) -> "MessageLaw":
        """The fit alone."""
        return MessageLaw(logs=self.logs[:, :1])


#: Latency of a message where one size was measured, so that nothing tells it from transfer: hops of
#: NCCL's simple protocol take 3.4 us (NVLink) to 14 us (network) [1]_, of TCP some tens. [s]
#:
#: .. [1] NCCL, src/graph/tuning.cc (2026-06-11).
_LATENCY_S: Final[Mapping[str, float]] = {"gloo": 40e-6, "nccl": 7e-6}
#: What is believed of the growth of a message with the group, as an exponent: links of their own (0)
#: or processors that all ranks share (1), each with this spread.
_GROWTHS: Final = (0.0, 1.0)
_GROWTH_SPREAD: Final = 0.15
#: Error of one group as a whole, in log: what the growth is read against.
_GROUP_ERROR: Final = 0.05

#: Uncertainty, in log, between measured sizes: it grows by the square root of the distance to the nearest,
#: in e-folds. Half of the sizes of five published logs, a factor of 4 apart, told the others to 4 %.
_UNCERTAINTY_BETWEEN_SIZES: Final = 0.08

_TWO_NODES: Final = 2

#: One measured group: ranks, nodes, and its points over the size of the whole array.
Group = tuple[int, int, Sequence[CurvePoint]]


def num_messages(collective: str, ranks: int) -> int:
    """Messages that follow one another.

    References
    ----------
    .. [1] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
       workstations", J. Parallel Distrib. Comput. 69(2):117-124, 2009.
    """
    if collective == "broadcast":
        return math.ceil(math.log2(ranks))
    if collective == "send_recv":
        return 1
    return (ranks - 1) * (2 if collective == "all_reduce" else 1)


def message_bytes(
    collective: str, size_bytes: float, ranks: int, nodes: int = 1, library: str = "gloo"
) -> float:
    """Size of one of them, in proportion to ``size_bytes``, that of the whole array. [B]

    A ring sends a part of ``1 / ranks`` over every link, those between nodes too. NCCL's all-reduce
    between two nodes is a pair of trees that cross once up and once down, each with a half of the
    array: half of what a ring, or trees of three nodes and more, send [1]_.

    References
    ----------
    .. [1] NCCL, src/graph/tuning.cc: up to two nodes a graph has the bandwidth that it has inside a
       node, beyond that the one between nodes.
    """
    if collective in {"broadcast", "send_recv"}:
        return size_bytes
    if collective == "all_to_all" and nodes > 1:
        # All pairs across: those inside a node need no link between nodes.
        return size_bytes * (nodes - 1) / nodes / (ranks - 1)
    if collective == "all_reduce" and nodes == _TWO_NODES and library == "nccl":
        return size_bytes / 2 / (ranks - 1)
    return size_bytes / ranks


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over size per time, as nccl-tests prints it.

    References
    ----------
    .. [1] nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    if collective in {"broadcast", "send_recv"}:
        return 1.0
    return num_messages(collective, ranks) / ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageCost:
    """One curve per measured group; other groups follow by a law of gloo, or by their growth alone.

    What was measured comes out as it was. The law tells where between two measured sizes a message
    becomes dearer, how groups between two measured ones lie, and how those beyond the largest grow.
    """

    collective: str
    library: str
    ranks: tuple[int, ...]
    """Ascending."""
    curves: tuple[CurveDraws, ...]
    """Over the size of a message."""
    uncertainty: Samples
    """Deviates of what lies between measured sizes, shape ``(num_draws,)``; draw 0 is 0."""
    growth: Samples
    """Exponent in the number of ranks, shape ``(num_draws,)``, never below 0: without a law."""
    law: MessageLaw | None
    """Of gloo, where several groups tell it."""
    _by_ranks: dict[int, "_Group"] = field(default_factory=dict)

    @classmethod
    def sample(
        cls,
        collective: str,
        groups: Iterable[Group],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "MessageCost":
        """Draw the messages of a collective from its groups, at least one.

        Raises
        ------
        UsageError
            If groups of as many ranks span different numbers of nodes.
        """
        ordered = sorted(_joined(collective, groups), key=lambda group: group[0])
        found = {group[0]: _messages(collective, group, library) for group in ordered}
        # Nodes do not share processors: what grows between them is what a fabric lacks.
        beliefs = _GROWTHS[:1] if library != "gloo" and ordered[0][1] > 1 else _GROWTHS
        growth = _growth(found, beliefs, rng.standard_normal(num_draws))
        uncertainty = rng.standard_normal(num_draws)
        uncertainty[0] = 0.0
        curves = tuple(
            CurveDraws.sample(points, num_draws=num_draws, rng=rng) for points in found.values()
        )
        law = None
        if library == "gloo" and len(found) > 1:
            works = {ranks: _work(collective, ranks) for ranks in found}
            law = MessageLaw.fit(found, works, rng.standard_normal((NUM_PARAMETERS, num_draws)))
        return cls(
            collective=collective,
            library=library,
            uncertainty=uncertainty,
            ranks=tuple(found),
            curves=curves,
            growth=growth,
            law=law,
        )

    @property
    def sizes_bytes(self) -> tuple[float, float]:
        """Smallest and largest message measured in any group. [B]"""
        return (
            min(float(curve.at[0]) for curve in self.curves),
            max(float(curve.at[-1]) for curve in self.curves),
        )

    def read(self, message_bytes: float, ranks: int) -> Samples:
        """Time of one message in a group, shape ``(num_draws,)``. [s]"""
        result: Samples = self.read_many(np.array([message_bytes]), ranks)[0]
        return result

    def read_many(self, message_bytes: Samples, ranks: int) -> Samples:
        """Times of messages of many sizes, shape ``(num_sizes,)``, one row each. [s]"""
        group = self._group(ranks)
        logs = np.log(group.sizes_bytes)
        inside = np.log(np.clip(message_bytes, group.sizes_bytes[0], group.sizes_bytes[-1]))
        distance = np.abs(inside[:, np.newaxis] - logs).min(axis=1)[:, np.newaxis]
        found_s = group.curve.read_many(self._abscissa(message_bytes, ranks))
        result: Samples = found_s * np.exp(
            _UNCERTAINTY_BETWEEN_SIZES * np.sqrt(distance) * self.uncertainty
        )
        return result

    def latency_s(self, ranks: int) -> Samples:
        """Time of the smallest message measured. [s]"""
        return self.read(self.sizes_bytes[0], ranks)

    def _group(self, ranks: int) -> "_Group":
        if ranks not in self._by_ranks:
            sizes, time_s, uncertainty = self._times(ranks)
            curve = CurveDraws(self._abscissa(sizes, ranks), time_s, uncertainty)
            self._by_ranks[ranks] = _Group(sizes_bytes=sizes, curve=curve)
        return self._by_ranks[ranks]

    def _times(self, ranks: int) -> tuple[Samples, Samples, Samples]:
        """Sizes, times of messages of these sizes, and deviates of the uncertainty beyond them."""
        right = next((i for i, n in enumerate(self.ranks) if n >= ranks), len(self.ranks) - 1)
        curve, nearest = self.curves[right], self.ranks[right]
        if ranks > nearest:
            return curve.at, curve.time_s * self._grown(curve.at, nearest, ranks), curve.uncertainty
        if ranks == nearest or right == 0:
            return curve.at, curve.time_s, curve.uncertainty
        left_n = self.ranks[right - 1]
        weight = math.log(ranks / left_n) / math.log(nearest / left_n)
        sizes = np.union1d(self.curves[right - 1].at, curve.at)
        left_s, right_s = (
            self._group(n).curve.read_many(self._abscissa(sizes, n)) for n in (left_n, nearest)
        )
        time_s = (left_s * self._grown(sizes, left_n, ranks)) ** (1 - weight) * (
            right_s * self._grown(sizes, nearest, ranks)
        ) ** weight
        return sizes, np.maximum.accumulate(time_s, axis=0), curve.uncertainty

    def _grown(self, sizes_bytes: Samples, measured: int, ranks: int) -> Samples:
        """Messages of a group over those of a measured one.

        Without a law groups between two measured ones lie on a straight line, in logarithms.
        """
        if self.law is None:
            beyond = ranks > self.ranks[-1]
            return np.exp(self.growth * math.log(ranks / measured)) if beyond else np.ones(1)
        sizes = sizes_bytes[:, np.newaxis]
        own_s, other_s = (
            self.law.message_s(sizes, _work(self.collective, n)) for n in (measured, ranks)
        )
        ratio: Samples = other_s / own_s
        return ratio

    def _abscissa(self, sizes_bytes: Samples, ranks: int) -> Samples:
        """What a curve is linear in: the size, or what the law says."""
        if self.law is None:
            return sizes_bytes
        law = self.law.nominal()
        return law.message_s(sizes_bytes[:, np.newaxis], _work(self.collective, ranks))[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Messages of a group of one size."""

    sizes_bytes: Samples
    curve: CurveDraws
    """Over the abscissa of the group."""


def _work(collective: str, ranks: int) -> Work:
    return work(collective, ranks, num_messages(collective, ranks))


def _joined(collective: str, groups: Iterable[Group]) -> list[Group]:
    """One group for each number of ranks: what was measured again counts as repeated points."""
    found: dict[int, Group] = {}
    for ranks, nodes, points in groups:
        _, spans, known = found.get(ranks, (ranks, nodes, ()))
        if spans != nodes:
            raise UsageError(
                f"{collective}: groups of {ranks} ranks must all span as many nodes, got "
                f"{min(spans, nodes)} and {max(spans, nodes)}; keep one of them, or read them one "
                "at a time"
            )
        found[ranks] = ranks, nodes, (*known, *points)
    return list(found.values())


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by pooling neighbours that do (isotonic regression).

    As ``scipy.optimize.isotonic_regression``, whose import takes longer than a whole prediction.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            fallen = pools.pop()
            pools[-1].extend(fallen)
    return [fmean(pool) for pool in pools for _ in pool]


def _messages(collective: str, group: Group, library: str) -> list[CurvePoint]:
    """A group's points as messages, ascending; repeated sizes are averaged, a larger one never faster."""
    ranks, nodes, points = group
    by_size: dict[float, list[CurvePoint]] = {}
    for point in points:
        by_size.setdefault(message_bytes(collective, point.at, ranks, nodes, library), []).append(
            point
        )
    count = num_messages(collective, ranks)
    merged = [_merged(size, by_size[size], count) for size in sorted(by_size)]
    if len(merged) == 1:
        only = merged[0]
        latency_s = min(only.time_s, _LATENCY_S.get(library, _LATENCY_S["nccl"]))
        return [replace(only, at=1.0, time_s=latency_s), only]
    logs = _rising([math.log(point.time_s) for point in merged])
    return [
        replace(point, time_s=math.exp(value)) for point, value in zip(merged, logs, strict=True)
    ]


def _merged(size_bytes: float, points: Sequence[CurvePoint], count: int) -> CurvePoint:
    """Geometric mean of repeated measurements, as one of ``count`` messages."""
    logs = [math.log(point.time_s) for point in points]
    errors = [point.relative_error for point in points]
    return CurvePoint(
        at=size_bytes,
        time_s=math.exp(sum(logs) / len(logs)) / count,
        relative_error=max(max(errors) / math.sqrt(len(errors)), float(np.std(logs))),
    )


def _growth(
    groups: Mapping[int, Sequence[CurvePoint]], beliefs: Sequence[float], deviates: Samples
) -> Samples:
    """Draws of the exponent by which messages grow with the group; the first is nominal.

    The likelier belief is taken and corrected by the slope over the groups, at the ends of the sizes
    that they share. A negative exponent (larger groups that were faster) ends with the largest group.
    With one group the uncertainty per doubling, which callers add, stands for that of the growth.
    """
    if len(groups) == 1:
        return np.full_like(deviates, beliefs[0])
    low = max(points[0].at for points in groups.values())
    high = max(low, min(points[-1].at for points in groups.values()))
    ends = np.log([low, high])
    logs = [
        np.interp(ends, np.log([p.at for p in g]), np.log([p.time_s for p in g])).mean()
        for g in groups.values()
    ]
    x = np.log(list(groups)) - np.log(list(groups)).mean()
    slope = float(x @ np.array(logs)) / float(x @ x)
    belief = min(beliefs, key=lambda value: abs(slope - value))
    data, prior = float(x @ x) / _GROUP_ERROR**2, 1 / _GROWTH_SPREAD**2
    centre = (slope * data + belief * prior) / (data + prior)
    shifts = deviates / math.sqrt(data + prior)
    shifts[0] = 0.0
    result: Samples = np.maximum(centre + shifts, 0.0)
    return result
