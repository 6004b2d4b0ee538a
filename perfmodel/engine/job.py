"""A training job over weeks: its work, its interruptions, closed forms of its end, and courses in simulated time.

Failures are exponential with mean ``mtbf_s``; a checkpoint costs ``write_s`` and follows every
``interval_s`` of work.

References
----------
.. [1] J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974.
.. [2] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
   FGCS 22, 2006.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import (
    check_at_least,
    check_kind,
    check_non_negative,
    check_positive,
    fit_numbers,
)
from perfmodel.statistics import BoolArray, FloatArray, IntArray
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
        check_kind("name", self.name, str)
        check_kind("takes_node", self.takes_node, bool)
        fit_numbers(self, float, "mtbf_device_s")
        check_positive(f"mtbf_device_s of cause {self.name!r}", self.mtbf_device_s)


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
        spares = () if self.spares is None else ("spares",)
        waits = ("checkpoint_write_s", "detection_s", "restart_s", "replacement_s")
        fit_numbers(self, int, "devices", *spares)
        fit_numbers(self, float, "work_s", "checkpoint_interval_s", *waits)
        check_at_least("devices", self.devices, 1)
        check_at_least("spares", self.spares or 0, 0)
        check_positive("work_s", self.work_s)
        check_positive("checkpoint_interval_s", self.checkpoint_interval_s)
        for name in waits:
            check_non_negative(name, getattr(self, name))
        check_kind("causes", self.causes, list, tuple)
        for cause in self.causes:
            check_kind("causes", cause, FailureCause)
        object.__setattr__(self, "causes", tuple(self.causes))
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


def best_interval_s(*, write_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Interval that makes ``expected_elapsed_s`` least, exactly. [s]"""
    check_non_negative("write_s", write_s)
    if math.isinf(mtbf_s):
        return math.inf if write_s > 0 else 0.0
    check_positive("mtbf_s", mtbf_s)
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
    # So near to zero half of the digits are lost; the first order, sqrt(2 write mtbf) [1]_, is better there.
    return np.where(best > 1e-5, mtbf_s * best, np.sqrt(2 * write_s * mtbf_s))


def expected_elapsed_s(job: Job) -> Seconds:
    """Mean time to the end of a job that never waits for a node; infinite beyond what a float can say. [s]

    A segment of work and its checkpoint, ``L`` together, is struck ``exp(L / M) - 1`` times on
    average. Each stop costs the time until it, detection ``D`` and restart ``R``, which may be
    struck too: ``(exp(L / M) - 1) M exp((D + R) / M)`` in all.
    """
    mtbf_s = job.mtbf_s
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
    return float(mean_s) if math.isfinite(mean_s) else math.inf


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


#: A remainder of work below this share of an interval is rounding, not another segment.
_ROUNDING: Final = 1e-9
#: Failures whose times and causes a course draws ahead.
_BLOCK: Final = 256
#: Courses whose failures are looked at together: tables that stay in the cache.
_TOGETHER: Final = 512


class Activity(enum.StrEnum):
    """What the time of a job goes to; every second of it to exactly one."""

    WORK = "work"
    """Training that was kept."""
    CHECKPOINT = "checkpoint"
    LOST = "lost"
    """Training, and half-written checkpoints, that a failure undid."""
    DETECTION = "detection"
    WAITING = "waiting"
    """No spare node."""
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Courses:
    """Possible courses of a job; every array has shape ``(num_courses,)``."""

    elapsed_s: FloatArray
    """From the start of the job to the end of its last checkpoint. [s]"""
    spent_s: Mapping[Activity, FloatArray]
    """Sums to ``elapsed_s``. [s]"""
    stops: Mapping[str, IntArray]
    """Failures by cause; those that strike while the job recovers count too."""

    @property
    def effective_fraction(self) -> FloatArray:
        """Training that was kept, over all time."""
        return self.spent_s[Activity.WORK] / self.elapsed_s

    @property
    def unplanned_stops(self) -> IntArray:
        """Failures of all causes."""
        return sum(self.stops.values(), start=np.zeros(len(self.elapsed_s), dtype=np.int64))


def simulate_job(
    job: Job, *, generators: Sequence[np.random.Generator], rate_factors: ArrayLike = 1.0
) -> Courses:
    """Simulate one course of a job for each random generator.

    Failures come at random (exponential), at any time but while the job waits for a node: what
    stands idle does not fail. A failure costs what was done since the last
    complete checkpoint; then detection, a node from the spares if the cause takes one, and restart
    follow, and a failure in between starts them over. Failed nodes are replaced side by side.
    Between two stops nothing is random, so that the checkpoints between them are counted, not
    simulated one by one. A wait moves all that follows and changes nothing of it.

    ``generators``: same generator, same course. Courses of jobs that differ in one number share their luck.
    ``rate_factors``: by how much failures are more frequent than the job says, for all courses or each;
    finite, > 0.
    """
    factors = np.broadcast_to(np.asarray(rate_factors, dtype=np.float64), len(generators))
    for factor in factors.tolist():
        check_positive("rate_factors", factor)
    state = _State(job, generators, factors)
    state.run()
    return Courses(
        elapsed_s=state.spent_until_now_s(slice(None)),
        spent_s=state.spent_s,
        stops={cause.name: row for cause, row in zip(job.causes, state.stops, strict=True)},
    )


class _State:
    """Where every course of a job stands; methods take the indices of those that they move."""

    def __init__(
        self, job: Job, generators: Sequence[np.random.Generator], rate_factors: FloatArray
    ) -> None:
        count = len(rate_factors)
        self.spent_s = {activity: np.zeros(count) for activity in Activity}
        self.stops = np.zeros((len(job.causes), count), dtype=np.int64)
        self._job, self._generators = job, generators
        self._mtbf_s = job.mtbf_s / rate_factors
        rates = np.array([1 / cause.mtbf_device_s for cause in job.causes])
        self._shares = np.cumsum(rates) / rates.sum() if job.causes else rates
        self._takes_node = np.array([cause.takes_node for cause in job.causes], dtype=np.int64)
        self._missing = np.zeros(count, dtype=np.int64)
        """Nodes that failed and whose failure is not detected yet."""
        self._replaced = np.zeros(count, dtype=np.int64)
        """Nodes whose replacement has begun."""
        self._back_s = np.empty((count, 0))
        """When the last of them come back, in a ring: column ``number % columns``."""

    def spent_until_now_s(self, courses: IntArray | slice) -> FloatArray:
        """From the start of the job. [s]"""
        found_s: FloatArray = np.sum(
            [spent_s[courses] for spent_s in self.spent_s.values()], axis=0
        )
        return found_s

    def run(self) -> None:
        """Bring all courses to their ends: of what came before a failure, the work that is left alone counts."""
        recovery_s = self._job.detection_s, self._job.restart_s
        # Drawn even if nothing ever fails, so that random numbers stay in step.
        until = np.array([each.standard_exponential(1)[0] for each in self._generators])
        for first in range(0, len(self._mtbf_s), _TOGETHER):
            courses = np.arange(first, min(first + _TOGETHER, len(self._mtbf_s)))
            until_s = (until * self._mtbf_s)[courses, np.newaxis]
            courses = courses[self._last(courses, until_s, 0.0, 0.0)]
            while courses.size:
                # Ahead in blocks: to ask for every number when it is needed takes longer than all else.
                chosen = [self._generators[course] for course in courses.tolist()]
                pairs = [
                    (each.standard_exponential(_BLOCK), each.random(_BLOCK)) for each in chosen
                ]
                times, shares = map(np.array, zip(*pairs, strict=True))
                gaps_s = times * self._mtbf_s[courses, np.newaxis]
                courses = courses[self._last(courses, gaps_s, *recovery_s, shares)]

    def _last(
        self,
        courses: IntArray,
        gaps_s: FloatArray,
        detection_s: Seconds,
        restart_s: Seconds,
        shares: FloatArray | None = None,
    ) -> BoolArray:
        """Let times between failures pass, each after a recovery; which courses have not ended.

        ``gaps_s``, ``shares``: shape ``(num_courses, num_gaps)``; ``shares`` pick the causes of the failures
        before each.
        """
        interval_s, write_s = self._job.checkpoint_interval_s, self._job.checkpoint_write_s
        training_s = np.maximum(gaps_s - detection_s - restart_s, 0.0)
        left_s = self._job.work_s - self.spent_s[Activity.WORK][courses, np.newaxis]
        left_s = np.where(left_s > _ROUNDING * interval_s, left_s, 0.0)
        most_s = left_s + np.ceil(left_s / interval_s) * write_s
        complete = np.floor(np.minimum(training_s, most_s) / (interval_s + write_s))
        saved_s = np.cumsum(complete, axis=1) * interval_s
        left_s = np.maximum(left_s - saved_s + complete * interval_s, 0.0)
        whole_s = left_s + np.ceil(left_s / interval_s - _ROUNDING) * write_s
        ends = training_s >= whole_s
        lasts: BoolArray = np.logical_not(ends.any(axis=1))
        last = np.where(lasts, gaps_s.shape[1], ends.argmax(axis=1))[:, np.newaxis]
        number = np.arange(gaps_s.shape[1])
        is_struck, is_last = number < last, number == last
        passed_s = np.where(is_struck, gaps_s, detection_s + restart_s + whole_s)
        now_s = self.spent_until_now_s(courses)[:, np.newaxis]
        for activity, time_s in {
            Activity.DETECTION: np.minimum(passed_s, detection_s),
            Activity.RESTART: np.clip(passed_s - detection_s, 0.0, restart_s),
            Activity.WORK: np.where(is_last, left_s, complete * interval_s),
            Activity.CHECKPOINT: np.where(is_last, whole_s - left_s, complete * write_s),
            Activity.LOST: np.where(is_last, 0.0, training_s - complete * (interval_s + write_s)),
        }.items():
            self.spent_s[activity][courses] += time_s.sum(axis=1, where=is_struck | is_last)
        if shares is not None:
            causes = np.searchsorted(self._shares, shares, side="right")
            for cause, stops in enumerate(self.stops):
                stops[courses] += ((causes == cause) & (number <= last)).sum(axis=1)
            if self._job.spares is not None:
                found_s = now_s + np.cumsum(passed_s, axis=1) - passed_s + detection_s
                found_s[(number > last) | (gaps_s < detection_s)] = np.inf
                taken = np.where(number <= last, self._takes_node[causes], 0)
                self._wait_for_nodes(courses, found_s, taken, self._job.spares)
        return lasts

    def _wait_for_nodes(
        self, courses: IntArray, found_s: FloatArray, taken: IntArray, spares: int
    ) -> None:
        """Replace the missing nodes whenever they are found missing, and wait until there are as many spares.

        ``found_s``: when each failure would be found if nothing waited for a node from now on; infinite if another
        one comes first. Shape ``(num_courses, num_failures)``, as ``taken``, the nodes that each takes. [s]
        """
        waited_s = np.zeros(len(courses))
        for when_s, nodes in zip(found_s.T, taken.T, strict=True):
            self._missing[courses] += nodes
            found = np.isfinite(when_s) & (self._missing[courses] > 0)
            if found.any():
                now_s = when_s[found] + waited_s[found]
                waited_s[found] += self._waits_s(courses[found], now_s, spares)
        self.spent_s[Activity.WAITING][courses] += waited_s

    def _waits_s(self, courses: IntArray, now_s: FloatArray, spares: int) -> FloatArray:
        """Replace the missing nodes from now on; how long each course waits. [s]

        Nodes come back in the order in which they failed. A job that has taken n nodes from s spares
        goes on once n - s are back.
        """
        missing, first = self._missing[courses], self._replaced[courses]
        last = first + missing
        self._replaced[courses] = last
        self._missing[courses] = 0
        columns = self._back_s.shape[1]
        if last.max() > columns and columns <= spares:
            columns = min(max(2 * columns, int(last.max())), spares + 1)
            more = np.zeros((len(self._back_s), columns - self._back_s.shape[1]))
            self._back_s = np.concatenate([self._back_s, more], axis=1)
        for number in range(missing.max()):
            more_missing = missing > number
            place = (first[more_missing] + number) % columns
            self._back_s[courses[more_missing], place] = (
                now_s[more_missing] + self._job.replacement_s
            )
        awaited = last - spares - 1
        back_s = self._back_s[courses, awaited % columns]
        return np.where(awaited >= 0, np.maximum(back_s - now_s, 0.0), 0.0)
