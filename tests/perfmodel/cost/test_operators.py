"""Durations of operators: recovered from timings, bounded by physics, never zero."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.families import features
from perfmodel.cost.operators import UNKNOWN_LOG_ERROR, OperatorDurations
from perfmodel.machine import Evidence
from perfmodel.machine.measured import OperatorCosts
from perfmodel.workload import Operator, Phase
from perfmodel.workload.step import signature
from tests.perfmodel.operators import (
    addition,
    costs_of_the_made_up_machine,
    matmul,
    measured_step,
    operator,
    spec,
    true_time_s,
)


@functools.cache
def machine() -> OperatorCosts:
    return costs_of_the_made_up_machine()


def price_s(called: Operator) -> float:
    return OperatorDurations(machine()).durations([called], Phase.FORWARD)[0].time_s


@pytest.mark.parametrize("seed", range(3))
def test_prices_recover_the_machine_that_made_the_timings(seed: int) -> None:
    durations = OperatorDurations(costs_of_the_made_up_machine(seed))
    for called in (matmul(64, 128, 256), matmul(300, 300, 300), addition(10_000), addition(10**6)):
        found = durations.durations([called], Phase.FORWARD)[0]
        assert found.time_s == pytest.approx(true_time_s(called), rel=0.12)
        assert found.evidence is Evidence.INTERPOLATED


sizes = st.integers(1, 20_000)


@given(
    called=st.one_of(
        st.builds(matmul, sizes, sizes, sizes), st.builds(addition, st.integers(1, 10**10))
    )
)
def test_nothing_is_faster_than_the_peaks(called: Operator) -> None:
    time_s = price_s(called)
    assert called.flop / time_s <= machine().peak_flop_per_s * (1 + 1e-9)
    moved = called.read_bytes + called.written_bytes
    assert moved / time_s <= machine().peak_bytes_per_s * (1 + 1e-9)


def test_uncertainty_grows_away_from_the_measured_sizes() -> None:
    durations = OperatorDurations(machine())
    near, far, farther = (
        durations.durations([matmul(*3 * (size,))], Phase.FORWARD)[0]
        for size in (200, 8_000, 10**6)
    )
    assert near.log_error < far.log_error < farther.log_error
    assert farther.evidence is Evidence.EXTRAPOLATED


def test_durations_add_up_to_the_mean_of_what_scatters() -> None:
    """Around a curve that is e^0.3 everywhere timings scatter by 0.4: their mean is e^(0.3 + 0.4^2 / 2)."""
    [curve] = [family for family in machine().families if family.name == "pointwise"]
    level = replace(curve, log_ratios=(0.3,) * len(curve.log_ratios), noise=0.4)
    [reading] = OperatorDurations(machine())._readings(level, np.array([features(addition(10**6))]))
    assert reading.ratio == pytest.approx(math.exp(0.3 + 0.4**2 / 2))


def test_an_operator_without_any_timing_is_bounded_by_physics_and_in_uncertainty() -> None:
    called = operator("aten.fft_fft.default", (spec(10**6),), (spec(10**6),))
    found = OperatorDurations(machine()).durations([called], Phase.FORWARD)[0]
    assert found.time_s >= 8e6 / machine().peak_bytes_per_s
    assert found.log_error == UNKNOWN_LOG_ERROR
    assert found.evidence is Evidence.ASSUMED


def test_what_was_measured_in_place_comes_first_unless_curves_are_asked_for() -> None:
    called = addition(12_345)
    step = measured_step([(signature(called), "forward")], 0.5)
    profile = replace(machine(), measured=(step,))
    found = OperatorDurations(profile).durations([called], Phase.FORWARD)[0]
    assert (found.time_s, found.evidence) == (0.5, Evidence.MEASURED)
    other = OperatorDurations(profile, use_measured=False).durations([called], Phase.FORWARD)[0]
    assert other.time_s == pytest.approx(true_time_s(called), rel=0.2)
    backward = OperatorDurations(profile).durations([called], Phase.BACKWARD)[0]
    assert backward.evidence is not Evidence.MEASURED
