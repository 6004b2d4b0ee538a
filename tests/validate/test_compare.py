"""Predicted beside measured, by hand."""

from dataclasses import replace

import pytest

from calibrate.fit.steps import Repetition, repetition
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.statistics.interval import Interval
from tests.perfmodel.profiles import Machine, profile
from tests.played_worker import step_observation
from tests.validate.samples import exactly, single
from validate.validate import (
    Measured,
    baseline_of,
    compare_repeat,
    compare_setting,
    compare_speedup,
    is_extrapolated,
    measured,
)


def found(value_s: float, *, raw_s: float | None = None) -> Measured:
    return Measured(
        value_s=value_s,
        raw_s=value_s if raw_s is None else raw_s,
        relative_error=0.01,
        num_repetitions=3,
    )


def repetitions_on_a_slow_machine() -> list[Repetition]:
    """Twice as slow as at calibration (probe 1 ms): 20 ms on the clock, as the probe says 2 ms."""
    return [
        repetition(step_observation(single(), repetition=index, step_s=0.020, speed_probe_s=0.002))
        for index in range(3)
    ]


def with_sensitivity(sensitivity: float) -> MeasuredMachine:
    machine = profile(Machine())
    return replace(
        machine,
        workloads=tuple(
            replace(entry, speed_sensitivity=sensitivity) for entry in machine.workloads
        ),
    )


# 20 ms x (1 ms / 2 ms) ** sensitivity.
@pytest.mark.parametrize(("sensitivity", "value_s"), [(0.0, 0.02), (0.5, 0.02 / 2**0.5), (1, 0.01)])
def test_a_measurement_is_brought_to_the_speed_of_the_calibration(
    sensitivity: float, value_s: float
) -> None:
    result = measured(
        repetitions_on_a_slow_machine(),
        profile=with_sensitivity(sensitivity),
    )
    assert result.raw_s == pytest.approx(0.020)
    assert result.value_s == pytest.approx(value_s)
    assert result.num_repetitions == 3


def test_a_prediction_that_is_too_long_has_a_positive_error() -> None:
    """Predicted 12 ms. Measured 10 ms at the old speed: +20 %; 16 ms on the clock: -25 %."""
    row = compare_setting(
        single(), exactly(0.012), found(0.010, raw_s=0.016), profile=profile(Machine())
    )
    assert row.signed_error == pytest.approx(0.2)
    assert row.signed_error_raw == pytest.approx(-0.25)
    assert (row.measured_s, row.measured_raw_s, row.num_repetitions) == (0.010, 0.016, 3)


@pytest.mark.parametrize(
    ("measured_s", "is_covered"),
    [(0.0089, False), (0.009, True), (0.010, True), (0.013, True), (0.0131, False)],
)
def test_coverage_is_that_of_the_interval_at_calibrated_speed(
    measured_s: float, *, is_covered: bool
) -> None:
    row = compare_setting(
        single(),
        Interval(p5=0.009, nominal=0.010, p95=0.013),
        found(measured_s, raw_s=0.010),
        profile=profile(Machine()),
    )
    assert row.is_covered is is_covered


@pytest.mark.parametrize(
    ("micro_batch", "is_beyond"), [(3, True), (4, False), (17, False), (64, False), (65, True)]
)
def test_accuracy_is_promised_between_the_calibrated_micro_batches(
    micro_batch: int, *, is_beyond: bool
) -> None:
    """They are 4, 16 and 64."""
    assert is_extrapolated(single(micro_batch), profile(Machine())) is is_beyond


def test_the_baseline_is_one_bare_device_with_the_same_micro_batch() -> None:
    setting = RunSetting(
        workload="light", world_size=2, micro_batch=8, accumulation=3, bucket_cap_mb=2.0
    )
    assert baseline_of(setting) == RunSetting(
        workload="light", world_size=1, micro_batch=8, synchronisation=Synchronisation.NONE
    )


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


def test_a_repeat_compares_then_with_now() -> None:
    row = compare_repeat(single(), 0.011, found(0.010, raw_s=0.022))
    assert row.signed_error == pytest.approx(0.1)
    assert row.signed_error_raw == pytest.approx(-0.5)
