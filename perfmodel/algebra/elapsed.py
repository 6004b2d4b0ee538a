"""Mean and spread of the end of a job that fails, for many jobs at once.

Failures are exponential with mean ``mtbf_s``, at any time. A segment of work and its checkpoint is
repeated until it passes; every failure costs the time until it and a recovery, which is itself repeated
until it passes. Segments are independent, as failures have no memory.
"""

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.arrays import FloatArray

#: Below this share of the mean time between failures the moments of the truncated exponential are
#: those of a uniform distribution; their closed form would cancel to nothing.
_SMALL = 1e-5


def elapsed_moments(
    work_s: ArrayLike,
    *,
    interval_s: ArrayLike,
    write_s: ArrayLike,
    mtbf_s: ArrayLike,
    recovery_s: ArrayLike,
) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of the time from start to end; arrays broadcast. [s]

    The mean is Daly's complete model, see ``algebra.goodput.expected_elapsed_s``. Infinite, or not a
    number, where it is beyond floating point.

    Parameters
    ----------
    work_s
        Training without any stop.
    interval_s
        Work between two checkpoints; the last segment is what is left.
    recovery_s
        Detection and restart.
    """
    work = np.asarray(work_s, dtype=np.float64)
    interval = np.asarray(interval_s, dtype=np.float64)
    mtbf = np.asarray(mtbf_s, dtype=np.float64)
    write = np.asarray(write_s, dtype=np.float64)
    recovery = np.asarray(recovery_s, dtype=np.float64)
    segments = np.maximum(1.0, np.ceil(work / interval - 1e-9))
    last = work - (segments - 1) * interval
    # What fails far faster than it recovers takes longer than numbers reach.
    with np.errstate(over="ignore", invalid="ignore"):
        mean_last, variance_last = _segment(last + write, mtbf, recovery)
        mean_whole, variance_whole = _segment(interval + write, mtbf, recovery)
        mean = mean_last + (segments - 1) * mean_whole
        variance = variance_last + (segments - 1) * variance_whole
        return mean, np.sqrt(np.maximum(0.0, variance))


def _segment(
    length_s: FloatArray, mtbf_s: FloatArray, recovery_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of the time until a segment has passed: a sum over a geometric number.

    With ``K`` failures before it passes, ``T = length + sum of K (X + R)``, where ``X`` is exponential
    below ``length`` and ``R`` a recovery: ``Var T = E K Var(X + R) + Var K E(X + R)²``.
    """
    share = length_s / mtbf_s
    failures = np.expm1(share)
    spread = failures * (failures + 1)
    is_small = share < _SMALL
    decay = 1 / np.where(is_small, 1.0, failures)
    mean_x = np.where(is_small, length_s / 2, mtbf_s - length_s * decay)
    variance_x = np.where(is_small, length_s**2 / 12, mtbf_s**2 - length_s**2 * decay * (1 + decay))
    again = recovery_s / mtbf_s
    mean_r = mtbf_s * np.expm1(again)
    variance_r = mtbf_s**2 * np.maximum(0.0, np.exp(2 * again) - 2 * again * np.exp(again) - 1)
    mean_y = mean_x + mean_r
    mean = length_s + failures * mean_y
    return mean, failures * (variance_x + variance_r) + spread * mean_y**2
