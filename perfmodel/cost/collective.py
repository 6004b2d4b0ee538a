"""How long a collective takes, for any size and group, with draws that carry its doubt."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from perfmodel.cost.collective_fit import FittedLaw, Measured, fit_law
from perfmodel.cost.collective_law import PARAMETERS, Law, Points
from perfmodel.cost.collective_priors import beliefs
from perfmodel.cost.collective_steps import Algorithm, choices
from perfmodel.cost.curve import Samples
from perfmodel.documents.collectives import MeasuredCollective
from perfmodel.documents.prediction import Evidence
from perfmodel.units import Bytes

#: Doubt per doubling of the group beyond the largest one measured, inside one tier and over several
#: nodes, and per e-fold of size outside the measured ones: priors, on top of what the fit itself
#: does not know.
_DOUBT_PER_DOUBLING: Final = 0.05
_DOUBT_PER_DOUBLING_OF_NODES: Final = 0.15
_DOUBT_PER_EFOLD: Final = 0.05

#: Sizes at which draws are evaluated; between them they are read linearly, as a sum of latency and
#: transfer is, and made monotone: a larger message is never faster.
_GRID_BYTES: Final = np.concatenate([[1.0], 2.0 ** np.arange(5, 36.01, 0.25)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Regimes:
    """Where latency ends to decide, and where bandwidth begins to, in one group."""

    latency_until_bytes: float
    """Below it transfer is less than a tenth of the latency."""
    bandwidth_from_bytes: float
    """Above it latency is less than a tenth of the transfer."""
    algorithm_of: dict[Algorithm, tuple[float, float]]
    """Sizes, smallest and largest, at which each algorithm is the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCost:
    """A fitted collective and random versions of it that agree with its errors."""

    fitted: FittedLaw
    parameters: Samples
    """Shape ``(num_parameters, num_draws)``; draw 0 holds the most probable ones."""
    weights: Samples
    """Shape ``(num_points, num_draws)``: the remainder's share of every measured point."""
    deviates: Samples
    """Shape ``(2, num_draws)``: of the remainder and of the doubt outside; draw 0 is 0."""
    _tables: dict[tuple[int, int], Samples] = field(default_factory=dict)

    @classmethod
    def sample(
        cls,
        groups: Iterable[MeasuredCollective],
        *,
        library: str,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "CollectiveCost":
        """Fit the groups of one collective and draw from what the fit does not know.

        Raises
        ------
        ValueError
            If there is no group, or they are of different collectives.
        """
        fitted = fit_groups(tuple(groups), library=library)
        deviates = rng.standard_normal((len(PARAMETERS) + 2, num_draws))
        deviates[:, 0] = 0.0
        root = np.linalg.cholesky(fitted.covariance)
        parameters = fitted.parameters[:, None] + root @ deviates[: len(PARAMETERS)]
        logs = np.log(fitted.measured.time_s)[:, None]
        law_logs = fitted.law.log_time(parameters[:, :, None], fitted.measured.at).T
        factor = fitted.factor
        white = solve_triangular(factor, logs - law_logs, lower=True)
        return cls(
            fitted=fitted,
            parameters=parameters,
            weights=solve_triangular(factor.T, white, lower=False),
            deviates=deviates[len(PARAMETERS) :],
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
            return np.zeros(self.parameters.shape[1])
        table_s = self._table(world_size, num_nodes)
        right = int(np.clip(np.searchsorted(_GRID_BYTES, size_bytes), 1, len(_GRID_BYTES) - 1))
        low, high = _GRID_BYTES[right - 1], _GRID_BYTES[right]
        weight = max(0.0, (size_bytes - low) / (high - low))
        result: Samples = table_s[right - 1] + weight * (table_s[right] - table_s[right - 1])
        return result

    def evidence(self, world_size: int) -> Evidence:
        """How well the data support a group size."""
        if world_size <= self.largest_world_size:
            return Evidence.INTERPOLATED
        return Evidence.EXTRAPOLATED

    @property
    def largest_world_size(self) -> int:
        """Most ranks that took part in a measured collective."""
        return int(self.fitted.measured.at.ranks.max())

    def regimes(self, world_size: int, *, num_nodes: int = 1) -> Regimes:
        """Breakpoints of the most probable law in one group."""
        law, parameters = self.fitted.law, self.fitted.parameters
        sizes = 2.0 ** np.arange(0, 40, 0.125)
        at = Points.of(sizes, ranks=world_size, nodes=num_nodes)
        taken = law.fastest(parameters, at)
        sides = [law.sides(parameters, algorithm, at) for algorithm in law.algorithms]
        ratio = np.choose(taken, [transfer - latency for latency, transfer in sides])
        small, large = sizes[ratio < -math.log(10)], sizes[ratio < math.log(10)]
        return Regimes(
            latency_until_bytes=float(small[-1]) if len(small) else 0.0,
            bandwidth_from_bytes=float(large[-1]) if len(large) else 0.0,
            algorithm_of={
                algorithm: (float(sizes[taken == index].min()), float(sizes[taken == index].max()))
                for index, algorithm in enumerate(law.algorithms)
                if (taken == index).any()
            },
        )

    def _table(self, world_size: int, num_nodes: int) -> Samples:
        """Times on the grid, shape ``(len(grid), num_draws)``. [s]"""
        key = (world_size, num_nodes)
        if key not in self._tables:
            at = Points.of(_GRID_BYTES, ranks=world_size, nodes=num_nodes)
            logs = self.fitted.law.log_time(self.parameters[:, :, None], at).T
            seen = self.fitted.measured.at
            shared = self.fitted.remainder.covariance(at, seen)
            logs = logs + shared @ self.weights + self._spread(shared)[:, None] * self.deviates[0]
            logs += self._outside(at)[:, None] * self.deviates[1]
            # Midway between the two monotone envelopes: no single outlier lifts all sizes above it.
            above = np.maximum.accumulate(logs, axis=0)
            below = np.minimum.accumulate(logs[::-1], axis=0)[::-1]
            self._tables[key] = np.exp((above + below) / 2)
        return self._tables[key]

    def _spread(self, shared: NDArray[np.float64]) -> Samples:
        """Standard deviation of the remainder where it was not measured."""
        remainder = self.fitted.remainder
        explained = solve_triangular(self.fitted.factor, shared.T, lower=True)
        variance = remainder.persistent**2 + remainder.fading**2 - (explained**2).sum(axis=0)
        result: Samples = np.sqrt(np.maximum(variance, 0.0))
        return result

    def _outside(self, at: Points) -> Samples:
        seen = self.fitted.measured.at
        beyond = np.log2(np.maximum(at.ranks / seen.ranks.max(), 1.0))
        edge = np.clip(at.size_bytes, seen.size_bytes.min(), seen.size_bytes.max())
        apart = np.abs(np.log(at.size_bytes / edge))
        # Below the smallest message latency alone counts: there is nothing more to doubt.
        apart = np.where(at.size_bytes < edge, 0.0, apart)
        per_doubling = np.where(at.nodes > 1, _DOUBT_PER_DOUBLING_OF_NODES, _DOUBT_PER_DOUBLING)
        result: Samples = np.hypot(per_doubling * beyond, _DOUBT_PER_EFOLD * apart)
        return result


def fit_groups(groups: tuple[MeasuredCollective, ...], *, library: str) -> FittedLaw:
    """Most probable law of one collective, from all groups that were measured."""
    names = {group.collective for group in groups}
    if len(names) != 1:
        raise ValueError(f"groups must be of one collective, got {sorted(names)}")
    rows = np.array(
        [
            (p.at, group.world_size, group.num_nodes, p.time_s, p.relative_error)
            for group in groups
            for p in group.points
        ]
    )
    name = names.pop()
    law = Law(
        collective=name,
        algorithms=choices(library, name),
        largest_ranks=float(rows[:, 1].max()),
        largest_nodes=float(rows[:, 2].max()),
    )
    measured = Measured(
        at=Points.of(rows[:, 0], ranks=rows[:, 1], nodes=rows[:, 2]),
        time_s=rows[:, 3],
        relative_error=rows[:, 4],
    )
    return fit_law(law, measured, beliefs(library, tiered=law.largest_nodes > 1))
