"""Peak memory per rank, inferred from the peaks that runs printed.

Penalised least squares in log memory over one factor per part, with a heavy-tailed loss; what remains is a
Gaussian process over layouts, as for step times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm

from perfmodel.cost.discrepancy import Discrepancy, condition
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Prior
from perfmodel.cost.layout_fit import MINIMUM_RUNS, fit_spreads, heavy_tailed, trust_in
from perfmodel.cost.layout_memory import in_flight, rank_memory
from perfmodel.errors import NotFeasible
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import GIB
from perfmodel.workload.transformer import HALF_BYTES

_LOG_SIGMA: Final = 0.05
"""Scatter of printed peaks around the formula, log."""

#: Factor on every part, and the bytes of the framework itself.
MEMORY_PRIORS: Final[Mapping[str, Prior]] = MappingProxyType(
    {
        "parameters": Prior(median=1.0, log_sigma=0.3, meaning="16-bit parameters"),
        "gradients": Prior(median=1.0, log_sigma=0.3, meaning="32-bit gradients"),
        "optimizer": Prior(median=1.0, log_sigma=0.3, meaning="optimizer states"),
        "activations": Prior(median=1.0, log_sigma=0.5, meaning="what layers keep for backward"),
        "logits": Prior(median=1.0, log_sigma=0.5, meaning="output head and loss"),
        "undivided": Prior(
            median=2.0, log_sigma=1.0, meaning="whole tensors per micro-batch in flight"
        ),
        "head": Prior(median=10.0, log_sigma=1.0, meaning="whole tensors around the output head"),
        "context": Prior(median=0.5 * GIB, log_sigma=1.0, meaning="framework and libraries [B]"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredMemory:
    """Factors on the parts, and what they leave unexplained."""

    factors: dict[str, float]
    discrepancy: Discrepancy
    widening: float
    """Factor on the doubt so that 90 % of the left-out runs lay inside."""

    def predict(self, jobs: Jobs) -> tuple[Column, Column]:
        """Most probable peaks [B], and the half-width of the 90 % interval of their logarithm."""
        shift, variance = self.discrepancy.at(jobs)
        return _peak_bytes(jobs, self.factors) * np.exp(
            shift
        ), DEVIATE_90 * self.widening * np.sqrt(variance)

    def fullest_bytes(self, jobs: Jobs) -> Column:
        """Most probable peak of the fullest rank: the first stage's, or the last's with the logits. [B]

        Logs print the first stage, so that the last one carries the same deviation.
        """
        shift, _ = self.discrepancy.at(jobs)
        last = _peak_bytes(jobs, self.factors, stage=jobs.pp - 1)
        return np.asarray(np.maximum(_peak_bytes(jobs, self.factors), last) * np.exp(shift))

    def fit_probability(self, jobs: Jobs, capacity_bytes: float) -> NDArray[np.float64]:
        """Probability that the fullest rank stays below a capacity."""
        _, half = self.predict(jobs)
        return np.asarray(
            norm.cdf(np.log(capacity_bytes / self.fullest_bytes(jobs)) * DEVIATE_90 / half)
        )


def infer_memory(jobs: Jobs, peak_bytes: Column) -> InferredMemory:
    """The factors behind printed peaks.

    Parameters
    ----------
    jobs
        What was run.
    peak_bytes
        Printed peak of rank 0, shape ``(num_jobs,)``. [B]

    Raises
    ------
    NotFeasible
        If there are too few runs, or a peak is not positive.
    """
    if len(jobs) < MINIMUM_RUNS or not (np.isfinite(peak_bytes) & (peak_bytes > 0)).all():
        raise NotFeasible(
            f"memory: at least {MINIMUM_RUNS} runs with a peak > 0 are needed, got {len(jobs)}"
        )
    centre = np.log([prior.median for prior in MEMORY_PRIORS.values()])
    width = np.array([prior.log_sigma for prior in MEMORY_PRIORS.values()])
    parts = np.stack([rank_parts(jobs)[name] for name in MEMORY_PRIORS])

    def residuals(z: Column) -> Column:
        peak = np.exp(centre + z * width) @ parts
        return np.concatenate([heavy_tailed(np.log(peak / peak_bytes) / _LOG_SIGMA), z])

    found = np.exp(centre + least_squares(residuals, np.zeros(len(centre))).x * width)
    factors = dict(zip(MEMORY_PRIORS, map(float, found), strict=True))
    deviation = np.log(peak_bytes / _peak_bytes(jobs, factors))
    trust = trust_in(deviation, _LOG_SIGMA)
    spreads = fit_spreads(jobs, deviation, trust)
    discrepancy = condition(jobs, deviation, trust, spreads)
    return InferredMemory(
        factors=factors,
        discrepancy=discrepancy,
        widening=_widening(discrepancy, trust),
    )


def rank_parts(jobs: Jobs, stage: Column | int = 0) -> dict[str, Column]:
    """Parts of a rank of a stage, by the names of ``MEMORY_PRIORS``; the context is 1 B. [B]

    Logs print rank 0 in the first stage, which keeps most micro-batches in flight.
    """
    rank = rank_memory(jobs, stage)
    whole = HALF_BYTES * jobs.tokens * jobs.hidden
    alone = jobs.pp == 1
    return {
        "parameters": rank.parameters_bytes,
        "gradients": rank.gradients_bytes,
        "optimizer": rank.optimizer_bytes,
        "activations": rank.activations_bytes,
        "logits": rank.logits_bytes,
        "undivided": np.where(alone, 0.0, in_flight(jobs, stage) * whole),
        "head": np.where(alone, whole, 0.0),
        "context": np.ones(len(jobs)),
    }


def _widening(discrepancy: Discrepancy, trust: Column) -> float:
    """90 % quantile of left-out errors over that of a normal distribution, in predicted spreads.

    Leaving one run out of a Gaussian process has a closed form (Rasmussen and Williams 2006, eq. 5.12).
    """
    precision = np.diag(discrepancy.inverse)
    noise = discrepancy.spreads.noise**2
    variance = np.maximum(1 / precision - noise / trust + noise, noise)
    scores = np.abs(discrepancy.weights / precision) / np.sqrt(variance)
    rank = min(1.0, 0.9 * (1 + 1 / len(trust)))
    return float(np.clip(np.quantile(scores, rank) / DEVIATE_90, 0.5, 5.0))


def _peak_bytes(jobs: Jobs, factors: dict[str, float], stage: Column | int = 0) -> Column:
    parts = rank_parts(jobs, stage)
    return np.asarray(sum(factors[name] * parts[name] for name in factors), dtype=float)
