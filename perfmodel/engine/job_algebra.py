"""Closed forms for jobs that fail: checkpoint intervals, expected end, waiting for spares.

Throughout, failures are exponential with mean ``mtbf_s``, a checkpoint costs ``write_s`` and follows
every ``interval_s`` of work.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import lambertw

from perfmodel.arrays import FloatArray
from perfmodel.checks import non_negative, positive
from perfmodel.engine.job import Job
from perfmodel.units import Seconds

#: exp of more than this overflows; a job that needs it never ends.
_LARGEST_EXPONENT: Final = 700.0


def young_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """First-order best interval, ``sqrt(2 write mtbf)``; for ``write_s`` far below ``mtbf_s``. [s]

    References
    ----------
    .. [1] J. W. Young, "A first order approximation to the optimum checkpoint interval",
       CACM 17, 1974.
    """
    _check(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Higher-order best interval; ``mtbf_s`` where a write takes twice that or longer. [s]

    References
    ----------
    .. [1] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
       FGCS 22, 2006, eq. 37.
    """
    _check(write_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if write_s > 0 else 0.0
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(write_s / (2 * mtbf_s))
    return math.sqrt(2 * write_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - write_s


def best_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Interval that makes ``expected_elapsed_s`` least, exactly. [s]

    With ``x = interval / mtbf`` and ``d = write / mtbf`` the minimum of ``(exp(x + d) - 1) / x`` is where
    ``(1 - x) exp(x + d) = 1``, hence ``x = 1 + W(-exp(-1 - d))`` with Lambert's W.
    """
    _check(write_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if write_s > 0 else 0.0
    best = 1 + float(lambertw(-math.exp(-1 - write_s / mtbf_s)).real)
    # so near the branch point of W half of the digits are lost; Young's is better there
    return mtbf_s * best if best > 1e-5 else young_interval_s(write_s=write_s, mtbf_s=mtbf_s)


def expected_elapsed_s(job: Job) -> Seconds:
    """Mean time to the end of a job; infinite beyond what a float can say. [s]

    A segment of work and its checkpoint, ``L`` together, is struck ``exp(L / M) - 1`` times on
    average. Each stop costs the time until it, detection ``D`` and restart ``R``, which may be
    struck too, and the wait ``P`` for a node, which is not:
    ``(exp(L / M) - 1) (M exp((D + R) / M) + P exp(R / M))``. Without ``P`` this is Daly's complete
    model [1]_.

    Raises
    ------
    ValueError
        If the job is beyond the formula: maintenance, some but not all causes that take a node, or
        spares that may or may not suffice.

    References
    ----------
    .. [1] J. T. Daly, FGCS 22, 2006, eq. 20.
    """
    wait_s = _certain_wait_s(job)
    mtbf_s = job.mtbf_s
    segments = math.ceil(job.work_s / job.checkpoint_interval_s - 1e-9)
    last_s = job.work_s - (segments - 1) * job.checkpoint_interval_s
    if math.isinf(mtbf_s):
        return job.work_s + segments * job.checkpoint_write_s
    stop_s = mtbf_s * _exp(job.recovery_s / mtbf_s) + wait_s * _exp(job.restart_s / mtbf_s)
    strikes = _expm1((last_s + job.checkpoint_write_s) / mtbf_s)
    if segments > 1:
        whole_s = job.checkpoint_interval_s + job.checkpoint_write_s
        strikes += (segments - 1) * _expm1(whole_s / mtbf_s)
    return strikes * stop_s


def expected_stops(job: Job) -> float:
    """Mean number of failures until the end: exposed time over ``mtbf_s`` (Wald).

    For jobs that never wait for a node. The same limits as ``expected_elapsed_s``.
    """
    if _certain_wait_s(job) > 0:
        raise ValueError("the closed form of stops holds for jobs that never wait for a node")
    return 0.0 if math.isinf(job.mtbf_s) else expected_elapsed_s(job) / job.mtbf_s


def _certain_wait_s(job: Job) -> Seconds:
    if job.maintenance_every_s is not None:
        raise ValueError("the closed form does not hold for jobs with maintenance")
    takers = sum(cause.takes_node for cause in job.causes)
    if job.spares is None or takers == 0 or job.replacement_s == 0:
        return 0.0
    if job.spares > 0 or takers < len(job.causes):
        raise ValueError("the closed form holds for no spares, or for always enough of them")
    return job.replacement_s


def _check(write_s: Seconds, mtbf_s: Seconds) -> None:
    non_negative("write_s", write_s)
    if not math.isinf(mtbf_s):
        positive("mtbf_s", mtbf_s)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent < _LARGEST_EXPONENT else math.inf


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
