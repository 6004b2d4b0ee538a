"""Intervals of draws, by hand."""

import numpy as np
import pytest

from perfmodel.statistics import Interval

#: 0 to 100 in steps of 1: the quantile p is 100 p.
DRAWS = np.arange(101.0)


@pytest.mark.parametrize(
    ("nominal", "expected"),
    [(None, (5, 50, 95)), (40.0, (5, 40, 95)), (3.0, (3, 3, 95)), (99.0, (5, 99, 99))],
)
def test_the_middle_of_draws_always_holds_the_nominal_value(
    nominal: float | None, expected: tuple[float, float, float]
) -> None:
    found = Interval.of(DRAWS, nominal=nominal)
    assert (found.p5, found.nominal, found.p95) == pytest.approx(expected)


def test_an_interval_must_be_in_order() -> None:
    with pytest.raises(ValueError, match=r"p5 <= nominal <= p95 must hold, got 2.0, 1.0, 3.0"):
        Interval(p5=2.0, nominal=1.0, p95=3.0)
