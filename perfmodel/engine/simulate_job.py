"""Weeks of a training job in simulated time with SimPy: checkpoints, failures, spares, maintenance."""

import enum
import math
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from simpy import Container, Environment, Event

from perfmodel.checks import positive
from perfmodel.engine.job import FailureCause, Job
from perfmodel.units import Seconds

#: A remainder of work below this share of an interval is rounding, not another segment.
_ROUNDING = 1e-9

_Process: TypeAlias = Generator[Event, None, FailureCause | None]


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
    MAINTENANCE = "maintenance"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One possible course of a job."""

    elapsed_s: Seconds
    """From the start of the job to the end of its last checkpoint. [s]"""
    spent_s: Mapping[Activity, Seconds]
    """Sums to ``elapsed_s``. [s]"""
    stops: Mapping[str, int]
    """Failures by cause; those that strike while the job recovers count too."""
    planned_stops: int

    @property
    def effective_fraction(self) -> float:
        """Training that was kept, over all time."""
        return self.spent_s[Activity.WORK] / self.elapsed_s

    @property
    def unplanned_stops(self) -> int:
        """Failures of all causes."""
        return sum(self.stops.values())


def simulate_job(job: Job, *, seed: int | list[int], rate_factor: float = 1.0) -> JobRun:
    """Simulate one course of a job.

    Failures come at random (exponential), at any time but while the job waits for a node or is under
    maintenance: what stands idle does not fail. A failure costs what was done since the last
    complete checkpoint; then detection, a node from the spares if the cause takes one, and restart
    follow, and a failure in between starts them over. Failed nodes are replaced side by side.
    Between two stops nothing is random, so that the checkpoints between them are counted, not
    simulated one by one.

    ``seed``: same seed, same course. Courses of jobs that differ in one number share their luck.
    ``rate_factor``: by how much failures are more frequent than the job says; finite, > 0.
    """
    positive("rate_factor", rate_factor)
    env = Environment()
    course = _Course(env, job, np.random.default_rng(seed), rate_factor)
    env.run(env.process(course.run()))
    return JobRun(
        elapsed_s=env.now,
        spent_s=dict(course.spent_s),
        stops=dict(course.stops),
        planned_stops=course.planned_stops,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """What the job would do until it ends or is stopped as planned, if nothing failed."""

    duration_s: Seconds
    work_s: Seconds


class _Course:
    """The state of one job while it runs."""

    def __init__(
        self, env: Environment, job: Job, rng: np.random.Generator, rate_factor: float
    ) -> None:
        self.spent_s = dict.fromkeys(Activity, 0.0)
        self.stops: Counter[str] = Counter({cause.name: 0 for cause in job.causes})
        self.planned_stops = 0
        self._env = env
        self._job = job
        self._rng = rng
        self._mtbf_s = job.mtbf_s / rate_factor
        rates = np.array([1 / cause.mtbf_device_s for cause in job.causes])
        self._shares = np.cumsum(rates) / rates.sum() if job.causes else rates
        self._until_failure_s = self._draw_time_to_failure_s()
        self._spares = Container(env, init=job.spares or 0)
        self._missing_nodes = 0
        self._saved_s = 0.0
        self._planned_at_s = job.maintenance_every_s or math.inf

    def run(self) -> _Process:
        while self._left_s > 0:
            if self._env.now >= self._planned_at_s:
                cause = yield from self._maintain()
            else:
                cause = yield from self._train()
            while cause is not None:
                cause = yield from self._recover(cause)
        return None

    @property
    def _left_s(self) -> Seconds:
        left_s = self._job.work_s - self._saved_s
        return left_s if left_s > _ROUNDING * self._job.checkpoint_interval_s else 0.0

    def _train(self) -> _Process:
        stretch = self._next_stretch()
        start_s = self._env.now
        cause = yield from self._exposed(stretch.duration_s)
        lasted_s = self._env.now - start_s
        kept_s, lost_s = stretch.work_s, 0.0
        if cause is not None:
            cycle_s = self._job.checkpoint_interval_s + self._job.checkpoint_write_s
            complete = math.floor(lasted_s / cycle_s)
            kept_s = complete * self._job.checkpoint_interval_s
            lost_s = lasted_s - complete * cycle_s
        self._saved_s += kept_s
        self.spent_s[Activity.WORK] += kept_s
        self.spent_s[Activity.LOST] += lost_s
        self.spent_s[Activity.CHECKPOINT] += lasted_s - kept_s - lost_s
        return cause

    def _next_stretch(self) -> _Stretch:
        interval_s, write_s = self._job.checkpoint_interval_s, self._job.checkpoint_write_s
        writes = math.ceil(self._left_s / interval_s - _ROUNDING)
        whole_s = self._left_s + writes * write_s
        planned_s = self._planned_at_s - self._env.now
        if planned_s + write_s >= whole_s:
            return _Stretch(duration_s=whole_s, work_s=self._left_s)
        complete, rest_s = divmod(planned_s, interval_s + write_s)
        # the checkpoint before a planned stop is written at once, or is being written already
        work_s = min(rest_s, interval_s)
        return _Stretch(
            duration_s=complete * (interval_s + write_s) + work_s + write_s,
            work_s=complete * interval_s + work_s,
        )

    def _maintain(self) -> _Process:
        every_s = self._job.maintenance_every_s
        assert every_s is not None
        self.planned_stops += 1
        yield from self._idle(self._job.maintenance_s, Activity.MAINTENANCE)
        periods = math.floor(self._env.now / every_s) + 1
        # Rounded down, the quotient may name the stop that has just ended.
        self._planned_at_s = every_s * (periods + (every_s * periods <= self._env.now))
        return (yield from self._exposed_in(Activity.RESTART, self._job.restart_s))

    def _recover(self, cause: FailureCause) -> _Process:
        self.stops[cause.name] += 1
        self._missing_nodes += cause.takes_node
        struck_by = yield from self._exposed_in(Activity.DETECTION, self._job.detection_s)
        if struck_by is not None:
            return struck_by
        if self._missing_nodes and self._job.spares is not None:
            for _ in range(self._missing_nodes):
                self._env.process(self._replace())
            start_s = self._env.now
            yield self._spares.get(self._missing_nodes)
            self.spent_s[Activity.WAITING] += self._env.now - start_s
        self._missing_nodes = 0
        return (yield from self._exposed_in(Activity.RESTART, self._job.restart_s))

    def _replace(self) -> _Process:
        yield self._env.timeout(self._job.replacement_s)
        yield self._spares.put(1)
        return None

    def _idle(self, duration_s: Seconds, activity: Activity) -> _Process:
        yield self._env.timeout(duration_s)
        self.spent_s[activity] += duration_s
        return None

    def _exposed_in(self, activity: Activity, duration_s: Seconds) -> _Process:
        start_s = self._env.now
        cause = yield from self._exposed(duration_s)
        self.spent_s[activity] += self._env.now - start_s
        return cause

    def _exposed(self, duration_s: Seconds) -> _Process:
        """Let time pass; the cause, if a failure came first."""
        if self._until_failure_s >= duration_s:
            self._until_failure_s -= duration_s
            yield self._env.timeout(duration_s)
            return None
        yield self._env.timeout(self._until_failure_s)
        self._until_failure_s = self._draw_time_to_failure_s()
        return self._job.causes[int(np.searchsorted(self._shares, self._rng.random(), "right"))]

    def _draw_time_to_failure_s(self) -> Seconds:
        # drawn even if nothing ever fails, so that the random numbers stay in step
        return float(self._rng.standard_exponential()) * self._mtbf_s
