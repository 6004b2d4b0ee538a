"""Pipelines whose middle micro-batches are counted, against the same programs in full."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import algebra
from perfmodel.layout import Layout, Schedule
from perfmodel.statistics import FloatArray
from perfmodel.step import Cause, Operation, StepProgram, Stream, Trace, time_by_cause
from perfmodel.step.compile import compile_layout

#: Of any work that it has none, some, or as much as others have.
seconds = st.just(0.0) | st.floats(1e-6, 1.0) | st.sampled_from([0.1, 0.2, 0.5])
layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 4]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([2, 3, 5, 8]),
    zero=st.sampled_from([0, 1]),
    schedule=st.sampled_from(Schedule),
    accumulation=st.integers(1, 150),
)


def traces(layout: Layout, times: dict[Cause, float], layers: int = 40) -> tuple[Trace, Trace]:
    """By counting where that is possible, and in full."""

    def step(count: int) -> StepProgram:
        return compile_layout(replace(layout, accumulation=count), layers=layers)

    def durations_s(program: StepProgram) -> FloatArray:
        return np.array([o.share * times.get(o.cause, 0.0) for o in program.operations])

    counted = algebra.steady_trace(
        step, durations_s, micro_batches=layout.accumulation, stages=layout.pp
    )
    program = step(layout.accumulation)
    return counted, algebra.trace(program, durations_s(program))


@given(
    layout=layouts,
    times=st.fixed_dictionaries(dict.fromkeys(Cause, seconds)),
    layers=st.integers(8, 40),
)
def test_counting_is_the_program_in_full(
    layout: Layout, times: dict[Cause, float], layers: int
) -> None:
    """Uneven stages, bound by compute or by sends: the step, and what it is made of."""
    counted, whole = traces(layout, times, layers)
    assert counted.step_s == pytest.approx(whole.step_s, rel=1e-7, abs=1e-12)
    assert sum(time_by_cause(counted).values()) == pytest.approx(whole.step_s, rel=1e-7, abs=1e-12)


def test_a_long_pipeline_is_counted_and_its_parts_add_up() -> None:
    """Work of the last stage binds; 40 of 100 micro-batches are passes of their own at most."""
    layout = Layout(dp=4, tp=2, pp=4, accumulation=100)
    times = {Cause.FORWARD: 1.0, Cause.BACKWARD: 2.0, Cause.HEAD: 0.3, Cause.P2P: 0.05}
    counted, whole = traces(layout, times)
    assert len(counted.program.operations) < 0.4 * len(whole.program.operations)
    assert set(counted.skipped_s.values()) != {0.0}
    assert time_by_cause(counted) == pytest.approx(time_by_cause(whole))


@pytest.mark.parametrize("beat_s", [1.0, 1e-6])
@pytest.mark.parametrize(("late", "keeps"), [(6, True), (7, False), (12, False), (13, True)])
def test_a_beat_holds_for_as_many_periods_as_streams_are_ahead_and_two_more(
    late: int, beat_s: float, *, keeps: bool
) -> None:
    """18 passes of two stages: what ends from the 6th to the 12th must end one beat after what is before it."""

    def passes(count: int) -> Trace:
        one = Operation(name="pass", stream=Stream.COMPUTE, cause=Cause.FORWARD)
        ends_s = beat_s * (np.arange(count) + 0.5 * (np.arange(count) >= late))
        return Trace(
            program=StepProgram((one,) * count),
            start_s=ends_s[np.newaxis],
            end_s=ends_s[np.newaxis],
        )

    assert algebra._keeps_beat(passes(18), passes(19), stages=2) is keeps
