"""Collectives of any group, from the groups that were measured: what all laws of collectives share.

What was measured comes out as it was. A law, fitted to all groups, tells what lies between measured sizes and
groups, and how larger groups grow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Self

import numpy as np

from perfmodel.cost import Samples
from perfmodel.cost.collectives import LevelCost, Transfer
from perfmodel.errors import UsageError
from perfmodel.machine.measured import CurvePoint, MeasuredCollective

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
        self,
        size_bytes: float | Samples,
        ranks: int,
        *,
        nodes: int | None = None,
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
        self,
        tier: str,
        members: int,
        *,
        crossings: int,
        inside_node: bool = False,
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

    def of_kind(self, collective: str) -> Self:
        """Another collective of the same links."""
        return replace(self, collective=collective)

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
