"""What no step may do, whatever the program."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine.algebra import step_times
from perfmodel.engine.simulate import simulate
from perfmodel.step import Interference, StepProgram
from tests.laws.strategies import durations, interferences, programs

TOLERANCE = 1 + 1e-9


@given(data=st.data(), program=programs(), interference=interferences)
def test_a_step_is_no_shorter_than_the_work_of_any_stream(
    data: st.DataObject, program: StepProgram, interference: Interference
) -> None:
    durations_s = data.draw(durations(program))
    step_s = simulate(program, durations_s, interference=interference).step_s
    for lane in program.lanes:
        queued = [i for i, operation in enumerate(program.operations) if operation.lane == lane]
        assert durations_s[0, queued].sum() <= step_s * TOLERANCE


@given(data=st.data(), program=programs(), compute_speed=st.floats(0.1, 0.9))
def test_overlap_never_loses_where_the_speeds_add_up_to_one(
    data: st.DataObject, program: StepProgram, compute_speed: float
) -> None:
    """Something is always in progress, and all together at a speed of at least 1."""
    durations_s = data.draw(durations(program))
    interference = Interference(compute_speed=compute_speed, comm_speed=1.0 - compute_speed)
    step_s = simulate(program, durations_s, interference=interference).step_s
    assert step_s <= durations_s.sum() * TOLERANCE


@given(data=st.data(), program=programs(), longer_s=st.floats(0.0, 1.0))
def test_a_longer_operation_never_shortens_the_step(
    data: st.DataObject, program: StepProgram, longer_s: float
) -> None:
    durations_s = data.draw(durations(program, num_ranks=2))
    longer = durations_s.copy()
    longer[:, data.draw(st.integers(0, len(program.operations) - 1))] += longer_s
    assert simulate(program, longer).step_s >= simulate(program, durations_s).step_s
    before_s, after_s = step_times(program, np.stack([durations_s[0], longer[0]], axis=1))
    assert after_s >= before_s


@given(data=st.data(), program=programs(), interference=interferences, scale=st.floats(1e-3, 1e3))
def test_scaling_all_durations_scales_the_step(
    data: st.DataObject, program: StepProgram, interference: Interference, scale: float
) -> None:
    durations_s = data.draw(durations(program))
    step_s = simulate(program, durations_s, interference=interference).step_s
    scaled_s = simulate(program, durations_s * scale, interference=interference).step_s
    assert scaled_s == pytest.approx(step_s * scale, rel=1e-9)


@given(data=st.data(), program=programs(), interference=interferences)
def test_interference_never_ends_an_operation_earlier(
    data: st.DataObject, program: StepProgram, interference: Interference
) -> None:
    durations_s = data.draw(durations(program, num_ranks=2))
    alone_s = simulate(program, durations_s).end_s
    together_s = simulate(program, durations_s, interference=interference).end_s
    assert np.all(together_s * TOLERANCE >= alone_s)
