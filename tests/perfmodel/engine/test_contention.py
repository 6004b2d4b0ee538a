"""Jobs that share a link: sums by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine.algebra import step_times
from perfmodel.engine.simulate import simulate_jobs, slowdown_by_contention
from perfmodel.step import Cause, Operation, StepProgram, Stream


def step() -> StepProgram:
    """Compute, then a collective."""
    return StepProgram(
        (
            Operation(name="backward", stream=Stream.COMPUTE, cause=Cause.BACKWARD),
            Operation(name="all-reduce", stream=Stream.COMM, cause=Cause.ALL_REDUCE, after=(0,)),
        )
    )


def test_equal_jobs_in_step_halve_the_link() -> None:
    """1 s of compute, 2 s of collective at half speed: 5 s each."""
    steps_s = simulate_jobs([step()] * 2, [[1.0, 2.0]] * 2, starts_s=[0.0, 0.0], num_steps=2)
    np.testing.assert_allclose(steps_s, 5.0)


def test_a_later_job_takes_only_what_overlaps() -> None:
    """The first has the link alone from 1 to 2 s, half of it until 4 s; the other ends at 5 s."""
    steps_s = simulate_jobs([step()] * 2, [[1.0, 2.0]] * 2, starts_s=[0.0, 1.0], num_steps=1)
    np.testing.assert_allclose(steps_s[:, 0], [4.0, 4.0])


def test_background_traffic_is_a_job_without_compute() -> None:
    """A checkpoint of 10 s beside the step: 1 s, then 2 s at half speed."""
    checkpoint = StepProgram(
        (Operation(name="checkpoint", stream=Stream.COMM, cause=Cause.BROADCAST),)
    )
    steps_s = simulate_jobs(
        [step(), checkpoint], [[1.0, 2.0], [10.0]], starts_s=[0.0, 0.0], num_steps=1
    )
    # 1 s alone, 4 s together, then the checkpoint has 10 - 1 - 2 = 7 s left.
    np.testing.assert_allclose(steps_s[:, 0], [5.0, 12.0])


def test_collectives_that_leave_half_of_the_link_do_not_meet() -> None:
    assert slowdown_by_contention(step(), [1.0, 2.0], num_jobs=2, occupied=0.5) == pytest.approx(
        1.0
    )


def test_nobody_waits_without_another_job_or_without_a_link() -> None:
    assert slowdown_by_contention(step(), [1.0, 2.0], num_jobs=1) == 1.0
    alone = StepProgram(step().operations[:1])
    assert slowdown_by_contention(alone, [1.0], num_jobs=3) == 1.0


def test_a_link_that_is_never_idle_is_shared_fairly() -> None:
    """Nine jobs of 1 s of compute and 99 s of collective: one step each in 891 s instead of 100."""
    factor = slowdown_by_contention(step(), [1.0, 99.0], num_jobs=9)
    assert factor == pytest.approx(8.91, rel=0.005)


@given(compute_s=st.floats(0.01, 10), comm_s=st.floats(0.01, 10), num_jobs=st.integers(2, 4))
def test_jobs_slow_each_other_at_most_as_if_they_took_turns(
    compute_s: float, comm_s: float, num_jobs: int
) -> None:
    factor = slowdown_by_contention(step(), [compute_s, comm_s], num_jobs=num_jobs)
    worst = (compute_s + num_jobs * comm_s) / (compute_s + comm_s)
    assert 1 - 1e-9 <= factor <= worst + 1e-9


@given(durations_s=st.lists(st.floats(0, 10), min_size=2, max_size=2))
def test_without_contention_it_is_the_algebra(durations_s: list[float]) -> None:
    found = simulate_jobs([step()], [durations_s], starts_s=[0.0], num_steps=1)
    assert found[0, 0] == pytest.approx(float(step_times(step(), np.array(durations_s))))
