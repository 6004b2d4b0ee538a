"""Use case: runs of some batch sizes to a target -> what other batch sizes would take.

``samples(B) = samples_min (1 + (B / B_critical) ** q)`` and ``steps(B) = samples(B) / B``. With
``q = 1`` this is the law of McCandlish et al. [1]_, ``steps = steps_min (1 + B_noise / B)``, with
``B_critical = B_noise``. Real training passes through many noise scales, which blurs the knee
(``q < 1``), and learning rates meet limits, which sharpens it (``q > 1``): ``q`` is a nuisance with
a prior around 1.

References
----------
.. [1] S. McCandlish, J. Kaplan, D. Amodei, "An Empirical Model of Large-Batch Training", arXiv 1812.06162.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.documents import asked_by
from perfmodel.documents.budget import BatchDocument, BatchOutlook
from perfmodel.errors import WrongArgument
from perfmodel.statistics import FloatArray, Interval

#: Equally likely widths of the knee.
EXPONENTS: Final = (0.6, 0.8, 1.0, 1.3)
#: Of ln(critical batch / largest batch seen), whose mean is 0: people go about as far as batches pay.
LOG_CRITICAL_SPREAD: Final = 1.0
#: How far, in log, separately tuned runs of one task scatter around any law of the batch: learning
#: rates, schedules and evaluation intervals differ between them.
TUNING_SPREAD: Final = 0.06

_LOG_CRITICAL_GRID: Final = np.linspace(-5.0, 6.0, 111)
#: A normal deviate in slices so thin that quantiles of the sum are within 3 % of it.
_DEVIATES: Final = np.linspace(-3.5, 3.5, 71)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """What one batch size needed to reach the target."""

    batch: float
    """Samples per optimizer step, of all devices together."""
    samples: float
    """Samples until the target; epochs or tokens serve as well, in the same unit for all points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """Samples to the target over the batch, as a posterior on a grid; shape ``(num_laws,)`` each."""

    log_samples_min: FloatArray
    """Natural logarithm of the samples that tiny batches need."""
    log_critical: FloatArray
    """Natural logarithm of the batch that needs twice as many."""
    exponents: FloatArray
    weights: FloatArray
    """Sum to 1."""
    log_level_error: float
    """How far, in log, the points leave the height of any one law open."""

    @property
    def critical_batch(self) -> Interval:
        """Batch that needs twice the samples of a tiny one, and the uncertainty of it."""
        return _quantiles(self.log_critical, self.weights)

    def samples(self, batch: float) -> Interval:
        """Samples until the target in one more tuned run, in the unit of the points."""
        logs = self.log_samples_min + self._log_growth(batch)
        spread = math.hypot(TUNING_SPREAD, self.log_level_error)
        density = np.exp(-0.5 * _DEVIATES**2)
        return _quantiles(
            (logs[:, None] + spread * _DEVIATES).ravel(),
            (self.weights[:, None] * density / density.sum()).ravel(),
        )

    def samples_ratio(self, batch: float, *, reference: float) -> Interval:
        """Samples of one batch over those of another, by the law alone (without tuning's scatter)."""
        return _quantiles(self._log_growth(batch) - self._log_growth(reference), self.weights)

    def _log_growth(self, batch: float) -> FloatArray:
        return log_growth(math.log(batch) - self.log_critical, self.exponents)


def log_growth(log_over_critical: FloatArray, exponents: FloatArray) -> FloatArray:
    """Natural logarithm of ``1 + (B / B_critical) ** q``, without overflow."""
    return np.asarray(np.logaddexp(0.0, exponents * log_over_critical), dtype=np.float64)


def fit_convergence(points: Sequence[BatchPoint]) -> Convergence:
    """Weigh laws of the batch by how well they pass through points.

    ``points``: at least two different batches. With two the answer is mostly the prior's: people are taken
    to go about as far as batches pay.
    """
    batches = [point.batch for point in points]
    if len(batches) < 2 or len(set(batches)) < len(batches):
        raise WrongArgument(
            "points", f"must be of at least two different batches, got {batches or 'none'}"
        )
    log_batches = np.log(np.array(batches))
    log_samples = np.log(np.array([point.samples for point in points]))
    offsets, exponents = (
        grid.ravel() for grid in np.meshgrid(_LOG_CRITICAL_GRID, np.array(EXPONENTS))
    )
    log_critical = offsets + float(log_batches.max())
    rest = log_samples - log_growth(log_batches - log_critical[:, None], exponents[:, None])
    log_samples_min = rest.mean(axis=1)
    misfit = ((rest - log_samples_min[:, None]) ** 2).sum(axis=1) / TUNING_SPREAD**2
    log_weights = -0.5 * (misfit + (offsets / LOG_CRITICAL_SPREAD) ** 2)
    weights = np.exp(log_weights - log_weights.max())
    return Convergence(
        log_samples_min=log_samples_min,
        log_critical=log_critical,
        exponents=exponents,
        weights=weights / weights.sum(),
        log_level_error=TUNING_SPREAD / math.sqrt(len(points)),
    )


def _quantiles(logs: FloatArray, weights: FloatArray) -> Interval:
    order = np.argsort(logs, kind="stable")
    cumulated = np.cumsum(weights[order])
    # of the sum that rounding left, not of 1: the last law stays reachable
    places = np.searchsorted(cumulated, np.array([0.05, 0.5, 0.95]) * cumulated[-1])
    p5, median, p95 = (float(value) for value in np.exp(logs[order][places]))
    return Interval(p5, median, p95)


def batch_outlook(
    points: Sequence[BatchPoint], *, batches: Sequence[float], samples_per_s: Mapping[float, float]
) -> BatchDocument:
    """Fit the law of the batch and apply it; ratios are against the smallest batch that was run.

    ``points``: Samples to the target of at least two batches; ``ValueError`` with fewer.
    ``batches``: Further ones to look at; those that were run are always shown.
    ``samples_per_s``: By batch, measured or predicted.
    """
    run = {point.batch: point.samples for point in points}
    law = fit_convergence(points)
    outlooks = tuple(
        _outlook(law, batch, samples_per_s, run)
        for batch in sorted({*run, *batches, *samples_per_s})
    )
    return BatchDocument(
        command_line=asked_by(),
        points=run,
        reference_batch=min(run),
        critical_batch=law.critical_batch,
        outlooks=outlooks,
        caveats=tuple(_caveats(outlooks, run)),
    )


def _outlook(
    law: Convergence, batch: float, rates: Mapping[float, float], run: Mapping[float, float]
) -> BatchOutlook:
    reference = min(run)
    samples = law.samples(batch)
    ratio = law.samples_ratio(batch, reference=reference)
    rate = rates.get(batch)
    reference_rate = rates.get(reference)
    faster = rate / reference_rate if rate and reference_rate else None
    return BatchOutlook(
        batch=batch,
        samples=samples,
        steps=samples / batch,
        samples_ratio=ratio,
        samples_per_s=rate,
        throughput_speedup=faster,
        target_speedup=None if faster is None else faster / ratio,
        learning_rate_factor=_learning_rate(law, batch) / _learning_rate(law, reference),
        time_to_target_s=None if rate is None else samples / rate,
        is_beyond_critical=batch > law.critical_batch.nominal,
        is_extrapolated=batch > max(run),
    )


def _learning_rate(law: Convergence, batch: float) -> float:
    """Best rate of SGD over that of an endless batch [McCandlish et al., arXiv 1812.06162, section 2.2]."""
    return 1 / (1 + law.critical_batch.nominal / batch)


def _caveats(outlooks: Sequence[BatchOutlook], run: Mapping[float, float]) -> Iterator[str]:
    if any(samples < batch for batch, samples in run.items()):
        yield "points of less than a step: if they are epochs, give --samples-per-unit"
    beyond = [f"{entry.batch:g}" for entry in outlooks if entry.is_beyond_critical]
    if beyond:
        yield f"beyond the critical batch, devices add little: {', '.join(beyond)}"
    if len(run) == 2:
        yield "two batches cannot tell the law; the answer is mostly the prior's"
    unseen = [f"{entry.batch:g}" for entry in outlooks if entry.is_extrapolated]
    if unseen:
        yield f"beyond the largest batch that was run ({max(run):g}): {', '.join(unseen)}"
    yield (
        "every batch is assumed to be tuned: learning rate scaled (nearly linearly for SGD below the "
        "critical batch, by the square root of that for Adam) and warmed up"
    )
