"""Steps of layouts where the host waits for collectives, as with gloo: sums by hand, laws."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.layout_time import layout_durations
from perfmodel.engine.algebra import step_times
from perfmodel.engine.simulate import simulate
from perfmodel.layout import Layout, Schedule
from perfmodel.step import Cause, equal_pieces
from perfmodel.step.compile import BUCKETS, compile_divided

seconds = st.floats(1e-3, 10.0)


def step_s(
    layout: Layout, times: Mapping[str, float], *, layers: int, blocking: bool = False
) -> float:
    table = {cause: np.array(times.get(cause.value, 0.0)) for cause in Cause}
    pieces = equal_pieces(layout, layers, most=BUCKETS)
    program = compile_divided(layout, pieces, asynchronous=False, blocking=blocking)
    durations_s = layout_durations(program, table)
    simulated_s = simulate(program, durations_s[np.newaxis]).step_s
    assert step_times(program, durations_s) == pytest.approx(simulated_s, rel=1e-9)
    return simulated_s


def waiting_s(layout: Layout, times: Mapping[str, float], *, layers: int = 4) -> float:
    return step_s(layout, times, layers=layers, blocking=True)


@pytest.mark.parametrize(("zero", "expected_s"), [(3, 22), (2, 18.5)])
def test_sharded_layers_do_one_thing_after_another(zero: int, expected_s: float) -> None:
    """Gather 2, forward 4, gather 2, backward 8, reduce-scatter 6; kept whole, they are gathered once."""
    times = {"forward": 4.0, "backward": 8.0, "all_gather": 2.0, "reduce_scatter": 6.0}
    assert waiting_s(Layout(dp=2, zero=zero), times) == pytest.approx(expected_s)


def test_opposite_sends_of_two_stages_take_turns() -> None:
    """1F1B, 2 micro-batches: F0 1, over 2; F0' 1, B0' 2 beside F1 1; both over 4; F1' 1, B1' 2, over 2, B1 2.

    The first stage's B0 takes 2 after the exchange at 10, beside F1' and B1' that end at 13.
    """
    found = waiting_s(Layout(pp=2, accumulation=2), {"forward": 1.0, "backward": 2.0, "p2p": 2.0})
    assert found == pytest.approx(1 + 2 + 3 + 4 + 3 + 2 + 2)


def test_a_stage_that_sends_announces_late_what_it_can_receive() -> None:
    """GPipe, 3 stages, 2 micro-batches; the middle one announces once forward and once backward.

    Forward 1, over 2, backward 2: F0 at 0, 3, 6; F1 fetched at 4, done at 7; B0 at 10, 14, 18; B1 fetched at
    16, at 18 and 22, until 24.
    """
    layout = Layout(pp=3, accumulation=2, schedule=Schedule.GPIPE)
    times = {"forward": 1.0, "backward": 2.0, "p2p": 2.0}
    assert waiting_s(layout, times, layers=3) == pytest.approx(24)


def times_of(*causes: str) -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries(dict.fromkeys(causes, seconds))


@given(
    stages=st.integers(2, 5),
    rounds=st.integers(1, 8),
    schedule=st.sampled_from(Schedule),
    times=times_of("forward", "backward", "p2p"),
)
def test_waiting_never_makes_a_pipeline_faster(
    stages: int, rounds: int, schedule: Schedule, times: dict[str, float]
) -> None:
    layout = Layout(pp=stages, accumulation=rounds, schedule=schedule)
    waiting = waiting_s(layout, times, layers=stages)
    assert waiting >= step_s(layout, times, layers=stages) * (1 - 1e-9)
    free = {**times, "p2p": 0.0}
    streams = step_s(layout, free, layers=stages)
    assert waiting_s(layout, free, layers=stages) == pytest.approx(streams)


@given(
    zero=st.sampled_from([2, 3]),
    layers=st.integers(1, 8),
    times=times_of("forward", "backward", "all_gather", "reduce_scatter"),
)
def test_waiting_never_makes_sharding_faster_nor_longer_than_one_thing_after_another(
    zero: int, layers: int, times: dict[str, float]
) -> None:
    layout = Layout(dp=4, zero=zero)
    streams, waiting = (step(layout, times, layers=layers) for step in (step_s, waiting_s))
    whole_s = sum(times.values()) + (times["all_gather"] if zero == 3 else 0.0)
    assert streams <= waiting * (1 + 1e-9)
    assert waiting <= whole_s * (1 + 1e-9)
    if zero == 3:
        assert waiting == pytest.approx(whole_s)
