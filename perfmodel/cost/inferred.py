"""Step times from latents that were inferred from runs: number, interval, parts, disturbed runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from perfmodel.cost.discrepancy import Discrepancy, layout_distance_squared
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Prior
from perfmodel.cost.layout_time import StepParts, hops_per_micro_batch, step_parts, step_time_s

LOWER, UPPER = 0.05, 0.95
_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Disturbance:
    """A state in which every hand-over of a pipeline between nodes stalls; some runs were in it."""

    stall_s: float
    runs: Jobs
    """The runs that could have shown it."""
    disturbed: Column
    """Probability of each of them to have been disturbed."""

    def probability(self, jobs: Jobs) -> Column:
        """Probability of a job to be disturbed: the share among similar runs, 0 without hand-overs."""
        near = np.exp(-layout_distance_squared(jobs, self.runs) / 2)
        base = float(self.disturbed.mean())
        share = (near @ self.disturbed + base) / (near.sum(axis=1) + 1)
        return np.where(may_stall(jobs), share, 0.0)

    def stalls_s(self, jobs: Jobs) -> Column:
        """Time that a disturbed step loses. [s]"""
        return stall_time_s(jobs, self.stall_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInterval:
    """Predicted step times, each shape ``(num_jobs,)``. [s]"""

    median_s: Column
    lower_s: Column
    """5 % of outcomes should be below."""
    upper_s: Column
    """5 % of outcomes should be above."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredModel:
    """Latents inferred from end-to-end step times, with their doubt."""

    priors: Mapping[str, Prior]
    draws: Mapping[str, Column]
    """Draws of every latent, shape ``(num_draws,)``; the first is the fit itself."""
    moved: Mapping[str, float]
    """How far the runs narrowed a prior: posterior over prior standard deviation, in (0, 1]."""
    discrepancy: Discrepancy
    disturbance: Disturbance | None
    widening: float
    """Factor on every interval so that 90 % of the left-out runs lay inside."""

    @property
    def nominal(self) -> dict[str, float]:
        """The fitted latents."""
        return {name: float(values[0]) for name, values in self.draws.items()}

    def parts(self, jobs: Jobs) -> StepParts:
        """Where the time goes at the fitted latents, without the unexplained deviation."""
        return step_parts(jobs, self.nominal)

    def predict(self, jobs: Jobs) -> StepInterval:
        """Step times with 90 % intervals."""
        calm = np.log(step_time_s(jobs, self.nominal))
        shift, variance = self.discrepancy.at(jobs)
        drawn = step_time_s(jobs, {name: values[:, None] for name, values in self.draws.items()})
        spread = np.sqrt(variance + np.log(drawn).var(axis=0)) * self.widening
        centre = calm + shift
        if self.disturbance is None:
            disturbed, chance = centre, np.zeros(len(jobs))
        else:
            late = np.exp(calm) + self.disturbance.stalls_s(jobs)
            disturbed, chance = np.log(late) + shift, self.disturbance.probability(jobs)
        return StepInterval(
            median_s=np.exp(_quantile(0.5, centre, disturbed, chance, spread)),
            lower_s=np.exp(_quantile(LOWER, centre, disturbed, chance, spread)),
            upper_s=np.exp(_quantile(UPPER, centre, disturbed, chance, spread)),
        )


def may_stall(jobs: Jobs) -> NDArray[np.bool_]:
    """Whether a job hands over between nodes."""
    return jobs.several_nodes & (jobs.pp > 1)


def stall_time_s(jobs: Jobs, stall_s: float) -> Column:
    """Time lost by stalls: one per hand-over of every micro-batch. [s]"""
    hops = jobs.accumulation * hops_per_micro_batch(jobs)
    return np.where(may_stall(jobs), stall_s * hops, 0.0)


def _quantile(
    share: float, calm: Column, disturbed: Column, chance: Column, spread: Column
) -> Column:
    """Quantile of a mixture of two normal distributions of equal width, by bisection."""
    low = np.minimum(calm, disturbed) - 8 * spread
    high = np.maximum(calm, disturbed) + 8 * spread
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = (1 - chance) * norm.cdf(middle, calm, spread)
        below += chance * norm.cdf(middle, disturbed, spread)
        low, high = np.where(below < share, middle, low), np.where(below < share, high, middle)
    return np.asarray((low + high) / 2)
