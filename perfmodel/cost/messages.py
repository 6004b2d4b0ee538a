"""Collectives of ranks that move the bytes themselves (gloo): the time of a message over its size and the group.

What was measured in any group tells about one message. Links of its own make a message cost the same in
every group; processors that all ranks share make it cost more with every rank. Which of the two holds
is read from the groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from perfmodel.cost import CurveDraws, Samples, deviates
from perfmodel.cost.collectives import (
    Transfer,
    Work,
    library_of,
    message_bytes,
    num_messages,
    work,
)
from perfmodel.cost.group_cost import GroupCost, Law, joined
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.statistics import soft_maximum

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
        self,
        size_bytes: float | Samples,
        ranks: int,
        *,
        nodes: int | None = None,
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
