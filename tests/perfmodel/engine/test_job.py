"""The course of a job, by hand and against closed forms; many courses of one job, and published jobs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.engine.job import (
    Activity,
    Courses,
    FailureCause,
    Job,
    best_interval_s,
    elapsed_moments,
    expected_elapsed_s,
    simulate_job,
)
from perfmodel.statistics import FloatArray, IntArray

#: Failures that a test places itself: one device, a mean of one second.
STRUCK = FailureCause(name="struck", mtbf_device_s=1.0)


class Luck:
    """Random numbers that are known beforehand."""

    def __init__(self, times_to_failure_s: Sequence[float]) -> None:
        self._left = list(times_to_failure_s)

    def standard_exponential(self, size: int = 1) -> list[float]:
        taken, self._left = self._left[:size], self._left[size:]
        return [*taken, *[math.inf] * (size - len(taken))]

    def random(self, size: int) -> list[float]:
        return [0.5] * size


def played(job: Job, *times_to_failure_s: float) -> tuple[float, dict[str, float], int]:
    """End, what took time, failures; beside courses that other luck moves at other times."""
    lucks: list[Any] = [Luck(times_to_failure_s), Luck(()), Luck((3.0, 1.0, 4.0))]
    found = simulate_job(job, generators=lucks)
    spent = {activity.value: float(of[0]) for activity, of in found.spent_s.items() if of[0]}
    return float(found.elapsed_s[0]), spent, int(found.unplanned_stops[0])


SHORT = Job(
    devices=1,
    work_s=25.0,
    checkpoint_interval_s=10.0,
    checkpoint_write_s=1.0,
    causes=(STRUCK,),
    detection_s=2.0,
    restart_s=3.0,
)


TAKING = replace(STRUCK, takes_node=True)
WAITING = replace(SHORT, causes=(TAKING,), spares=0, replacement_s=100.0)


@pytest.mark.parametrize(
    ("job", "struck_s", "end_s", "spent", "failures"),
    [
        # At 15: 4 s since the checkpoint at 11 are lost; 2 + 3 s later 15 s of work are left.
        (SHORT, (15.0,), 37.0, {"work": 25.0, "checkpoint": 3.0, "lost": 4.0, "restart": 3.0}, 1),
        # At 10.5, within the first write: everything is lost.
        (SHORT, (10.5,), 10.5 + 5 + 28, {"lost": 10.5}, 1),
        # At 15 and 4 s later, 2 s into the restart: 4 + 5 s until work goes on.
        (SHORT, (15.0, 4.0), 41.0, {"detection": 4.0, "restart": 5.0}, 2),
        # At 5; a node takes 100 s from its detection, unless there is a spare.
        (WAITING, (5.0,), 5 + 2 + 100 + 3 + 28, {"waiting": 100.0}, 1),
        (replace(WAITING, spares=1), (5.0,), 5 + 2 + 3 + 28, {"waiting": None}, 1),
        # Again 6 s later: found at 5 + 6 + 2 = 13, while the first one is back at 5 + 2 + 100 = 107.
        (replace(WAITING, spares=1), (5.0, 6.0), 138.0, {"waiting": 107.0 - 13.0}, 2),
        # And 1 s later while nobody has noticed: both are found at 8 and back at 108, side by side.
        (WAITING, (5.0, 1.0), 108 + 3 + 28, {"waiting": 100.0}, 2),
    ],
)
def test_what_failures_cost(
    job: Job,
    struck_s: tuple[float, ...],
    end_s: float,
    spent: dict[str, float | None],
    failures: int,
) -> None:
    found_s, found, stops = played(job, *struck_s)
    assert (found_s, stops) == (end_s, failures)
    assert {name: found.get(name) for name in spent} == spent
    assert sum(found.values()) == found_s


def courses(job: Job, count: int = 300) -> Courses:
    return simulate_job(job, generators=[np.random.default_rng([7, k]) for k in range(count)])


def mean(values: FloatArray | IntArray) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


ANY = FailureCause(name="any", mtbf_device_s=1e6)
LONG = Job(
    devices=100,
    work_s=1e6,
    checkpoint_interval_s=1300.0,
    checkpoint_write_s=90.0,
    causes=(ANY,),
    detection_s=300.0,
    restart_s=900.0,
)


@pytest.mark.parametrize(("spares", "waiting"), [(0, 2 / 3), (1, 2 / 5), (3, 2 / 21)])
def test_waiting_for_spares_is_erlangs_loss_formula(spares: int, waiting: float) -> None:
    """Two nodes are under replacement on average; Erlang B(2; 1, 2, 4 lines) = 2/3, 2/5, 2/21."""
    taking = replace(ANY, takes_node=True)
    job = replace(LONG, causes=(taking,), detection_s=0.0, spares=spares, replacement_s=2e4)
    runs = courses(job, 100)
    waited = runs.spent_s[Activity.WAITING].sum() / runs.elapsed_s.sum()
    assert waited == pytest.approx(waiting, rel=0.05)


def test_a_course_is_that_of_its_seed_whatever_runs_beside_it() -> None:
    def end_s(*seeds: int) -> list[float]:
        generators = [np.random.default_rng(seed) for seed in seeds]
        ends_s: list[float] = simulate_job(LONG, generators=generators).elapsed_s.tolist()
        return ends_s

    assert end_s(3, 4, 5) == [*end_s(3), *end_s(4), *end_s(5)]
    assert end_s(3) != end_s(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "devices must be >= 1"),
        ({"work_s": 0.0}, "work_s must be finite and > 0"),
        ({"checkpoint_interval_s": math.inf}, "checkpoint_interval_s must be finite and > 0"),
        ({"restart_s": -1.0}, "restart_s must be finite and >= 0"),
        ({"detection_s": math.nan}, "detection_s must be finite and >= 0"),
        ({"spares": -1}, "spares must be >= 0"),
        ({"causes": (ANY, ANY)}, "causes must have different names"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LONG, **change)  # type: ignore[arg-type]


JOB = Job(
    devices=1,
    work_s=1000.0,
    checkpoint_interval_s=100.0,
    checkpoint_write_s=10.0,
    causes=(FailureCause(name="any", mtbf_device_s=1000.0),),
)


def test_best_intervals_by_hand() -> None:
    """To first order sqrt(2 * 0.003 * 86,400) = 22.77 s; who never fails need not write."""
    assert best_interval_s(write_s=1.0, mtbf_s=math.inf) == math.inf
    assert best_interval_s(write_s=0.0, mtbf_s=math.inf) == 0.0
    assert best_interval_s(write_s=0.003, mtbf_s=86_400) == pytest.approx(22.768, rel=3e-4)


def test_the_mean_end_by_hand() -> None:
    """Ten segments of 110 s, a mean of 1,000 s: 10 * 1000 (exp(0.11) - 1) = 1162.78 s.

    A last segment may be short: 50 s of work are one of 60 s.
    """
    assert expected_elapsed_s(JOB) == pytest.approx(1162.78, abs=0.01)
    slow = replace(JOB, detection_s=40.0, restart_s=60.0)
    assert expected_elapsed_s(slow) == pytest.approx(1162.78 * math.exp(0.1), abs=0.02)
    short = replace(JOB, work_s=50.0)
    assert expected_elapsed_s(short) == pytest.approx(1000 * math.expm1(0.06))
    two = replace(JOB, work_s=150.0)
    assert expected_elapsed_s(two) == pytest.approx(1000 * (math.expm1(0.06) + math.expm1(0.11)))


def moments(job: Job) -> tuple[float, float]:
    mean, spread = elapsed_moments(
        [job.work_s],
        interval_s=job.checkpoint_interval_s,
        write_s=job.checkpoint_write_s,
        mtbf_s=job.mtbf_s,
        recovery_s=job.recovery_s,
    )
    return float(mean[0]), float(spread[0])


def test_mean_and_spread_are_those_of_simulated_courses() -> None:
    """600 courses: the standard error of a spread is 3 %."""
    generators = [np.random.default_rng([7, k]) for k in range(600)]
    ends_s = simulate_job(LONG, generators=generators).elapsed_s
    mean_s, spread_s = moments(LONG)
    assert ends_s.mean() == pytest.approx(mean_s, rel=0.005)
    assert ends_s.std() == pytest.approx(spread_s, rel=0.12)
    deadline_s = mean_s + spread_s
    assert (ends_s <= deadline_s).mean() == pytest.approx(0.841, abs=0.05)


def test_recoveries_that_fail_as_well_spread_the_end() -> None:
    """One segment, failures and recoveries as long as it: 200,000 courses, whose spread has an error of 0.5 %."""
    rng, mtbf_s = np.random.default_rng(5), 1e3

    def until_passed(courses: int, recovery_s: float) -> FloatArray:
        elapsed_s, left = np.zeros(courses), np.arange(courses)
        while left.size:
            gap_s = rng.exponential(mtbf_s, left.size)
            elapsed_s[left] += np.minimum(gap_s, 1e3)
            left = left[gap_s < 1e3]
            if recovery_s and left.size:
                elapsed_s[left] += until_passed(left.size, 0.0)
        return elapsed_s

    found_s = until_passed(200_000, 1e3)
    mean, spread = elapsed_moments(1e3, interval_s=1e3, write_s=0.0, mtbf_s=mtbf_s, recovery_s=1e3)
    assert (mean, spread) == pytest.approx((found_s.mean(), found_s.std()), rel=0.02)


def test_hardly_any_failure_hardly_any_spread() -> None:
    """Both forms of the truncated exponential meet; 1e-5 is where one takes over."""
    found = [
        elapsed_moments(1e4, interval_s=1e3, write_s=0.0, mtbf_s=1e3 / share, recovery_s=10.0)
        for share in (0.99e-5, 1.01e-5)
    ]
    (mean, spread), (other_mean, other_spread) = found
    assert float(mean) == pytest.approx(float(other_mean), rel=1e-6)
    assert float(spread) == pytest.approx(float(other_spread), rel=0.02)
