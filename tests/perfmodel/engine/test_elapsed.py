"""Mean and spread of the end of a job, against the closed form and the simulation."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine.job import FailureCause, Job, elapsed_moments, expected_elapsed_s
from perfmodel.engine.simulate_job import simulate_job

HOUR_S = 3600.0
JOB = Job(
    devices=100,
    work_s=200 * HOUR_S,
    checkpoint_interval_s=2 * HOUR_S,
    checkpoint_write_s=120.0,
    causes=(FailureCause(name="any", mtbf_device_s=2000 * HOUR_S),),
    detection_s=300.0,
    restart_s=900.0,
)


def moments(job: Job) -> tuple[float, float]:
    mean, spread = elapsed_moments(
        [job.work_s],
        interval_s=job.checkpoint_interval_s,
        write_s=job.checkpoint_write_s,
        mtbf_s=job.mtbf_s,
        recovery_s=job.recovery_s,
    )
    return float(mean[0]), float(spread[0])


@given(
    work_hours=st.floats(0.5, 5000),
    interval_hours=st.floats(0.1, 50),
    mtbf_hours=st.floats(1, 1e9),
    restart_s=st.floats(0, 3600),
)
def test_the_mean_is_dalys(
    work_hours: float, interval_hours: float, mtbf_hours: float, restart_s: float
) -> None:
    job = dataclasses.replace(
        JOB,
        devices=1,
        work_s=work_hours * HOUR_S,
        checkpoint_interval_s=interval_hours * HOUR_S,
        causes=(FailureCause(name="any", mtbf_device_s=mtbf_hours * HOUR_S),),
        restart_s=restart_s,
    )
    assume_s = expected_elapsed_s(job)
    if np.isfinite(assume_s) and interval_hours < 20 * mtbf_hours:
        mean_s, spread_s = moments(job)
        assert mean_s == pytest.approx(assume_s, rel=1e-6)
        assert spread_s >= 0


def test_mean_and_spread_are_those_of_simulated_courses() -> None:
    """600 courses: the standard error of a spread is 3 %."""
    ends_s = np.array([simulate_job(JOB, seed=[7, k]).elapsed_s for k in range(600)])
    mean_s, spread_s = moments(JOB)
    assert ends_s.mean() == pytest.approx(mean_s, rel=0.005)
    assert ends_s.std() == pytest.approx(spread_s, rel=0.12)
    deadline_s = mean_s + spread_s
    assert (ends_s <= deadline_s).mean() == pytest.approx(0.841, abs=0.05)


def test_hardly_any_failure_hardly_any_spread() -> None:
    """Both forms of the truncated exponential meet; 1e-5 is where one takes over."""
    found = [
        elapsed_moments(1e4, interval_s=1e3, write_s=0.0, mtbf_s=1e3 / share, recovery_s=10.0)
        for share in (0.99e-5, 1.01e-5)
    ]
    (mean, spread), (other_mean, other_spread) = found
    assert float(mean) == pytest.approx(float(other_mean), rel=1e-6)
    assert float(spread) == pytest.approx(float(other_spread), rel=0.02)
