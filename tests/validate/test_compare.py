"""Predicted beside measured, by hand."""

import pytest

from calibrate.summary import Estimate
from perfmodel.layout import RunSetting
from perfmodel.statistics import Interval
from tests.perfmodel.profiles import Machine, profile
from tests.validate.samples import exactly, single
from validate.judging import compared
from validate.validate import compare_speedup, is_extrapolated


def found(value_s: float) -> Estimate:
    return Estimate(value_s=value_s, relative_error=0.01, num_repetitions=3)


@pytest.mark.parametrize(
    ("measured_s", "error", "is_covered"),
    [
        (0.0089, 0.1236, False),
        (0.009, 1 / 9, True),
        (0.010, 0.0, True),
        (0.013, -3 / 13, True),
        (0.0131, -0.2366, False),
    ],
)
def test_a_prediction_that_is_too_long_has_a_positive_error(
    measured_s: float, error: float, *, is_covered: bool
) -> None:
    """Predicted are 10 ms, between 9 and 13."""
    row = compared(single(), Interval(p5=0.009, nominal=0.010, p95=0.013), found(measured_s))
    assert row["signed_error"] == pytest.approx(error, abs=1e-4)
    assert (row["measured_s"], row["num_repetitions"]) == (measured_s, 3)
    assert row["is_covered"] is is_covered


@pytest.mark.parametrize(
    ("micro_batch", "is_beyond"), [(3, True), (4, False), (17, False), (64, False), (65, True)]
)
def test_accuracy_is_promised_between_the_calibrated_micro_batches(
    micro_batch: int, *, is_beyond: bool
) -> None:
    """They are 4, 16 and 64."""
    assert is_extrapolated(single(micro_batch), profile(Machine())) is is_beyond


@pytest.mark.parametrize(
    ("accumulation", "step_s", "speedup"),
    # Samples per second over those of one device, which takes 8 samples per 10 ms:
    # 2 x 8 samples per 16 ms, and 2 x 3 x 8 samples per 40 ms.
    [(1, 0.016, 1.25), (3, 0.040, 1.5)],
)
def test_a_speedup_compares_throughput(accumulation: int, step_s: float, speedup: float) -> None:
    setting = RunSetting(workload="light", world_size=2, micro_batch=8, accumulation=accumulation)
    row = compare_speedup(
        setting, exactly(speedup * 0.9), {setting: found(step_s), single(): found(0.010)}
    )
    assert row.measured == pytest.approx(speedup)
    assert row.signed_error == pytest.approx(-0.1)
    assert (row.workload, row.world_size, row.accumulation) == ("light", 2, accumulation)
