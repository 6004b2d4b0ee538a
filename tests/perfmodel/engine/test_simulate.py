"""Steps that a reader can redo by hand, and durations that are refused."""

import gc
import math

import numpy as np
import pytest

from perfmodel.engine.simulate import simulate
from perfmodel.step import Interference, StepProgram, Stream
from tests.perfmodel.engine.programs import OVERLAP, TWO_BUCKETS, operation

SLOWED = Interference(compute_speed=0.5, comm_speed=0.8)


def test_a_collective_waits_for_the_slowest_rank() -> None:
    """Rank 1: backward 2-8 and 8-12; all-reduce 8-13 and 13-14; optimizer 14-15 on both.

    Rank 0 computes as if alone: backward 2-5 and 5-9.
    """
    trace = simulate(TWO_BUCKETS, [[2, 3, 5, 4, 1, 1], [2, 6, 5, 4, 1, 1]])
    assert trace.end_s.tolist() == [[2, 5, 13, 9, 14, 15], [2, 8, 13, 12, 14, 15]]
    assert trace.start_s.tolist() == [[0, 2, 8, 5, 13, 14], [0, 2, 8, 8, 13, 14]]


ASIDE = StepProgram(
    (
        operation("batch", Stream.LOADER),
        operation("dispatch", Stream.HOST),
        operation("broadcast", Stream.COMM),
    )
)
TWICE = StepProgram((*OVERLAP.operations, operation("D", Stream.COMM)))


def test_a_collective_is_slow_as_long_as_any_rank_computes() -> None:
    """B ends at 1 + 0.5 / 0.5 = 2 on rank 0 and at 1 + 1 / 0.5 = 3 on rank 1; C has done 1.6 of 2
    by 3 and ends at 3.4 on both. In another step rank 0 computes from 0.75 to 1, when 0.875 of a broadcast are done;
    the slowest rank alone, which computes later, would end it at 1.
    """
    trace = simulate(OVERLAP, [[1.0, 0.5, 2.0], [1.0, 1.0, 2.0]], interference=SLOWED)
    assert trace.end_s == pytest.approx(np.array([[1, 2, 3.4], [1, 3, 3.4]]), rel=1e-12)
    program = StepProgram((*ASIDE.operations, operation("forward", Stream.COMPUTE, 0)))
    halved = Interference(compute_speed=1.0, comm_speed=0.5)
    ranks_s = np.array([[0.75, 0.0, 1.0, 0.25], [1.5, 0.0, 1.0, 0.5]])
    for some_s, end_s in ((ranks_s, 1.125), (ranks_s[1:], 1.0)):
        assert simulate(program, some_s, interference=halved).end_s[-1, 2] == end_s


@pytest.mark.parametrize("shape", [(6,), (0, 6), (1, 5), (1, 1, 6)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must have shape"):
        simulate(TWO_BUCKETS, np.ones(shape))


@pytest.mark.parametrize("bad_s", [-1.0, math.nan, math.inf])
def test_a_bad_duration_is_named(bad_s: float) -> None:
    durations_s = np.ones((2, 6))
    durations_s[1, 3] = bad_s
    with pytest.raises(
        ValueError, match=rf"of backward\[1\] must be finite and >= 0, got {bad_s} in rank 1"
    ):
        simulate(TWO_BUCKETS, durations_s)


def test_ranks_must_agree_on_a_collective() -> None:
    durations_s = np.ones((2, 6))
    durations_s[1, 2] = 2
    with pytest.raises(
        ValueError, match=r"all_reduce\[0\] must be the same on all ranks, got 1.0 s apart"
    ):
        simulate(TWO_BUCKETS, durations_s)


def test_the_garbage_collector_is_left_as_it_was() -> None:
    simulate(OVERLAP, [[1, 1, 1]])
    assert gc.isenabled()
    gc.disable()
    try:
        simulate(OVERLAP, [[1, 1, 1]])
        assert not gc.isenabled()
    finally:
        gc.enable()
