"""Collectives of ranks that move the bytes themselves (gloo): the time of a message over its size and the group.

What was measured in any group tells about one message. Links of its own make a message cost the same in
every group; processors that all ranks share make it cost more with every rank. Which of the two holds
is read from the groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost import CurveDraws, Samples
from perfmodel.cost.collectives import (
    LevelCost,
    Work,
    library_of,
    message_bytes,
    num_messages,
    work,
)
from perfmodel.errors import UsageError
from perfmodel.machine.measured import CurvePoint
from perfmodel.statistics import soft_maximum

#: Beliefs, as medians, each within a factor of exp(3): a hop and a byte of a link, handling a message
#: and a byte of it; and how much sharper than a sum the larger of the two wins. [s, s/B, s, s/B, 1]
_BELIEFS: Final = (40e-6, 1e-9, 1e-6, 1e-11, 7.0)
NUM_PARAMETERS: Final = len(_BELIEFS)
_SPREADS: Final = (3.0, 3.0, 3.0, 3.0, 1.0)
#: Error of a point, in log, against which parameters are read: points of a group err together.
_POINT_ERROR: Final = 0.05
#: Keeps the law rising in the size where it is flat to the last digit.
_TILT: Final = 1e-6
#: Uncertainty, in log, between measured sizes: it grows by the square root of the distance to the nearest,
#: in e-folds. Half of the sizes of five published logs, a factor of 4 apart, told the others to 4 %.
UNCERTAINTY_BETWEEN_SIZES: Final = 0.08


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageLaw:
    """Message time of a library whose ranks move the bytes themselves.

    link = rounds * hop + loads * s_per_byte * size
    host = handled * (handling + handling_per_byte * size)
    time = (link^k + host^k)^(1/k),  k = 1 + sharpness
    """

    logs: Samples
    """Logarithms of the parameters, shape ``(5, num_draws)``; draw 0 is the fit."""

    @classmethod
    def fit(
        cls, groups: Mapping[int, Sequence[CurvePoint]], collective: str, deviates: Samples
    ) -> "MessageLaw":
        """Fit to messages of several groups, least squares on logarithms.

        ``deviates``: Of a standard normal distribution, shape ``(5, num_draws)``.
        """
        from scipy.optimize import least_squares  # noqa: PLC0415 - slow, and one group needs none

        works = {ranks: work(collective, ranks) for ranks in groups}
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

        # What is hidden at the start stays hidden: begin without shared processors, and with them. Then
        # the smallest group's messages show links, the largest's processors alone.
        ends = []
        for ranks, count in (
            (min(groups), works[min(groups)].loads),
            (max(groups), works[max(groups)].handled),
        ):
            low, high = groups[ranks][0], groups[ranks][-1]
            ends += [low.time_s / count, high.time_s / high.at / count]
        shared = np.log((*ends, _BELIEFS[-1]))
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


class Group(NamedTuple):
    """One measured group: ranks, nodes that it spans, and its points over the size of the whole array."""

    ranks: int
    nodes: int
    points: Sequence[CurvePoint]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageCost:
    """One curve per measured group; other groups follow by a law, or as messages over links of their own.

    What was measured comes out as it was. The law tells where between two measured sizes a message
    takes longer, how groups between two measured ones lie, and how those beyond the largest grow.
    """

    collective: str
    library: str
    ranks: tuple[int, ...]
    """Ascending."""
    curves: tuple[CurveDraws, ...]
    """Over the size of a message."""
    uncertainty: Samples
    """Deviates of what lies between measured sizes, shape ``(num_draws,)``; draw 0 is 0."""
    law: MessageLaw | None
    """Where several groups tell it."""
    _by_ranks: dict[int, tuple[Samples, CurveDraws]] = field(default_factory=dict)
    """Sizes, and the curve over the abscissa of the group."""

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
        """Draw the messages of a collective from its groups, at least one."""
        ordered = sorted(joined(collective, groups), key=lambda group: group.ranks)
        found = {group.ranks: _messages(collective, group, library) for group in ordered}
        uncertainty = rng.standard_normal(num_draws)
        uncertainty[0] = 0.0
        curves = tuple(
            CurveDraws.sample(points, num_draws=num_draws, rng=rng) for points in found.values()
        )
        law = None
        if len(found) > 1:
            deviates = rng.standard_normal((NUM_PARAMETERS, num_draws))
            law = MessageLaw.fit(found, collective, deviates)
        return cls(
            collective=collective,
            library=library,
            uncertainty=uncertainty,
            ranks=tuple(found),
            curves=curves,
            law=law,
        )

    def of_kind(self, collective: str) -> "MessageCost":
        """Another collective of the same messages."""
        return replace(self, collective=collective, _by_ranks={})

    @property
    def sizes_bytes(self) -> tuple[float, float]:
        """Smallest and largest message measured in any group. [B]"""
        return (
            min(float(curve.at[0]) for curve in self.curves),
            max(float(curve.at[-1]) for curve in self.curves),
        )

    def read(self, message_bytes: Samples, ranks: int) -> Samples:
        """Times of messages of many sizes in a group, shape ``(num_sizes,)``, one row each. [s]"""
        sizes, curve = self._group(ranks)
        found_s = curve.read_many(self._abscissa(message_bytes, ranks))
        result: Samples = found_s * between_sizes(message_bytes, sizes, self.uncertainty)
        return result

    def level(
        self,
        tier: str,
        members: int,
        *,
        crossings: int | None = None,
        rate: Samples | float = 1.0,
        inside_node: bool = False,
    ) -> LevelCost:
        """A tier whose messages were measured; ``rate`` is the part of its bandwidth that is left."""
        latency_s: Samples = self.read(np.array([self.sizes_bytes[0]]), members)[0]

        def transfer_s(size_bytes: float | Samples) -> Samples:
            # Below the smallest message measured this is negative, so that small ones cost less than
            # it: no transfer, which another rate would change.
            extra_s = self.read(np.atleast_2d(size_bytes)[:, 0], members) - latency_s
            rows: Samples = np.where(extra_s > 0, extra_s / rate, extra_s)
            return rows if isinstance(size_bytes, np.ndarray) else rows[0]

        return LevelCost(
            tier=tier,
            members=members,
            crossings=members - 1 if crossings is None else crossings,
            latency_s=latency_s,
            transfer_s=transfer_s,
            inside_node=inside_node,
        )

    def group_s(
        self,
        size_bytes: float | Samples,
        ranks: int,
        *,
        nodes: int | None = None,
        rate: Samples | float = 1.0,
    ) -> Samples:
        """Time of a collective of one tier, shape ``(num_draws,)``; of many at once, one row for each. [s]

        ``size_bytes``: One size, or many of shape ``(num_sizes, 1)``.
        ``nodes``: That the group spans, if known.
        ``rate``: What-if: bandwidth over what it is.
        """
        level = self.level("links", ranks, rate=rate)
        spanned = min(nodes or 1, ranks)
        share = message_bytes(self.collective, 1.0, ranks, spanned, self.library)
        count = num_messages(self.collective, ranks)
        result: Samples = count * (level.latency_s + level.transfer_s(size_bytes * share))
        return result

    def _group(self, ranks: int) -> tuple[Samples, CurveDraws]:
        if ranks not in self._by_ranks:
            sizes, time_s, uncertainty = self._times(ranks)
            curve = CurveDraws(self._abscissa(sizes, ranks), time_s, uncertainty)
            self._by_ranks[ranks] = sizes, curve
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
            self._group(n)[1].read_many(self._abscissa(sizes, n)) * self._grown(sizes, n, ranks)
            for n in (left_n, nearest)
        )
        time_s = left_s ** (1 - weight) * right_s**weight
        return sizes, np.maximum.accumulate(time_s, axis=0), curve.uncertainty

    def _grown(self, sizes_bytes: Samples, measured: int, ranks: int) -> Samples:
        """Messages of a group over those of a measured one.

        Without a law links are taken for their own.
        """
        if self.law is None:
            return np.ones(1)
        sizes = sizes_bytes[:, np.newaxis]
        own_s, other_s = (
            self.law.message_s(sizes, work(self.collective, n)) for n in (measured, ranks)
        )
        ratio: Samples = other_s / own_s
        return ratio

    def _abscissa(self, sizes_bytes: Samples, ranks: int) -> Samples:
        """What a curve is linear in: the size, or what the law says."""
        if self.law is None:
            return sizes_bytes
        of = work(self.collective, ranks)
        return self.law.nominal().message_s(sizes_bytes[:, np.newaxis], of)[:, 0]


def between_sizes(at_bytes: Samples, known_bytes: Samples, deviates: Samples) -> Samples:
    """Factors on times between measured sizes, shape ``(num_at, num_draws)``."""
    inside = np.log(np.clip(at_bytes, known_bytes[0], known_bytes[-1]))
    distance = np.abs(inside[:, np.newaxis] - np.log(known_bytes)).min(axis=1)[:, np.newaxis]
    result: Samples = np.exp(UNCERTAINTY_BETWEEN_SIZES * np.sqrt(distance) * deviates)
    return result


def joined(collective: str, groups: Iterable[Group]) -> list[Group]:
    """One group for each number of ranks: what was measured again counts as repeated points."""
    found: dict[int, Group] = {}
    for ranks, nodes, points in groups:
        known = found.get(ranks, Group(ranks, nodes, ()))
        if known.nodes != nodes:
            raise UsageError(
                f"{collective}: groups of {ranks} ranks must all span as many nodes, got "
                f"{min(known.nodes, nodes)} and {max(known.nodes, nodes)}; keep one of them, or read "
                "them one at a time"
            )
        found[ranks] = Group(ranks, nodes, (*known.points, *points))
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


def merged(points: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Points by size, ascending; repeated sizes are averaged, a larger one never faster."""
    by_size: dict[float, list[CurvePoint]] = {}
    for point in points:
        by_size.setdefault(point.at, []).append(point)
    found = []
    for size, same in sorted(by_size.items()):
        logs = [math.log(point.time_s) for point in same]
        error = max(point.relative_error for point in same) / math.sqrt(len(same))
        found.append(
            CurvePoint(
                at=size,
                time_s=math.exp(fmean(logs)),
                relative_error=max(error, float(np.std(logs))),
            )
        )
    rising = _rising([math.log(point.time_s) for point in found])
    return [
        replace(point, time_s=math.exp(value)) for point, value in zip(found, rising, strict=True)
    ]


def _messages(collective: str, group: Group, library: str) -> list[CurvePoint]:
    """A group's points as messages, ascending."""
    count = num_messages(collective, group.ranks)
    found = [
        replace(
            point,
            at=message_bytes(collective, point.at, group.ranks, group.nodes, library),
            time_s=point.time_s / count,
        )
        for point in merged(group.points)
    ]
    if len(found) > 1:
        return found
    (only,) = found
    latency_s = min(only.time_s, library_of(library).latency_s)
    return [replace(only, at=1.0, time_s=latency_s), only]
