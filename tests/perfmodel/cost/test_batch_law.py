"""How well a few trainings tell their median."""

import math

import pytest

from perfmodel.cost.batch import STARTS_SPREAD, median_error


def test_two_trainings_that_agree_are_mostly_the_prior() -> None:
    """Variance (0 + 2 x 0.25^2) / (1 + 2); error of a median of two sqrt(pi / 2) sqrt(variance / 2)."""
    variance = 2 * STARTS_SPREAD**2 / 3
    assert median_error([300, 300]) == pytest.approx(math.sqrt(math.pi / 2 * variance / 2))


def test_many_trainings_overrule_the_prior() -> None:
    """Deviations of +-0.1 in log, 50 of each: their own variance, 0.01, and a hundredth of the prior's."""
    steps = [round(100_000 * math.exp(sign * 0.1)) for sign in (1, -1) for _ in range(50)]
    expected = math.sqrt(math.pi / 2 * (1.0 + 2 * STARTS_SPREAD**2) / 101 / 100)
    assert median_error(steps) == pytest.approx(expected, rel=1e-3)
