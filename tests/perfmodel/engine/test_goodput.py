"""Closed forms of jobs that fail: best intervals, mean and spread of the end."""

import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.engine.job import (
    FailureCause,
    Job,
    best_interval_s,
    elapsed_moments,
    expected_elapsed_s,
    simulate_job,
)
from perfmodel.statistics import FloatArray

HOUR_S = 3600.0
JOB = Job(
    devices=1,
    work_s=1000.0,
    checkpoint_interval_s=100.0,
    checkpoint_write_s=10.0,
    causes=(FailureCause(name="any", mtbf_device_s=1000.0),),
)
LONG_JOB = Job(
    devices=100,
    work_s=200 * HOUR_S,
    checkpoint_interval_s=2 * HOUR_S,
    checkpoint_write_s=120.0,
    causes=(FailureCause(name="any", mtbf_device_s=2000 * HOUR_S),),
    detection_s=300.0,
    restart_s=900.0,
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
    ends_s = simulate_job(LONG_JOB, generators=generators).elapsed_s
    mean_s, spread_s = moments(LONG_JOB)
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
