"""Recursions and overlaps that a reader can redo by hand, and arguments that are refused."""

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike

from perfmodel.engine import algebra as max_plus
from perfmodel.engine.algebra import end_times_with_interference, step_times
from tests.perfmodel.engine.programs import OVERLAP, TWO_BUCKETS


def test_a_batch_of_any_shape_is_evaluated_draw_by_draw() -> None:
    durations_s = np.random.default_rng(0).uniform(size=(6, 3, 4))
    step_s = step_times(TWO_BUCKETS, durations_s)
    assert step_s.shape == (3, 4)
    assert step_s[2, 1] == max_plus.trace(TWO_BUCKETS, durations_s[:, 2, 1]).step_s


def test_an_empty_batch_is_an_empty_answer() -> None:
    assert step_times(TWO_BUCKETS, np.ones((6, 0))).shape == (0,)
    none = end_times_with_interference(TWO_BUCKETS, np.ones((6, 0)), compute_speed=1, comm_speed=1)
    assert none.shape == (6, 0)


def test_an_unknown_duration_makes_an_unknown_step() -> None:
    assert np.isnan(step_times(TWO_BUCKETS, [2, 3, np.nan, 4, 1, 1]))


@pytest.mark.parametrize("shape", [(), (5,), (5, 6), (5, 6, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(num_operations = 6, \*batch\)"):
        step_times(TWO_BUCKETS, np.ones(shape))
    with pytest.raises(ValueError, match="must have shape"):
        end_times_with_interference(TWO_BUCKETS, np.ones(shape), compute_speed=1, comm_speed=1)


@pytest.mark.parametrize("bad_s", [-1.0, math.nan, math.inf])
def test_a_bad_duration_is_named(bad_s: float) -> None:
    durations_s = [[1.0, 1.0], [1.0, bad_s], [1.0, 1.0]]
    with pytest.raises(ValueError, match=f"of B must be finite and >= 0, got {bad_s} in draw 1"):
        end_times_with_interference(OVERLAP, durations_s, compute_speed=1, comm_speed=1)


@pytest.mark.parametrize("bad", [0.0, 1.5, math.nan, [0.5, -0.1]])
@pytest.mark.parametrize("name", ["compute_speed", "comm_speed"])
def test_speeds_are_fractions(name: str, bad: ArrayLike) -> None:
    speeds: dict[str, ArrayLike] = {"compute_speed": 1.0, "comm_speed": 1.0, name: bad}
    with pytest.raises(ValueError, match=f"{name} must be > 0 and <= 1"):
        end_times_with_interference(OVERLAP, np.ones((3, 2)), **speeds)


def test_speeds_are_one_or_one_for_each_draw() -> None:
    with pytest.raises(ValueError, match="comm_speed must be one number or have shape"):
        end_times_with_interference(
            OVERLAP, np.ones((3, 2)), compute_speed=1, comm_speed=[0.5, 0.5, 0.5]
        )
