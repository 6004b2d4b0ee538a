"""Moments of a step and their upper envelope."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.workload.memory import upper_envelope
from perfmodel.workload.step import AffineBytes
from tests.perfmodel.workload.memory_samples import moment, step_memory

lines = st.builds(
    AffineBytes,
    constant_bytes=st.integers(-50, 100),
    per_sample_bytes=st.integers(0, 20),
)


@given(family=st.lists(lines, min_size=1, max_size=12), micro_batch=st.integers(1, 200))
def test_the_envelope_holds_the_highest_line_of_every_batch(
    family: list[AffineBytes], micro_batch: int
) -> None:
    kept = [family[position].at(micro_batch) for position in upper_envelope(family)]
    assert max(kept) == max(line.at(micro_batch) for line in family)


def test_lines_that_never_lead_are_left_out() -> None:
    family = [
        AffineBytes(constant_bytes=20, per_sample_bytes=1),
        AffineBytes(
            constant_bytes=10, per_sample_bytes=2
        ),  # passes the first at 10, is passed at 5
        AffineBytes(constant_bytes=0, per_sample_bytes=4),
    ]
    assert upper_envelope(family) == [0, 2]


def test_the_peak_moves_with_the_batch() -> None:
    """Optimizer: 100 whatever the batch; backward: 40 + 20 per sample, more from 4 samples on."""
    memory = step_memory()
    assert memory.peak_bytes(2) == 100
    assert memory.peak_bytes(4) == 120
    assert memory.peak(4).operator == "backward"


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch must be >= 1, got 0"):
        step_memory().peak(0)


def test_far_batches_are_beyond_the_range() -> None:
    memory = step_memory()
    assert not memory.beyond_range(8)
    assert memory.beyond_range(1000)


def test_a_line_below_zero_counts_as_nothing() -> None:
    sizes = moment("x", activations=(-10, 4)).at(2)
    assert min(sizes.values()) == 0
