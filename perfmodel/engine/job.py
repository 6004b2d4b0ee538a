"""A training job over weeks: its work, its interruptions, and closed forms of its end.

Failures are exponential with mean ``mtbf_s``; a checkpoint costs ``write_s`` and follows every
``interval_s`` of work.

References
----------
.. [1] J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974.
.. [2] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
   FGCS 22, 2006.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.checks import at_least, non_negative, positive
from perfmodel.statistics import FloatArray
from perfmodel.units import Seconds

#: Below this share of the mean time between failures the moments of the truncated exponential are
#: those of a uniform distribution; their closed form would cancel to nothing.
_SMALL: Final = 1e-5
#: From within a third of the root, each doubles the digits.
_NEWTON_STEPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """One reason for which a synchronous job stops."""

    name: str
    mtbf_device_s: Seconds
    """Mean device time between failures; n devices fail n times as often. [s]"""
    takes_node: bool = False
    """Whether a node has to be replaced before the job can go on."""

    def __post_init__(self) -> None:
        positive(f"mtbf_device_s of cause {self.name!r}", self.mtbf_device_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work, its checkpoints, what stops it and what happens then."""

    devices: int
    work_s: Seconds
    """How long the job would take without a stop and without a checkpoint. [s]"""
    checkpoint_interval_s: Seconds
    """Work between the end of one checkpoint and the start of the next. [s]"""
    checkpoint_write_s: Seconds = 0.0
    """How long training stands still for one checkpoint. [s]"""
    causes: tuple[FailureCause, ...] = ()
    detection_s: Seconds = 0.0
    """From a failure until somebody, or a watchdog, has ended what is left of the job. [s]"""
    restart_s: Seconds = 0.0
    """Start of the processes, reading the checkpoint, warm-up. [s]"""
    spares: int | None = None
    """Idle nodes at the start; None: a replacement is always at hand."""
    replacement_s: Seconds = 0.0
    """From detection until a failed node, or a new one in its place, is back as a spare. [s]"""

    def __post_init__(self) -> None:
        at_least("devices", self.devices, 1)
        positive("work_s", self.work_s)
        positive("checkpoint_interval_s", self.checkpoint_interval_s)
        for name in ("checkpoint_write_s", "detection_s", "restart_s", "replacement_s"):
            non_negative(name, getattr(self, name))
        if self.spares is not None:
            at_least("spares", self.spares, 0)
        names = [cause.name for cause in self.causes]
        if len(set(names)) < len(names):
            raise ValueError(f"causes must have different names, got {names}")

    @property
    def mtbf_s(self) -> Seconds:
        """Mean time between failures of the whole job, infinite without causes. [s]"""
        rate_per_s = self.devices * math.fsum(1 / cause.mtbf_device_s for cause in self.causes)
        return 1 / rate_per_s if rate_per_s > 0 else math.inf

    @property
    def recovery_s(self) -> Seconds:
        """Detection and restart; the wait for a node comes on top. [s]"""
        return self.detection_s + self.restart_s


def young_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """First-order best interval ``sqrt(2 write mtbf)``, for ``write_s`` far below ``mtbf_s`` [1]_. [s]"""
    _check(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Higher-order best interval; ``mtbf_s`` where a write takes twice that or longer [2, eq. 37]_. [s]"""
    _check(write_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if write_s > 0 else 0.0
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(write_s / (2 * mtbf_s))
    return math.sqrt(2 * write_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - write_s


def best_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Interval that makes ``expected_elapsed_s`` least, exactly. [s]"""
    _check(write_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if write_s > 0 else 0.0
    return float(best_intervals_s(write_s=write_s, mtbf_s=np.array([mtbf_s]))[0])


def best_intervals_s(*, write_s: Seconds, mtbf_s: FloatArray) -> FloatArray:
    """The best interval at each of some finite mean times between failures. [s]

    With ``x = interval / mtbf`` and ``d = write / mtbf`` the minimum of ``(exp(x + d) - 1) / x`` is where
    ``(1 - x) exp(x + d) = 1``. With ``u = -log(1 - x)`` that is ``u - 1 + exp(-u) = d``, which is convex
    in ``u``: Newton's steps fall to it from ``d + sqrt(2 d)``, which is above.
    """
    d = write_s / mtbf_s
    u = d + np.sqrt(2 * d)
    for _ in range(_NEWTON_STEPS):
        slope = -np.expm1(-u)
        u = np.maximum(0.0, u - np.divide(u - slope - d, slope, out=np.zeros_like(u), where=u > 0))
    best = -np.expm1(-u)
    # So near to zero half of the digits are lost; Young's is better there.
    return np.where(best > 1e-5, mtbf_s * best, np.sqrt(2 * write_s * mtbf_s))


def expected_elapsed_s(job: Job) -> Seconds:
    """Mean time to the end of a job; infinite beyond what a float can say. [s]

    A segment of work and its checkpoint, ``L`` together, is struck ``exp(L / M) - 1`` times on
    average. Each stop costs the time until it, detection ``D`` and restart ``R``, which may be
    struck too, and the wait ``P`` for a node, which is not:
    ``(exp(L / M) - 1) (M exp((D + R) / M) + P exp(R / M))``, which is ``1 + P / M exp(-D / M)`` times the mean of
    ``elapsed_moments``.
    """
    wait_s, mtbf_s = _certain_wait_s(job), job.mtbf_s
    interval_s = min(job.checkpoint_interval_s, job.work_s)
    if math.isinf(mtbf_s):
        segments = math.ceil(job.work_s / interval_s - 1e-9)
        return job.work_s + segments * job.checkpoint_write_s
    mean_s, _ = elapsed_moments(
        job.work_s,
        interval_s=interval_s,
        write_s=job.checkpoint_write_s,
        mtbf_s=mtbf_s,
        recovery_s=job.recovery_s,
    )
    elapsed_s = float(mean_s) * (1 + wait_s / mtbf_s * math.exp(-job.detection_s / mtbf_s))
    return elapsed_s if math.isfinite(elapsed_s) else math.inf


def expected_stops(job: Job) -> float:
    """Mean number of failures until the end: exposed time over ``mtbf_s`` (Wald).

    For jobs that never wait for a node. The same limits as ``expected_elapsed_s``.
    """
    if _certain_wait_s(job) > 0:
        raise ValueError("the closed form of stops holds for jobs that never wait for a node")
    return 0.0 if math.isinf(job.mtbf_s) else expected_elapsed_s(job) / job.mtbf_s


def _certain_wait_s(job: Job) -> Seconds:
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


def elapsed_moments(
    work_s: ArrayLike,
    *,
    interval_s: ArrayLike,
    write_s: ArrayLike,
    mtbf_s: ArrayLike,
    recovery_s: ArrayLike,
) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of the time from start to end; arrays broadcast. [s]

    The mean is Daly's complete model [2, eq. 20]_; infinite, or not a number, where it is
    beyond floating point. ``work_s`` is training without any stop, ``recovery_s`` detection and restart.
    """
    work, interval, write, mtbf, recovery = (
        np.asarray(value, dtype=np.float64)
        for value in (work_s, interval_s, write_s, mtbf_s, recovery_s)
    )
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
