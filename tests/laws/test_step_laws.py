"""What no step may do, whatever the program; simulation and algebra, written apart, say the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import algebra
from perfmodel.engine.algebra import end_times_with_interference, step_times
from perfmodel.engine.simulate import simulate
from perfmodel.statistics import FloatArray
from perfmodel.step import Interference, Lane, StepProgram, Stream
from tests.laws.strategies import durations, interferences, programs, speeds

TOLERANCE = 1 + 1e-9


@given(data=st.data(), program=programs(), interference=interferences)
def test_a_step_is_no_shorter_than_the_work_of_any_stream(
    data: st.DataObject, program: StepProgram, interference: Interference
) -> None:
    durations_s = data.draw(durations(program))
    step_s = simulate(program, durations_s, interference=interference).step_s
    for lane in program.lanes:
        queued = [i for i, o in enumerate(program.operations) if (o.stage, o.stream) == lane]
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


num_ranks_above_one = st.integers(2, 4)


def assert_same(actual: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=0.0)


def ends_of_all_ranks(program: StepProgram, durations_s: FloatArray) -> FloatArray:
    """A third opinion, as plain as possible: operation by operation, then rank by rank."""
    ends_s = np.zeros_like(durations_s)
    latest: dict[Lane, int] = {}
    for position, operation in enumerate(program.operations):
        awaited = list(operation.after)
        lane = operation.stage, operation.stream
        if lane in latest:
            awaited.append(latest[lane])
        latest[lane] = position
        ready_s = [max([0.0, *rank_s[awaited]]) for rank_s in ends_s]
        if operation.stream is Stream.COMM:
            ready_s = [max(ready_s)] * len(ready_s)
        ends_s[:, position] = ready_s + durations_s[:, position]
    return ends_s


@given(data=st.data(), program=programs())
def test_simulation_is_max_plus_where_nothing_interferes(
    data: st.DataObject, program: StepProgram
) -> None:
    durations_s = data.draw(durations(program))
    trace = simulate(program, durations_s)
    assert_same(np.array(trace.step_s), step_times(program, durations_s[0]))
    plain = algebra.trace(program, durations_s[0])
    assert_same(plain.end_s, trace.end_s)
    np.testing.assert_allclose(plain.start_s, trace.start_s, rtol=1e-9, atol=1e-12)


@given(data=st.data(), program=programs(), num_ranks=num_ranks_above_one)
def test_simulation_of_different_ranks_is_max_plus_over_all_of_them(
    data: st.DataObject, program: StepProgram, num_ranks: int
) -> None:
    """So a longer operation never shortens a step, and a rank that is slower in everything stands for all."""
    durations_s = data.draw(durations(program, num_ranks=num_ranks))
    trace = simulate(program, durations_s)
    ends_s = ends_of_all_ranks(program, durations_s)
    assert_same(trace.end_s, ends_s)
    assert_same(np.array(trace.step_s), ends_s.max())
    np.testing.assert_allclose(trace.start_s, ends_s - durations_s, rtol=1e-9, atol=1e-12)


@given(data=st.data(), program=programs(), num_draws=st.integers(1, 5))
def test_each_draw_of_the_fluid_algebra_is_a_simulation_of_its_own(
    data: st.DataObject, program: StepProgram, num_draws: int
) -> None:
    draws = [data.draw(durations(program))[0] for _ in range(num_draws)]
    compute_speeds = [data.draw(speeds) for _ in range(num_draws)]
    comm_speeds = [data.draw(speeds) for _ in range(num_draws)]
    ends_s = end_times_with_interference(
        program, np.stack(draws, axis=1), compute_speed=compute_speeds, comm_speed=comm_speeds
    )
    for i, (draw, compute, comm) in enumerate(zip(draws, compute_speeds, comm_speeds, strict=True)):
        interference = Interference(compute_speed=compute, comm_speed=comm)
        assert_same(simulate(program, draw[None], interference=interference).end_s[0], ends_s[:, i])


@given(
    data=st.data(),
    program=programs(),
    num_ranks=num_ranks_above_one,
    interference=st.one_of(st.just(Interference()), interferences),
)
def test_identical_ranks_do_what_one_of_them_does(
    data: st.DataObject, program: StepProgram, num_ranks: int, interference: Interference
) -> None:
    folded_s = data.draw(durations(program))
    folded = simulate(program, folded_s, interference=interference)
    expanded = simulate(program, np.repeat(folded_s, num_ranks, axis=0), interference=interference)
    assert_same(expanded.start_s, np.repeat(folded.start_s, num_ranks, axis=0))
    assert_same(expanded.end_s, np.repeat(folded.end_s, num_ranks, axis=0))
