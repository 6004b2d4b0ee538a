"""Overlaps that a reader can redo by hand, and arguments that are refused."""

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike

from perfmodel.engine.algebra import end_times_with_interference
from perfmodel.step.program import Cause, Operation, StepProgram, Stream


def operation(name: str, stream: Stream, *after: int) -> Operation:
    return Operation(name=name, stream=stream, cause=Cause.BACKWARD, after=after)


#: A (compute), then B (compute) beside C (collective, after A).
OVERLAP = StepProgram(
    (
        operation("A", Stream.COMPUTE),
        operation("B", Stream.COMPUTE),
        operation("C", Stream.COMM, 0),
    )
)


def test_each_draw_has_its_own_durations_and_speeds() -> None:
    """Draw 0: C 1 + 2 / 0.8 = 3.5; B by then 2.5 x 0.5 = 1.25 of 4, ends 3.5 + 2.75 = 6.25.

    Draw 1: B 1 + 1 / 0.5 = 3; C by then 2 x 0.8 = 1.6 of 2, ends 3 + 0.4 = 3.4.
    Draw 2 at full speed: B 1 + 4 = 5, C 1 + 2 = 3.
    """
    ends_s = end_times_with_interference(
        OVERLAP,
        [[1, 1, 1], [4, 1, 4], [2, 2, 2]],
        compute_speed=[0.5, 0.5, 1.0],
        comm_speed=[0.8, 0.8, 1.0],
    )
    assert ends_s[:, 0] == pytest.approx([1, 6.25, 3.5], rel=1e-12)
    assert ends_s[:, 1] == pytest.approx([1, 3, 3.4], rel=1e-12)
    assert ends_s[:, 2] == pytest.approx([1, 5, 3], rel=1e-12)


def test_two_that_share_one_resource_gain_nothing_by_overlap() -> None:
    """At half speed each, B and C of 2 both end at 1 + 4, as one after the other would."""
    ends_s = end_times_with_interference(
        OVERLAP, [[1], [2], [2]], compute_speed=0.5, comm_speed=0.5
    )
    assert ends_s[:, 0] == pytest.approx([1, 5, 5], rel=1e-12)


@pytest.mark.parametrize("stream", [Stream.HOST, Stream.LOADER])
def test_host_and_loader_never_slow_down(stream: Stream) -> None:
    program = StepProgram((operation("some", stream), operation("broadcast", Stream.COMM)))
    ends_s = end_times_with_interference(program, [[3], [2]], compute_speed=0.1, comm_speed=0.1)
    assert ends_s.tolist() == [[3], [2]]


def test_no_draws_are_no_answer() -> None:
    ends_s = end_times_with_interference(
        OVERLAP, np.ones((3, 0)), compute_speed=0.5, comm_speed=0.5
    )
    assert ends_s.shape == (3, 0)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (3, 4, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must have shape"):
        end_times_with_interference(OVERLAP, np.ones(shape), compute_speed=1, comm_speed=1)


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
