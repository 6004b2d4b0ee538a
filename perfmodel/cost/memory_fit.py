"""Peak memory per rank, inferred from the peaks that runs printed.

Penalised least squares in log memory over one factor per part, with a heavy-tailed loss; what remains is a
Gaussian process over layouts, as for step times.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from perfmodel.cost.discrepancy import Discrepancy, condition
from perfmodel.cost.inferred_memory import InferredMemory, factored_bytes, rank_parts
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.latents import Prior
from perfmodel.cost.layout_fit import (
    MINIMUM_RUNS,
    fit_spreads,
    heavy_tailed,
    trust_in,
    widening_of,
)
from perfmodel.errors import NotFeasible
from perfmodel.units import GIB

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
    deviation = np.log(peak_bytes / factored_bytes(jobs, factors))
    trust = trust_in(deviation, _LOG_SIGMA)
    spreads = fit_spreads(jobs, deviation, trust)
    discrepancy = condition(jobs, deviation, trust, spreads)
    return InferredMemory(
        factors=factors,
        discrepancy=discrepancy,
        widening=_widening(discrepancy, trust),
    )


def _widening(discrepancy: Discrepancy, trust: Column) -> float:
    """Factor that makes 90 % intervals hold 90 % of runs that were left out.

    Leaving one run out of a Gaussian process has a closed form (Rasmussen and Williams 2006, eq. 5.12).
    """
    precision = np.diag(discrepancy.inverse)
    noise = discrepancy.spreads.noise**2
    variance = np.maximum(1 / precision - noise / trust + noise, noise)
    return widening_of(np.abs(discrepancy.weights / precision) / np.sqrt(variance), least=0.5)
