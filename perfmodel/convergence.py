"""How many samples, and steps, a larger batch needs to reach the same target.

``samples(B) = samples_min (1 + (B / B_critical) ** q)`` and ``steps(B) = samples(B) / B``. With
``q = 1`` this is the law of McCandlish et al. [1]_, ``steps = steps_min (1 + B_noise / B)``, with
``B_critical = B_noise``. Real training passes through many noise scales, which blurs the knee
(``q < 1``), and learning rates meet limits, which sharpens it (``q > 1``): ``q`` is a nuisance with
a prior around 1.

References
----------
.. [1] S. McCandlish, J. Kaplan, D. Amodei, "An Empirical Model of Large-Batch Training", arXiv 1812.06162.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.checks import WrongArgument, at_least, non_negative, positive
from perfmodel.statistics import FloatArray, Interval

#: Equally likely widths of the knee.
EXPONENTS: Final = (0.6, 0.8, 1.0, 1.3)
#: With a noise scale that was followed along the training, the changing scale is in it already: the law
#: of [1]_ is as likely as all others together.
LAW_OF_ONE_SCALE: Final = 0.5
#: ln(critical batch / largest batch seen): people go about as far as batches pay.
LOG_CRITICAL_MEAN: Final = 0.0
LOG_CRITICAL_SPREAD: Final = 1.0
#: How far, in log, separately tuned runs of one task scatter around any law of the batch: learning
#: rates, schedules and evaluation intervals differ between them.
TUNING_SPREAD: Final = 0.06
#: ln(critical batch of tuned runs / gradient noise scale of one): the scale leaves the curvature of the
#: loss out (McCandlish et al. call it the simple one, and find it within a small factor).
NOISE_SCALE_SPREAD: Final = 0.7

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

    def __post_init__(self) -> None:
        positive("batch", self.batch)
        positive("samples", self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """What is known of the critical batch before any run at several batches, as a log-normal."""

    batch: float
    """Median. [samples]"""
    log_error: float
    """Standard deviation of its logarithm."""

    def __post_init__(self) -> None:
        positive("batch", self.batch)
        positive("log_error", self.log_error)

    @classmethod
    def of_noise_scale(cls, batch: float, *, relative_error: float) -> "CriticalBatch":
        """A measured noise scale as a critical batch: its own error and that of the law."""
        non_negative("relative_error", relative_error)
        return cls(batch=batch, log_error=math.hypot(relative_error, NOISE_SCALE_SPREAD))


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
        positive("batch", batch)
        logs = self.log_samples_min + self._log_growth(batch)
        spread = math.hypot(TUNING_SPREAD, self.log_level_error)
        density = np.exp(-0.5 * _DEVIATES**2)
        return _quantiles(
            (logs[:, None] + spread * _DEVIATES).ravel(),
            (self.weights[:, None] * density / density.sum()).ravel(),
        )

    def samples_ratio(self, batch: float, *, reference: float) -> Interval:
        """Samples of one batch over those of another, by the law alone (without tuning's scatter)."""
        positive("batch", batch)
        positive("reference", reference)
        return _quantiles(self._log_growth(batch) - self._log_growth(reference), self.weights)

    def _log_growth(self, batch: float) -> FloatArray:
        return log_growth(math.log(batch) - self.log_critical, self.exponents)


def log_growth(log_over_critical: FloatArray, exponents: FloatArray) -> FloatArray:
    """Natural logarithm of ``1 + (B / B_critical) ** q``, without overflow."""
    return np.asarray(np.logaddexp(0.0, exponents * log_over_critical), dtype=np.float64)


def fit_convergence(
    points: Sequence[BatchPoint], *, critical: CriticalBatch | None = None
) -> Convergence:
    """Weigh laws of the batch by how well they pass through points.

    ``points``: at least two different batches, with a critical batch at least one. With two the
    answer is mostly the prior's.
    ``critical``: its prior; by default people are taken to go about as far as batches pay.
    """
    batches = [point.batch for point in points]
    fewest = 2 if critical is None else 1
    if len(batches) < fewest or len(set(batches)) < len(batches):
        words = "two different batches" if critical is None else "one batch, each named once"
        raise WrongArgument("points", f"must be of at least {words}, got {batches or 'none'}")
    log_batches = np.log(np.array(batches))
    log_samples = np.log(np.array([point.samples for point in points]))
    offsets, exponents = (
        grid.ravel() for grid in np.meshgrid(_LOG_CRITICAL_GRID, np.array(EXPONENTS))
    )
    if critical is None:
        center, spread = float(log_batches.max()) + LOG_CRITICAL_MEAN, LOG_CRITICAL_SPREAD
    else:
        center, spread = math.log(critical.batch), critical.log_error
    log_critical = offsets + center
    rest = log_samples - log_growth(log_batches - log_critical[:, None], exponents[:, None])
    log_samples_min = rest.mean(axis=1)
    misfit = ((rest - log_samples_min[:, None]) ** 2).sum(axis=1) / TUNING_SPREAD**2
    distance = (offsets / spread) ** 2
    log_weights = -0.5 * (misfit + distance) + _log_prior(exponents, is_told=critical is not None)
    weights = np.exp(log_weights - log_weights.max())
    return Convergence(
        log_samples_min=log_samples_min,
        log_critical=log_critical,
        exponents=exponents,
        weights=weights / weights.sum(),
        log_level_error=TUNING_SPREAD / math.sqrt(len(points)),
    )


def _log_prior(exponents: FloatArray, *, is_told: bool) -> FloatArray:
    if not is_told:
        return np.zeros_like(exponents)
    other = (1 - LAW_OF_ONE_SCALE) / (len(EXPONENTS) - 1)
    return np.log(np.where(exponents == 1.0, LAW_OF_ONE_SCALE, other))


def _quantiles(logs: FloatArray, weights: FloatArray) -> Interval:
    order = np.argsort(logs, kind="stable")
    cumulated = np.cumsum(weights[order])
    # of the sum that rounding left, not of 1: the last law stays reachable
    places = np.searchsorted(cumulated, np.array([0.05, 0.5, 0.95]) * cumulated[-1])
    p5, median, p95 = (float(value) for value in np.exp(logs[order][places]))
    return Interval(p5, median, p95)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """Squared norms of one step, before any clipping."""

    ranks: int
    local_batch: int
    """Samples behind the gradient of one rank."""
    mean_square: float
    """Mean over the ranks of the squared norm of the gradient of one rank."""
    square_of_mean: float
    """Squared norm of the gradient averaged over the ranks."""

    def __post_init__(self) -> None:
        at_least("ranks", self.ranks, 2)
        at_least("local_batch", self.local_batch, 1)
        non_negative("mean_square", self.mean_square)
        non_negative("square_of_mean", self.square_of_mean)

    @property
    def signal(self) -> float:
        """Unbiased estimate of the squared norm of the true gradient; noise can make it negative."""
        return (self.ranks * self.square_of_mean - self.mean_square) / (self.ranks - 1)


#: A training is cut into so many equal parts, of which each has a noise scale of its own.
_MOST_WINDOWS: Final = 8
#: Fewer steps in a part say little about either norm.
FEWEST_STEPS: Final = 8
_TINY: Final = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The batch at which noise and signal of a gradient are equal, over a whole training."""

    batch: float
    """It needs twice the samples of a tiny one. [samples]"""
    relative_error: float
    """Standard error of it over itself."""
    windows: tuple[float, ...]
    """Noise scales of consecutive parts, of equally many steps; inf where the signal drowns. [samples]"""


def noise_scale(steps: Sequence[GradientNorms]) -> NoiseScale | None:
    """Noise scale of a training along which it changes; None if all is noise, or nothing.

    A part of the training with the scale b that takes n steps at the batch B would take ``n w`` steps
    of any large batch, with ``w = 1 / (1 + b / B)``, and ``n w (1 + b / B')`` at B' [1]_. Summed
    over the parts that is the law of one scale, ``B (1 / mean(w) - 1)``: late parts with much noise
    count less than their share of the steps. As the norm that DDP's average shows is signal plus
    noise over B, w is the share of the signal in it, which needs no division by a small signal.

    ``steps``: all steps of the training in their order, at one batch; at least eight.
    """
    num_windows = min(_MOST_WINDOWS, len(steps) // FEWEST_STEPS)
    if num_windows == 0:
        return None
    bounds = [len(steps) * part // num_windows for part in range(num_windows + 1)]
    shares = [_signal_share(steps[low:high]) for low, high in itertools.pairwise(bounds)]
    share = math.fsum(mean for mean, _ in shares) / num_windows
    error = math.hypot(*(error for _, error in shares)) / num_windows
    if not 0 < share < 1:
        return None
    batch = steps[0].ranks * steps[0].local_batch
    return NoiseScale(
        batch=batch * (1 / share - 1),
        # of the logarithm of 1 / share - 1
        relative_error=error / (share * (1 - share)),
        windows=tuple(batch * (1 / mean - 1) if mean > 0 else math.inf for mean, _ in shares),
    )


def _signal_share(steps: Sequence[GradientNorms]) -> tuple[float, float]:
    """Signal over the squared norm of the averaged gradient, in [0, 1]; and its standard error.

    The error is that of leaving steps out one by one.
    """
    signal = math.fsum(step.signal for step in steps)
    total = math.fsum(step.square_of_mean for step in steps)
    if total <= 0:
        return 0.0, 0.0
    left_out = [(signal - step.signal) / max(total - step.square_of_mean, _TINY) for step in steps]
    center = math.fsum(left_out) / len(left_out)
    variance = math.fsum((share - center) ** 2 for share in left_out) * (1 - 1 / len(left_out))
    return min(max(signal / total, 0.0), 1.0), math.sqrt(variance)
