"""Weeks of a training job in simulated time, many courses side by side: checkpoints, failures, spares."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.checks import positive
from perfmodel.engine.job import Job
from perfmodel.statistics import BoolArray, FloatArray, IntArray
from perfmodel.units import Seconds

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
    simulated one by one.

    ``generators``: same generator, same course. Courses of jobs that differ in one number share their luck.
    ``rate_factors``: by how much failures are more frequent than the job says, for all courses or each;
    finite, > 0.
    """
    factors = np.broadcast_to(np.asarray(rate_factors, dtype=np.float64), len(generators))
    for factor in factors.tolist():
        positive("rate_factors", factor)
    state = _State(job, _Luck(generators), factors)
    state.run()
    return Courses(
        elapsed_s=state.now_s,
        spent_s=state.spent_s,
        stops={cause.name: row for cause, row in zip(job.causes, state.stops, strict=True)},
    )


class _Luck:
    """Times to failures over their mean, and what picks their causes, of every course.

    Drawn ahead in blocks: to ask for every number when it is needed takes longer than all else.
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = generators
        # Drawn even if nothing ever fails, so that random numbers stay in step.
        self.first = np.array([each.standard_exponential(1)[0] for each in generators])
        self._drawn = np.empty((len(generators), _BLOCK, 2))
        self._used = np.full(len(generators), _BLOCK)

    def following(self, courses: IntArray) -> tuple[FloatArray, FloatArray]:
        """For each course the time to its next failure, and a share that picks the cause of this one."""
        self._draw(courses[self._used[courses] == _BLOCK])
        found = self._drawn[courses, self._used[courses]]
        self._used[courses] += 1
        return found[:, 0], found[:, 1]

    def block(self, courses: IntArray) -> tuple[FloatArray, FloatArray]:
        """As ``following``, of the next failures of each course together, shape ``(num_courses, num_failures)``."""
        self._draw(courses)
        return self._drawn[courses, :, 0], self._drawn[courses, :, 1]

    def _draw(self, courses: IntArray) -> None:
        for course in courses.tolist():
            generator = self._generators[course]
            self._drawn[course, :, 0] = generator.standard_exponential(_BLOCK)
            self._drawn[course, :, 1] = generator.random(_BLOCK)
            self._used[course] = 0


class _State:
    """Where every course of a job stands; methods take the indices of those that they move."""

    def __init__(self, job: Job, luck: _Luck, rate_factors: FloatArray) -> None:
        count = len(rate_factors)
        self.now_s = np.zeros(count)
        self.spent_s = {activity: np.zeros(count) for activity in Activity}
        self.stops = np.zeros((len(job.causes), count), dtype=np.int64)
        self._job, self._luck = job, luck
        self._mtbf_s = job.mtbf_s / rate_factors
        rates = np.array([1 / cause.mtbf_device_s for cause in job.causes])
        self._shares = np.cumsum(rates) / rates.sum() if job.causes else rates
        self._takes_node = np.array([cause.takes_node for cause in job.causes], dtype=np.int64)
        self._until_failure_s = luck.first * self._mtbf_s
        self._cause = np.zeros(count, dtype=np.int64)
        """Of the last failure."""
        self._saved_s = np.zeros(count)
        self._missing = np.zeros(count, dtype=np.int64)
        """Nodes that failed and whose failure is not detected yet."""
        self._replaced = np.zeros(count, dtype=np.int64)
        """Nodes whose replacement has begun."""
        self._back_s = np.empty((count, 0))
        """When the last of them come back, in a ring: column ``number % columns``."""

    def run(self) -> None:
        """Bring all courses to their ends."""
        if self._job.spares is None:
            self._run_from_failure_to_failure()
            return
        while (courses := np.flatnonzero(self._left_s(slice(None)))).size:
            struck = self._train(courses)
            while struck.size:
                struck = self._recover(struck)

    def _run_from_failure_to_failure(self) -> None:
        """What a job does between two failures does not depend on those before, but for the work that is left."""
        recovery_s = self._job.detection_s, self._job.restart_s
        for first in range(0, len(self.now_s), _TOGETHER):
            courses = np.arange(first, min(first + _TOGETHER, len(self.now_s)))
            until_s = self._until_failure_s[courses, np.newaxis]
            courses = courses[self._last(courses, until_s, 0.0, 0.0)]
            while courses.size:
                times, shares = self._luck.block(courses)
                gaps_s = times * self._mtbf_s[courses, np.newaxis]
                courses = courses[self._last(courses, gaps_s, *recovery_s, shares)]
        self.now_s = sum(self.spent_s.values(), start=self.now_s)

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
        left_s = self._left_s(courses)[:, np.newaxis]
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
        for activity, time_s in {
            Activity.DETECTION: np.minimum(passed_s, detection_s),
            Activity.RESTART: np.clip(passed_s - detection_s, 0.0, restart_s),
            Activity.WORK: np.where(is_last, left_s, complete * interval_s),
            Activity.CHECKPOINT: np.where(is_last, whole_s - left_s, complete * write_s),
            Activity.LOST: np.where(is_last, 0.0, training_s - complete * (interval_s + write_s)),
        }.items():
            self.spent_s[activity][courses] += time_s.sum(axis=1, where=is_struck | is_last)
        self._saved_s[courses] = self.spent_s[Activity.WORK][courses]
        if shares is not None:
            causes = np.searchsorted(self._shares, shares, side="right")
            for cause, stops in enumerate(self.stops):
                stops[courses] += ((causes == cause) & (number <= last)).sum(axis=1)
        return lasts

    def _left_s(self, courses: IntArray | slice) -> FloatArray:
        left_s = self._job.work_s - self._saved_s[courses]
        return np.where(left_s > _ROUNDING * self._job.checkpoint_interval_s, left_s, 0.0)

    def _train(self, courses: IntArray) -> IntArray:
        """Train to the end; courses that fail before."""
        interval_s, write_s = self._job.checkpoint_interval_s, self._job.checkpoint_write_s
        left_s = self._left_s(courses)
        duration_s = left_s + np.ceil(left_s / interval_s - _ROUNDING) * write_s
        start_s = self.now_s[courses]
        is_struck = self._expose(courses, duration_s)
        lasted_s = self.now_s[courses] - start_s
        complete = np.floor(lasted_s / (interval_s + write_s))
        kept_s = np.where(is_struck, complete * interval_s, left_s)
        lost_s = np.where(is_struck, lasted_s - complete * (interval_s + write_s), 0.0)
        self._saved_s[courses] += kept_s
        self.spent_s[Activity.WORK][courses] += kept_s
        self.spent_s[Activity.LOST][courses] += lost_s
        self.spent_s[Activity.CHECKPOINT][courses] += lasted_s - kept_s - lost_s
        return courses[is_struck]

    def _recover(self, courses: IntArray) -> IntArray:
        """From a failure to the next step; courses that fail again before."""
        causes = self._cause[courses]
        self.stops[causes, courses] += 1
        self._missing[courses] += self._takes_node[causes]
        is_struck = self._expose_in(Activity.DETECTION, courses, self._job.detection_s)
        struck, found = courses[is_struck], courses[~is_struck]
        if self._job.spares is not None:
            self._wait_for_nodes(found[self._missing[found] > 0], self._job.spares)
        self._missing[found] = 0
        is_struck = self._expose_in(Activity.RESTART, found, self._job.restart_s)
        return np.concatenate([struck, found[is_struck]])

    def _wait_for_nodes(self, courses: IntArray, spares: int) -> None:
        """Replace the missing nodes, and wait until there are as many spares.

        Nodes come back in the order in which they failed. A job that has taken n nodes from s spares
        goes on once n - s are back.
        """
        if not courses.size:
            return
        missing, first = self._missing[courses], self._replaced[courses]
        last = first + missing
        self._replaced[courses] = last
        columns = self._back_s.shape[1]
        if last.max() > columns and columns <= spares:
            columns = min(max(2 * columns, int(last.max())), spares + 1)
            more = np.zeros((len(self.now_s), columns - self._back_s.shape[1]))
            self._back_s = np.concatenate([self._back_s, more], axis=1)
        now_s = self.now_s[courses]
        for number in range(missing.max()):
            more_missing = missing > number
            place = (first[more_missing] + number) % columns
            self._back_s[courses[more_missing], place] = (
                now_s[more_missing] + self._job.replacement_s
            )
        awaited = last - spares - 1
        back_s = self._back_s[courses, awaited % columns]
        ready_s = np.where(awaited >= 0, np.maximum(now_s, back_s), now_s)
        self.now_s[courses] = ready_s
        self.spent_s[Activity.WAITING][courses] += ready_s - now_s

    def _expose_in(self, activity: Activity, courses: IntArray, duration_s: Seconds) -> BoolArray:
        start_s = self.now_s[courses]
        is_struck = self._expose(courses, duration_s)
        self.spent_s[activity][courses] += self.now_s[courses] - start_s
        return is_struck

    def _expose(self, courses: IntArray, duration_s: FloatArray | Seconds) -> BoolArray:
        """Let time pass, until a failure where one comes first."""
        until_s = self._until_failure_s[courses]
        is_struck = until_s < duration_s
        self.now_s[courses] += np.where(is_struck, until_s, duration_s)
        self._until_failure_s[courses] = until_s - duration_s
        struck = courses[is_struck]
        if struck.size:
            times, shares = self._luck.following(struck)
            self._until_failure_s[struck] = times * self._mtbf_s[struck]
            self._cause[struck] = np.searchsorted(self._shares, shares, side="right")
        return is_struck
