"""Collectives of any group, from the groups that were measured.

What was measured comes out as it was. A law, fitted to all groups, tells what lies between measured sizes and
groups, and how larger groups grow. ``GroupCost`` is what all laws share.

``MessageCost`` is of ranks that move the bytes themselves (gloo): the time of a message over its size and the group.
Links of its own make a message cost the same in every group; processors that all ranks share make it cost more with
every rank. Which of the two holds is read from the groups.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, Self

import numpy as np

from perfmodel.cost import CurveDraws, Samples, deviates
from perfmodel.cost.collectives import (
    LevelCost,
    Transfer,
    Work,
    library_of,
    message_bytes,
    num_messages,
    work,
)
from perfmodel.errors import UsageError
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.statistics import soft_maximum

#: Uncertainty, in log, between measured sizes: it grows by the square root of the distance to the nearest,
#: in e-folds. Half of the sizes of five published logs, a factor of 4 apart, told the others to 4 %.
_UNCERTAINTY_BETWEEN_SIZES: Final = 0.08
#: Relative step of a difference, the usual one.
_DIFFERENCE: Final = np.finfo(np.float64).eps ** 0.5
#: How far draws of a parameter may be from the fit, in log.
_FARTHEST: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """Constants of a law, with the uncertainty of their fit."""

    logs: Samples
    """Logarithms, shape ``(num_parameters, num_draws)``; draw 0 is the fit."""

    @classmethod
    def fitted(
        cls,
        residuals: Callable[[Samples], Samples],
        starts: Iterable[Samples],
        drawn: Samples,
        *,
        num_points: int = 0,
    ) -> Self:
        """Robust least squares from the best of several starts; draws by the curvature at the fit.

        ``residuals``: Of many sets of parameters at once, one column each.
        ``drawn``: Of a standard normal distribution, shape ``(num_parameters, num_draws)``.
        ``num_points``: Points that were measured: what the law misses makes its parameters more uncertain.
        """
        from scipy.optimize import least_squares  # noqa: PLC0415 - slow; few commands need it

        def one(p: Samples) -> Samples:
            return residuals(p[:, np.newaxis])[:, 0]

        def slopes(p: Samples) -> Samples:
            """Differences along every parameter, all in one pass."""
            moved = p + np.diag(_DIFFERENCE * np.where(p < 0, -1, 1) * np.maximum(1.0, np.abs(p)))
            found = residuals(np.column_stack([p, moved.T]))
            return (found[:, 1:] - found[:, :1]) / (np.diag(moved) - p)

        solution = min(
            (least_squares(one, start, slopes, loss="soft_l1") for start in starts),
            key=lambda found: float(found.cost),
        )
        jacobian = np.asarray(solution.jac, dtype=np.float64)
        spread = np.linalg.cholesky(np.linalg.inv(jacobian.T @ jacobian))
        if num_points:
            missed = float(np.mean(one(solution.x)[:num_points] ** 2))
            spread = spread * math.sqrt(max(1.0, missed))
        shifts = spread @ drawn
        shifts[:, 0] = 0.0
        return cls(logs=solution.x[:, np.newaxis] + np.clip(shifts, -_FARTHEST, _FARTHEST))

    def nominal(self) -> Self:
        """The fit alone."""
        return replace(self, logs=self.logs[:, :1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCost(ABC):
    """What a kind of collective costs in any group."""

    collective: str
    library: str
    ranks: tuple[int, ...]
    """Of the measured groups, ascending."""
    between_sizes: Samples
    """Deviates of what lies between measured sizes, shape ``(num_draws,)``; draw 0 is 0."""

    @property
    @abstractmethod
    def sizes_bytes(self) -> tuple[float, float]:
        """Smallest and largest message measured in any group. [B]"""

    @abstractmethod
    def group_s(
        self, size_bytes: float | Samples, ranks: int, *, nodes: int | None = None
    ) -> Samples:
        """Time of a collective, shape ``(num_draws,)``; of many sizes ``(num_sizes, 1)``, one row each. [s]

        ``nodes``: That the group spans, if known.
        """

    @abstractmethod
    def message(
        self, members: int, *, nodes: int | None
    ) -> tuple[Samples | float, Samples, Transfer]:
        """Start of a collective, latency of one of its messages, and transfer over the message's bytes. [s]"""

    def level(
        self, tier: str, members: int, *, crossings: int, inside_node: bool = False
    ) -> LevelCost:
        """A tier whose collectives were measured."""
        nodes = 1 if inside_node else None
        start_s, latency_s, transfer_s = self.message(members, nodes=nodes)
        return LevelCost(
            tier=tier,
            members=members,
            crossings=crossings,
            start_s=start_s,
            latency_s=latency_s,
            transfer_s=transfer_s,
            inside_node=inside_node,
        )

    def neighbours(self, ranks: int) -> tuple[int, float]:
        """Place of the nearest measured group, the larger of two; and its weight between the two.

        A weight of 1 stands for groups that were measured, or lie outside all that were.
        """
        right = next((i for i, n in enumerate(self.ranks) if n >= ranks), len(self.ranks) - 1)
        if right == 0 or ranks >= self.ranks[right]:
            return right, 1.0
        left, nearest = self.ranks[right - 1 : right + 1]
        return right, math.log(ranks / left) / math.log(nearest / left)

    def away_from_sizes(self, at_bytes: Samples, known_bytes: Samples) -> Samples:
        """Factors on times between measured sizes, shape ``(num_at, num_draws)``."""
        inside = np.log(np.clip(at_bytes, known_bytes[0], known_bytes[-1]))
        distance = np.abs(inside[:, np.newaxis] - np.log(known_bytes)).min(axis=1)[:, np.newaxis]
        return np.asarray(
            np.exp(_UNCERTAINTY_BETWEEN_SIZES * np.sqrt(distance) * self.between_sizes)
        )


def joined(groups: Iterable[MeasuredCollective]) -> list[MeasuredCollective]:
    """One group for each number of ranks, ascending: what was measured again counts as repeated points."""
    found: dict[int, MeasuredCollective] = {}
    for group in groups:
        known = found.get(group.world_size)
        if known is not None and known.num_nodes != group.num_nodes:
            raise UsageError(
                f"{group.collective}: groups of {group.world_size} ranks must all span as many nodes, got "
                f"{min(known.num_nodes, group.num_nodes)} and {max(known.num_nodes, group.num_nodes)}; keep "
                "one of them, or read them one at a time"
            )
        points = () if known is None else known.points
        found[group.world_size] = replace(group, points=(*points, *group.points))
    return [
        replace(group, points=tuple(_merged(group.points))) for _, group in sorted(found.items())
    ]


def _merged(points: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Points by size, ascending; repeated sizes are averaged, a larger one never faster."""
    by_size: dict[float, list[CurvePoint]] = {}
    for point in points:
        by_size.setdefault(point.at, []).append(point)
    found = []
    for size, same in sorted(by_size.items()):
        logs = [math.log(point.time_s) for point in same]
        error = max(point.relative_error for point in same) / math.sqrt(len(same))
        spread = max(error, float(np.std(logs)))
        found.append((size, fmean(logs), spread))
    rising = _rising([log for _, log, _ in found])
    return [
        CurvePoint(at=size, time_s=math.exp(log), relative_error=spread)
        for (size, _, spread), log in zip(found, rising, strict=True)
    ]


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


#: Beliefs, as medians, each within a factor of exp(3): a P2P latency and a byte of a link, handling a message
#: and a byte of it; and how much sharper than a sum the larger of the two wins. [s, s/B, s, s/B, 1]
_BELIEFS: Final = (40e-6, 1e-9, 1e-6, 1e-11, 7.0)
NUM_PARAMETERS: Final = len(_BELIEFS)
_SPREADS: Final = (3.0, 3.0, 3.0, 3.0, 1.0)
#: Error of a point, in log, against which parameters are read: points of a group err together.
_POINT_ERROR: Final = 0.05
#: Keeps the law rising in the size where it is flat to the last digit.
_TILT: Final = 1e-6


class MessageLaw(Law):
    """Message time of a library whose ranks move the bytes themselves.

    link = rounds * p2p + loads * s_per_byte * size
    host = handled * (handling + handling_per_byte * size)
    time = (link^k + host^k)^(1/k),  k = 1 + sharpness
    """

    @classmethod
    def fit(
        cls, groups: Mapping[int, Sequence[CurvePoint]], collective: str, drawn: Samples
    ) -> "MessageLaw":
        """Fit to messages of several groups, least squares on logarithms.

        ``drawn``: Of a standard normal distribution, shape ``(5, num_draws)``.
        """
        works = {ranks: work(collective, ranks) for ranks in groups}
        sizes = [np.array([point.at for point in points]) for points in groups.values()]
        logs = np.log([[point.time_s] for points in groups.values() for point in points])
        centre, spread = np.log(_BELIEFS), np.array(_SPREADS)[:, np.newaxis]

        def residuals(p: Samples) -> Samples:
            law = cls(logs=p)
            found = [
                law.message_s(of_one[:, np.newaxis], works[ranks])
                for ranks, of_one in zip(groups, sizes, strict=True)
            ]
            data: Samples = (np.log(np.concatenate(found)) - logs) / _POINT_ERROR
            return np.concatenate([data, (p - centre[:, np.newaxis]) / spread])

        # What is hidden at the start stays hidden: begin without shared processors, and with them. Then
        # the smallest group's messages show links, the largest's processors alone. Where both add up, links
        # have a shorter latency than that: begin there, too.
        ends = []
        for ranks, count in (
            (min(groups), works[min(groups)].loads),
            (max(groups), works[max(groups)].handled),
        ):
            low, high = groups[ranks][0], groups[ranks][-1]
            ends += [low.time_s / count, high.time_s / high.at / count]
        shared = np.log((*ends, _BELIEFS[-1]))
        starts = (centre, shared, np.where(np.arange(NUM_PARAMETERS) == 0, shared - 2.0, shared))
        return cls.fitted(residuals, starts, drawn, num_points=len(logs))

    def message_s(self, message_bytes: Samples, of: Work) -> Samples:
        """Time of one message, shape ``(num_sizes, num_draws)`` for sizes of shape ``(num_sizes, 1)``. [s]"""
        p2p_s, s_per_byte, handling_s, handling_s_per_byte, sharpness = np.exp(self.logs)
        link_s = of.rounds * p2p_s + of.loads * s_per_byte * message_bytes
        host_s = of.handled * (handling_s + handling_s_per_byte * message_bytes)
        return soft_maximum(link_s, host_s, 1.0 + sharpness) * (1 + _TILT * np.log1p(message_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageCost(GroupCost):
    """One curve per measured group; other groups follow by a law, or as messages over links of their own.

    The law tells where between two measured sizes a message takes longer, how groups between two measured
    ones lie, and how those beyond the largest grow.
    """

    curves: tuple[CurveDraws, ...]
    """Over the size of a message, one for each group."""
    law: MessageLaw | None
    """Where several groups tell it."""
    _by_ranks: dict[int, tuple[Samples, CurveDraws]] = field(default_factory=dict, init=False)
    """Sizes, and the curve over the abscissa of the group."""

    @classmethod
    def sample(
        cls,
        groups: Iterable[MeasuredCollective],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "MessageCost":
        """Draw the messages of a collective from its groups, at least one."""
        measured = joined(groups)
        collective = measured[0].collective
        found = {group.world_size: _messages(group, library) for group in measured}
        between_sizes = deviates(rng, num_draws)
        curves = tuple(
            CurveDraws.sample(points, num_draws=num_draws, rng=rng) for points in found.values()
        )
        law = None
        if len(found) > 1:
            law = MessageLaw.fit(found, collective, deviates(rng, NUM_PARAMETERS, num_draws))
        return cls(
            collective=collective,
            library=library,
            ranks=tuple(found),
            between_sizes=between_sizes,
            curves=curves,
            law=law,
        )

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
        return np.asarray(found_s * self.away_from_sizes(message_bytes, sizes))

    def message(
        self,
        members: int,
        *,
        nodes: int | None,  # noqa: ARG002 - messages are the same within a node and between
    ) -> tuple[float, Samples, Transfer]:
        """Latency is the time of the smallest message that was measured; what is more is transfer. [s]"""
        latency_s: Samples = self.read(np.array([self.sizes_bytes[0]]), members)[0]

        def transfer_s(size_bytes: float | Samples) -> Samples:
            rows: Samples = self.read(np.atleast_2d(size_bytes)[:, 0], members) - latency_s
            return rows if isinstance(size_bytes, np.ndarray) else rows[0]

        return 0.0, latency_s, transfer_s

    def group_s(
        self, size_bytes: float | Samples, ranks: int, *, nodes: int | None = None
    ) -> Samples:
        """T = messages * (latency + transfer(size of one)). [s]"""
        _, latency_s, transfer_s = self.message(ranks, nodes=nodes)
        spanned = min(nodes or 1, ranks)
        share = message_bytes(self.collective, 1.0, ranks, spanned, self.library)
        count = num_messages(self.collective, ranks)
        return np.asarray(count * (latency_s + transfer_s(size_bytes * share)))

    def _group(self, ranks: int) -> tuple[Samples, CurveDraws]:
        if ranks not in self._by_ranks:
            sizes, time_s, uncertainty = self._times(ranks)
            curve = CurveDraws(self._abscissa(sizes, ranks), time_s, uncertainty)
            self._by_ranks[ranks] = sizes, curve
        return self._by_ranks[ranks]

    def _times(self, ranks: int) -> tuple[Samples, Samples, Samples]:
        """Sizes, times of messages of these sizes, and deviates of the uncertainty beyond them."""
        right, weight = self.neighbours(ranks)
        curve, nearest = self.curves[right], self.ranks[right]
        if ranks > nearest:
            return curve.at, curve.time_s * self._grown(curve.at, nearest, ranks), curve.uncertainty
        if weight == 1.0:
            return curve.at, curve.time_s, curve.uncertainty
        sizes = np.union1d(self.curves[right - 1].at, curve.at)
        left_s, right_s = (
            self._group(n)[1].read_many(self._abscissa(sizes, n)) * self._grown(sizes, n, ranks)
            for n in self.ranks[right - 1 : right + 1]
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
        return np.asarray(other_s / own_s)

    def _abscissa(self, sizes_bytes: Samples, ranks: int) -> Samples:
        """What a curve is linear in: the size, or what the law says."""
        if self.law is None:
            return sizes_bytes
        of = work(self.collective, ranks)
        return self.law.nominal().message_s(sizes_bytes[:, np.newaxis], of)[:, 0]


def _messages(group: MeasuredCollective, library: str) -> list[CurvePoint]:
    """A group's points as messages, ascending."""
    kind, ranks = group.collective, group.world_size
    count = num_messages(kind, ranks)
    found = [
        replace(
            point,
            at=message_bytes(kind, point.at, ranks, group.num_nodes, library),
            time_s=point.time_s / count,
        )
        for point in group.points
    ]
    if len(found) > 1:
        return found
    (only,) = found
    latency_s = min(only.time_s, library_of(library).latency_s)
    return [replace(only, at=1.0, time_s=latency_s), only]
