"""What holds for every job, whatever its numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine.job import (
    Activity,
    Courses,
    FailureCause,
    Job,
    best_interval_s,
    expected_elapsed_s,
    simulate_job,
)

seconds = st.one_of(st.just(0.0), st.floats(0.1, 100.0))
seeds = st.integers(0, 2**32)


@st.composite
def jobs(draw: st.DrawFn, *, is_failing: bool = True) -> Job:
    """Work of up to 50 intervals; failures are rare enough that every job ends soon."""
    interval_s = draw(st.floats(1.0, 100.0))
    causes = (
        FailureCause(
            name="soft", mtbf_device_s=draw(st.floats(2000.0, 1e5)), takes_node=draw(st.booleans())
        ),
        FailureCause(name="hard", mtbf_device_s=draw(st.floats(2000.0, 1e5)), takes_node=True),
    )
    return Job(
        devices=draw(st.integers(1, 2)),
        work_s=interval_s * draw(st.floats(0.1, 50.0)),
        checkpoint_interval_s=interval_s,
        checkpoint_write_s=draw(seconds),
        causes=causes if is_failing else (),
        detection_s=draw(seconds),
        restart_s=draw(seconds),
        spares=draw(st.one_of(st.none(), st.integers(0, 3))),
        replacement_s=draw(seconds),
    )


def course(job: Job, seed: int, rate_factor: float = 1.0) -> Courses:
    """One course of a job."""
    generators = [np.random.default_rng(seed)]
    return simulate_job(job, generators=generators, rate_factors=rate_factor)


@given(job=jobs(), seed=seeds)
@settings(max_examples=200)
def test_every_second_goes_to_one_activity_and_all_work_gets_done(job: Job, seed: int) -> None:
    run = course(job, seed)
    spent_s = np.concatenate(list(run.spent_s.values()))
    assert spent_s.sum() == pytest.approx(run.elapsed_s, rel=1e-9)
    assert spent_s.min() >= -1e-6
    assert run.spent_s[Activity.WORK] == pytest.approx(job.work_s, rel=1e-6)
    assert 0 < run.effective_fraction <= 1 + 1e-9


@given(job=jobs(is_failing=False), seed=seeds)
def test_without_failures_the_share_of_work_is_interval_over_interval_and_write(
    job: Job, seed: int
) -> None:
    whole = replace(job, work_s=20 * job.checkpoint_interval_s)
    run = course(whole, seed)
    cycle_s = job.checkpoint_interval_s + job.checkpoint_write_s
    assert run.effective_fraction == pytest.approx(job.checkpoint_interval_s / cycle_s)
    assert run.elapsed_s == pytest.approx(expected_elapsed_s(whole))


@given(job=jobs(), factor=st.floats(1.0, 3.0))
def test_more_failures_are_never_better_on_average(job: Job, factor: float) -> None:
    simple = replace(job, spares=None)
    worse = replace(
        simple,
        causes=tuple(
            replace(cause, mtbf_device_s=cause.mtbf_device_s / factor) for cause in simple.causes
        ),
    )
    assert expected_elapsed_s(worse) >= expected_elapsed_s(simple) * (1 - 1e-12)


@given(write_s=st.floats(1e-3, 1e5), mtbf_s=st.floats(1.0, 1e8))
def test_no_interval_beats_the_exact_one(write_s: float, mtbf_s: float) -> None:
    def log_cost(interval_s: float) -> float:
        exponent = (interval_s + write_s) / mtbf_s
        if exponent > 700:
            return math.inf
        return math.log(math.expm1(exponent) / interval_s)

    best_s = best_interval_s(write_s=write_s, mtbf_s=mtbf_s)
    least = log_cost(best_s)
    for other_s in (0.5 * best_s, 0.9 * best_s, 1.1 * best_s, 2 * best_s):
        assert log_cost(other_s) >= least
