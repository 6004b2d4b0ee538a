"""Gradient noise scale from what DDP has anyway: gradients of each rank, and their average.

References
----------
.. [1] S. McCandlish, J. Kaplan, D. Amodei, "An Empirical Model of Large-Batch Training",
   arXiv 1812.06162, appendix A.1.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perfmodel.checks import at_least, non_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """Squared norms of one step, before any clipping.

    Raises
    ------
    ValueError
        If there are fewer than two ranks, an empty batch, or norms that are negative or not finite.
    """

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

    @property
    def noise(self) -> float:
        """Unbiased estimate of the trace of the covariance of one sample's gradient."""
        return (self.mean_square - self.square_of_mean) * self.local_batch / (1 - 1 / self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Batch at which noise and signal of a gradient are equal."""

    batch: float
    """``noise / signal``, of their means over the steps. [samples]"""
    relative_error: float
    """Standard error of it over itself, by leaving steps out one by one."""
    num_steps: int


def noise_scale(steps: Sequence[GradientNorms]) -> NoiseScale | None:
    """Ratio of mean noise to mean signal; None where the signal drowns in the noise.

    The mean of ratios would be biased, and has no variance where a signal passes through zero.

    Raises
    ------
    ValueError
        If there are fewer than two steps.
    """
    at_least("number of steps", len(steps), 2)
    signal = math.fsum(step.signal for step in steps)
    noise = math.fsum(step.noise for step in steps)
    left_out = [(noise - step.noise, signal - step.signal) for step in steps]
    if signal <= 0 or noise < 0 or min(rest for _, rest in left_out) <= 0:
        return None
    ratios = [max(rest_noise, 0.0) / rest for rest_noise, rest in left_out]
    center = math.fsum(ratios) / len(ratios)
    variance = math.fsum((ratio - center) ** 2 for ratio in ratios) * (1 - 1 / len(ratios))
    ratio = noise / signal
    return NoiseScale(
        batch=ratio,
        relative_error=math.sqrt(variance) / ratio if ratio > 0 else math.inf,
        num_steps=len(steps),
    )


#: A training is cut into so many equal parts, of which each has a noise scale of its own.
MOST_WINDOWS: Final = 8
#: Fewer steps in a part say little about either norm.
FEWEST_STEPS: Final = 8
_TINY: Final = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNoise:
    """The one noise scale that stands for a whole training."""

    batch: float
    """Batch that needs twice the samples of a tiny one. [samples]"""
    relative_error: float
    windows: tuple[float, ...]
    """Noise scales of consecutive parts, of equally many steps; inf where the signal drowns. [samples]"""


def training_noise_scale(steps: Sequence[GradientNorms]) -> TrainingNoise | None:
    """Noise scale of a training along which it changes; None where the signal drowns in the noise.

    A part of the training with the scale b that takes n steps at the batch B would take ``n w`` steps
    of any large batch, with ``w = 1 / (1 + b / B)``, and ``n w (1 + b / B')`` at B' [1]_. Summed
    over the parts that is the law of one scale, ``B (1 / mean(w) - 1)``: late parts with much noise
    count less than their share of the steps. As the norm that DDP's average shows is signal plus
    noise over B, w is the share of the signal in it, which needs no division by a small signal.

    Parameters
    ----------
    steps
        All steps of the training in their order, at one batch; at least eight.
    """
    num_windows = min(MOST_WINDOWS, len(steps) // FEWEST_STEPS)
    if num_windows == 0:
        return None
    bounds = [len(steps) * part // num_windows for part in range(num_windows + 1)]
    shares = [_signal_share(steps[low:high]) for low, high in itertools.pairwise(bounds)]
    share = math.fsum(mean for mean, _ in shares) / num_windows
    error = math.hypot(*(error for _, error in shares)) / num_windows
    if not 0 < share < 1:
        return None
    batch = steps[0].ranks * steps[0].local_batch
    return TrainingNoise(
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
