"""What the physics leaves unexplained: a Gaussian process over layouts, in log step time.

Two reasons why the same formula misses by different amounts: the shape of the work on one device
(tile sizes of matrix products, regimes of collectives: every shape has its own deviation), and the
layout (neighbours in the grid of layouts deviate alike). Far from every run the deviation is unknown
with the spread that the runs showed (Kennedy and O'Hagan 2001).
"""

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from perfmodel.arrays import FloatArray
from perfmodel.cost.jobs import Column, Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """Standard deviations in log step time, fraction."""

    shape: float
    layout: float
    noise: float
    length: float
    """Distance at which layouts stop deviating alike, in doublings."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Discrepancy:
    """Deviations known at the runs, and how they carry over to other jobs."""

    runs: Jobs
    deviations: Column
    """Of the runs, in log step time."""
    trust: Column
    """How far each run is believed, in (0, 1]."""
    spreads: Spreads
    weights: Column
    """Inverse covariance times deviation, shape ``(num_runs,)``."""
    inverse: FloatArray
    """Inverse covariance of the runs, shape ``(num_runs, num_runs)``."""

    def at(self, jobs: Jobs) -> tuple[Column, Column]:
        """Expected deviation and its variance, noise of a run included, both in log step time."""
        cross = covariance(jobs, self.runs, self.spreads)
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        own = self.spreads.shape**2 + self.spreads.layout**2 + self.spreads.noise**2
        return cross @ self.weights, np.maximum(own - explained, self.spreads.noise**2)

    def unknown_share(self, jobs: Jobs) -> Column:
        """How little the runs say of jobs: 0 at the layout of a run, 1 where all are far."""
        nearest = layout_distance_squared(jobs, self.runs).min(axis=1)
        return np.asarray(1 - np.exp(-nearest / (2 * self.spreads.length**2)))

    def difference_variance(self, jobs: Jobs, reference: int) -> Column:
        """Variance of every job's deviation minus that of one of them, noise of a run left out."""
        cross = covariance(jobs, self.runs, self.spreads)
        own = self.spreads.shape**2 + self.spreads.layout**2
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        alone = np.maximum(own - explained, 0.0)
        one = jobs.take(np.array([reference]))
        both = covariance(jobs, one, self.spreads)[:, 0]
        both = both - cross @ (self.inverse @ cross[reference])
        return np.asarray(np.maximum(alone + alone[reference] - 2 * both, 0.0))


def layout_distance_squared(first: Jobs, second: Jobs) -> FloatArray:
    """Squared distance of layouts and models, in doublings; sharding levels are one doubling apart."""
    total = np.zeros((len(first), len(second)))
    for one, other in zip(_coordinates(first), _coordinates(second), strict=True):
        total += np.subtract.outer(one, other) ** 2
    return total


def _coordinates(jobs: Jobs) -> tuple[Column, ...]:
    return (
        np.log2(jobs.tp),
        np.log2(jobs.pp),
        np.log2(jobs.dp),
        np.log2(jobs.micro_batch),
        np.log2(jobs.sequence),
        2 * np.log2(jobs.hidden),
        np.log2(jobs.layers),
        jobs.zero,
        jobs.recompute_full,
    )


def same_shape(first: Jobs, second: Jobs) -> FloatArray:
    """1 where the work of one device on one layer and micro-batch is the same, else 0."""
    same = np.ones((len(first), len(second)), dtype=bool)
    for name in ("tp", "micro_batch", "sequence", "hidden", "feed_forward"):
        same &= np.equal.outer(getattr(first, name), getattr(second, name))
    return same.astype(np.float64)


def covariance(first: Jobs, second: Jobs, spreads: Spreads) -> FloatArray:
    """Covariance of deviations, noise left out."""
    near = np.exp(-layout_distance_squared(first, second) / (2 * spreads.length**2))
    return spreads.shape**2 * same_shape(first, second) + spreads.layout**2 * near


def condition(runs: Jobs, deviations: Column, trust: Column, spreads: Spreads) -> Discrepancy:
    """The deviations of runs, each with a trust in (0, 1] that divides its noise variance."""
    own = covariance(runs, runs, spreads) + np.diag(spreads.noise**2 / trust)
    inverse = linalg.inv(own)
    return Discrepancy(
        runs=runs,
        deviations=deviations,
        trust=trust,
        spreads=spreads,
        weights=inverse @ deviations,
        inverse=inverse,
    )
