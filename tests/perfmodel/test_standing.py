"""A measured step among the predicted ones."""

import numpy as np
import pytest

from perfmodel.explanation import Standing, Verdict, standing
from perfmodel.layout.layout import scaled_layouts
from perfmodel.report.explanation import standing_line
from tests.perfmodel.asking import Asking
from tests.perfmodel.profiles import Machine, profile


def found(factor: float) -> Standing:
    """A step of so many times the nominal prediction on two ranks."""
    predictor = Asking(profile(Machine(rank_spread=0.05)))
    workload = predictor.workload("heavy")
    (setting,) = scaled_layouts([2], scaling="weak", batch=16)
    draws_s = predictor.step(workload, setting).step_s
    result = standing(
        predictor.question(workload, setting),
        measured_s=factor * float(draws_s[0]),
    )
    assert result.predicted_s.nominal == pytest.approx(float(draws_s[0]))
    share = np.mean(draws_s[1:] > result.measured_s)
    assert result.share_slower == pytest.approx(float(share), abs=0.01)
    return result


def test_the_verdict_is_that_of_the_interval() -> None:
    assert [found(factor).verdict for factor in (0.5, 1.0, 2.0)] == [
        Verdict.FASTER,
        Verdict.NORMAL,
        Verdict.SLOWER,
    ]
    assert (found(0.5).share_slower, found(2.0).share_slower) == (1.0, 0.0)
    assert 0.2 < found(1.0).share_slower < 0.8


def test_a_slow_step_says_how_much_nothing_explains() -> None:
    slow = found(2.0)
    assert standing_line(slow).startswith("measured ")
    assert "slower than normal; predicted" in standing_line(slow)
    assert "0.0 % of outcomes take longer; " in standing_line(slow)
    assert "are more than the causes below cost" in standing_line(slow)
    assert "is it the same batch" in standing_line(found(0.5))
