"""Sizes that grow with the micro-batch."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.workload.step import arguments_at, merged_arguments, through, value_at

small = st.integers(min_value=0, max_value=1000)


@given(constant=small, per_sample=small, batch=st.integers(min_value=1, max_value=64))
def test_two_points_of_a_line_give_the_line(constant: int, per_sample: int, batch: int) -> None:
    def value(at: int) -> int:
        return constant + per_sample * at

    line = through(((batch, value(batch)), (2 * batch, value(2 * batch))))
    assert value_at(line, 17) == value(17)


def test_a_size_that_grows_by_half_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number per sample"):
        through(((2, 3), (4, 4)))


def test_arguments_keep_what_does_not_change_and_open_what_does() -> None:
    first = [[{"tensor": 0}, [4, 256], True, 0.25], {"dtype": {"dtype": "float32"}}]
    second = [[{"tensor": 0}, [8, 256], True, 0.125], {"dtype": {"dtype": "float32"}}]
    merged = merged_arguments(first, second, micro_batches=(4, 8))
    assert json.loads(arguments_at(json.dumps(merged), 10)) == [
        [{"tensor": 0}, [10, 256], True, 0.25],
        {"dtype": {"dtype": "float32"}},
    ]


@pytest.mark.parametrize(
    ("first", "second"), [(True, False), ("sum", "mean"), ([1], [1, 2]), (None, 1)]
)
def test_other_differences_are_refused(first: object, second: object) -> None:
    with pytest.raises(ValueError, match="argument"):
        merged_arguments(first, second, micro_batches=(2, 4))
