"""From a few measured ranks to the slowest of many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine.algebra import end_times
from perfmodel.engine.simulate import simulate
from perfmodel.step import Cause, Operation, StepProgram, Stream
from validate.testbed.noise import RankNoise, slowest_durations


def program() -> StepProgram:
    """Two segments of backward, each with an all-reduce behind it, then the optimizer."""
    compute, comm = Stream.COMPUTE, Stream.COMM
    return StepProgram(
        (
            Operation(name="b0", stream=compute, cause=Cause.BACKWARD),
            Operation(name="a0", stream=comm, cause=Cause.ALL_REDUCE, after=(0,)),
            Operation(name="b1", stream=compute, cause=Cause.BACKWARD),
            Operation(name="a1", stream=comm, cause=Cause.ALL_REDUCE, after=(2,)),
            Operation(name="o", stream=compute, cause=Cause.OPTIMIZER, after=(1, 3)),
        )
    )


def test_the_slowest_is_taken_per_bucket_not_per_operation() -> None:
    """Rank 0 needs 3 + 1, rank 1 needs 1 + 3: ready at 3 and at 4, not at 3 and 6."""
    durations_s = np.array([[3, 1], [1, 1], [1, 3], [1, 1], [0.5, 0.25]])
    found = slowest_durations(program(), durations_s)
    assert found.tolist() == [3, 1, 1, 1, 0.5]
    assert end_times(program(), found)[-1] == pytest.approx(5.5)


@given(data=st.data(), num_ranks=st.integers(1, 5))
def test_the_envelope_says_what_the_simulation_of_all_ranks_says(
    data: st.DataObject, num_ranks: int
) -> None:
    seconds = st.floats(min_value=0, max_value=10)
    table = np.array(
        data.draw(
            st.lists(
                st.lists(seconds, min_size=5, max_size=5), min_size=num_ranks, max_size=num_ranks
            )
        )
    )
    table[:, [1, 3]] = table[0, [1, 3]]
    envelope = end_times(program(), slowest_durations(program(), table.T)).max()
    assert envelope == pytest.approx(simulate(program(), table).step_s, abs=1e-9)


def test_what_stays_and_what_changes_are_taken_apart() -> None:
    rng = np.random.default_rng(0)
    stays = np.exp(0.08 * rng.standard_normal((400, 1)))
    paces = 1.1 * stays * np.exp(0.05 * rng.standard_normal((400, 200)))
    found = RankNoise.fit([paces])
    assert found.rank_spread == pytest.approx(0.08, rel=0.1)
    assert np.std(np.log(found.step_ratios)) == pytest.approx(0.05, rel=0.05)
    assert found.level == pytest.approx(1.1, rel=0.01)


def test_the_slowest_of_sixteen_is_predicted_from_two() -> None:
    """Lognormal 0.2: the median of the largest of 16 is exp(0.2 x 1.7190) = 1.410."""
    rng = np.random.default_rng(2)
    noise = RankNoise.fit([np.exp(0.2 * rng.standard_normal((2, 400)))])
    found = np.median(noise.draw(num_ranks=16, num_steps=4000, rng=rng).max(axis=0))
    assert found == pytest.approx(1.410, rel=0.04)


def test_resampling_tells_the_uncertainty_of_few_ranks() -> None:
    rng = np.random.default_rng(3)
    stays = np.exp(0.1 * rng.standard_normal((4, 1)))
    noise = RankNoise.fit([stays * np.exp(0.01 * rng.standard_normal((4, 100)))])
    spreads = [noise.resampled(rng).rank_spread for _ in range(300)]
    assert np.quantile(spreads, 0.05) < noise.rank_spread < np.quantile(spreads, 0.95)
    assert np.quantile(spreads, 0.95) / np.quantile(spreads, 0.05) > 2


@given(num_ranks=st.integers(1, 64))
def test_more_ranks_never_have_a_faster_slowest(num_ranks: int) -> None:
    ratios = np.exp(0.1 * np.random.default_rng(4).standard_normal((1, 200)))
    noise = RankNoise.fit([ratios])
    paces = noise.draw(num_ranks=2 * num_ranks, num_steps=50, rng=np.random.default_rng(5))
    assert (paces.max(axis=0) >= paces[:num_ranks].max(axis=0)).all()
