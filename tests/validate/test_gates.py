"""Each gate fails when it should, and says what it compared."""

import pytest

from tests.validate.samples import errors
from validate.judging import Tolerances, passed

GOOD = [0.01, -0.02] * 12


def failed_gates(
    *,
    steps: list[float] | None = None,
    speedups: list[float] | None = None,
    coverage: float = 0.9,
) -> list[str]:
    verdict = Tolerances().judge(
        summary=errors(steps or GOOD),
        speedups=errors(speedups) if speedups else None,
        coverage=coverage,
    )
    names = [gate.name for gate in verdict if not gate.passed]
    assert passed(verdict) is not bool(names)
    return names


def test_what_is_within_tolerance_passes() -> None:
    assert failed_gates() == []
    assert failed_gates(speedups=[0.04, -0.04]) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_many_errors_of_a_tenth_fail_the_mean(sign: int) -> None:
    assert failed_gates(steps=[0.1 * sign] * 24) == ["step-time MAPE"]


@pytest.mark.parametrize("sign", [1, -1])
def test_one_error_of_a_fifth_fails_the_worst(sign: int) -> None:
    assert failed_gates(steps=[0.2 * sign, *GOOD]) == ["worst step-time error"]


def test_wrong_speedups_fail_their_own_gate() -> None:
    assert failed_gates(speedups=[0.06]) == ["speed-up MAPE"]


def test_intervals_that_are_too_narrow_fail() -> None:
    assert failed_gates(coverage=0.84) == ["coverage of 90 % intervals"]


@pytest.mark.parametrize(("num_settings", "fails"), [(23, False), (24, True)])
def test_intervals_that_are_too_wide_fail_once_there_are_enough(
    num_settings: int, *, fails: bool
) -> None:
    names = failed_gates(steps=[0.01] * num_settings, coverage=1.0)
    assert names == (["coverage of 90 % intervals"] if fails else [])


@pytest.mark.parametrize(("coverage", "passes"), [(0.85, True), (0.97, True), (0.971, False)])
def test_the_thresholds_themselves_are_allowed(coverage: float, *, passes: bool) -> None:
    assert (failed_gates(coverage=coverage) == []) is passes


def test_a_gate_holds_threshold_and_value() -> None:
    mape, worst, coverage = Tolerances().judge(
        summary=errors([0.01] * 24), speedups=None, coverage=0.9
    )
    assert (mape.at_least, mape.at_most) == (None, 0.06)
    assert mape.value == pytest.approx(0.01)
    assert (worst.at_most, worst.value) == (0.15, 0.01)
    assert (coverage.at_least, coverage.at_most, coverage.value) == (0.85, 0.97, 0.9)


def test_one_rank_has_no_gate_on_speedups() -> None:
    verdict = Tolerances().judge(summary=errors(GOOD), speedups=None, coverage=0.9)
    assert "speed-up MAPE" not in {gate.name for gate in verdict}
