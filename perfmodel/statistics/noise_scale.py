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

    Parameters
    ----------
    steps
        All steps of the training in their order, at one batch; at least eight.
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
