"""The slowest of many ranks, and intervals of draws, by hand."""

import numpy as np
import pytest

from perfmodel.statistics import (
    Interval,
    expected_largest_deviate,
    expected_largest_over_median,
    quantile_with_tail,
    slowest_of_ranks,
)

#: 1.00, 1.01 ... 1.19: the quantile p is 1 + 0.19 p.
RATIOS = [1 + i / 100 for i in range(20)]


def test_two_ranks_wait_for_the_quantile_that_both_stay_below_half_of_the_time() -> None:
    """p * p = 1/2: p = 0.7071; 1 + 0.19 * 0.7071 = 1.1344."""
    assert slowest_of_ranks(RATIOS, world_size=2) == pytest.approx(1.1344, abs=1e-4)


def test_light_tails_are_continued_as_exponentials() -> None:
    """Threshold q(0.9) = 1.171; the two above it, 1.18 and 1.19, exceed it by 0.014 on average.

    q(0.95) = 1.171 + 0.014 ln(0.1 / 0.05) = 1.1807; q(0.99) = 1.171 + 0.014 ln 10 = 1.2032.
    """
    assert quantile_with_tail(RATIOS, 0.9) == pytest.approx(1.171)
    assert quantile_with_tail(RATIOS, 0.95) == pytest.approx(1.1807, abs=1e-4)
    assert quantile_with_tail(RATIOS, 0.99) == pytest.approx(1.2032, abs=1e-4)


def test_three_values_have_no_tail() -> None:
    """Of four the last two have: threshold 1.5, mean excess 1, q(0.99) = 1.5 + ln 50."""
    assert quantile_with_tail([0, 1, 2, 3], 0.99) == pytest.approx(1.5 + np.log(50))
    assert quantile_with_tail([0, 1, 2], 0.99) == pytest.approx(1.98)


def test_the_shape_of_a_tail_is_read_from_its_values() -> None:
    """390 times 1, 10 times 5: 40 values in the tail, threshold 1, mean excess 1, weighted 45 / 39 * 4 / 40.

    Shape 2 - 1 / (1 - 2 * 0.1154) = 0.7, taken as 0.4: above 2 / sqrt(40). 0.001 is 0.1 over 100:
    1 + 0.6 (100 ** 0.4 - 1) / 0.4 = 8.964. Of 100 values the tail has 10, which tell no shape: 1 + ln 100.
    """
    assert quantile_with_tail([1.0] * 390 + [5.0] * 10, 0.999) == pytest.approx(8.964, abs=1e-3)
    few = quantile_with_tail([1.0] * 97 + [1 + 10 / 3] * 3, 0.999)
    assert few == pytest.approx(1 + np.log(100))


def test_heavy_tails_are_extrapolated_without_much_bias() -> None:
    """A tenth of the steps slowed by a Lomax excess of shape 0.4: p95 of 16 ranks from 600 steps.

    Exact: 1.664; an exponential tail is 9 % too short.
    """
    exact = 1 + 0.225 * ((0.1 / (1 - 0.95 ** (1 / 16))) ** 0.4 - 1)
    found = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        slow = rng.random(600) < 0.1
        ratios = 1 + slow * 0.225 * rng.pareto(2.5, 600)
        found.append(float(quantile_with_tail(ratios, 0.95 ** (1 / 16))))
    assert np.mean(found) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("world_size", "quantiles", "probability", "within"),
    [(4, 64, 0.5, 0.005), (16, 256, 0.95, 0.01)],
)
def test_the_slowest_is_what_a_simulation_of_ranks_shows(
    world_size: int, quantiles: int, probability: float, within: float
) -> None:
    """Log-normal noise of 5 %, 20,000 steps."""
    steps = np.exp(0.05 * np.random.default_rng(1).standard_normal((20_000, world_size)))
    ratios = np.quantile(steps[:, 0], (np.arange(quantiles) + 0.5) / quantiles)
    predicted = quantile_with_tail(ratios, probability ** (1 / world_size))
    expected = np.quantile(steps.max(axis=1), probability)
    assert float(predicted) == pytest.approx(float(expected), rel=within)


@pytest.mark.parametrize(("ratios", "world_size"), [(RATIOS, 1), ([], 8), ([1.0], 8), ([0.9], 2)])
def test_nobody_waits_alone_or_without_noise(ratios: list[float], world_size: int) -> None:
    assert slowest_of_ranks(ratios, world_size=world_size) == 1.0


@pytest.mark.parametrize(
    ("world_size", "exact", "tolerance"),
    [(1, 0.0, 0.0), (2, 0.5642, 0.03), (10, 1.5388, 0.01), (100, 2.5076, 0.01)],
)
def test_the_largest_normal_deviate_is_near_its_tabulated_mean(
    world_size: int, exact: float, tolerance: float
) -> None:
    """Means of the largest of n: Harter, Biometrika 48 (1961); 1/sqrt(pi) = 0.5642 for two."""
    assert expected_largest_deviate(world_size) == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 9])
def test_the_largest_stands_above_the_lower_median_as_in_a_simulation(count: int) -> None:
    """Acceptance divides the slowest by ``median_low``; of two that is twice their distance from the centre.

    Blom's approximation errs most for two: by 4.4 %.
    """
    ordered = np.sort(np.random.default_rng(5).standard_normal((100_000, count)), axis=1)
    simulated = float((ordered[:, -1] - ordered[:, (count - 1) // 2]).mean())
    assert expected_largest_over_median(count) == pytest.approx(simulated, rel=0.05)


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


def test_intervals_are_divided_turned_and_compared() -> None:
    known = Interval(p5=2.0, nominal=4.0, p95=8.0)
    assert 16 / known == known
    assert known / 2 == Interval(p5=1.0, nominal=2.0, p95=4.0)
    assert -known == Interval(p5=-8.0, nominal=-4.0, p95=-2.0)
    assert [known.holds(value) for value in (1.9, 2.0, 8.0, 8.1)] == [False, True, True, False]
    assert known.signed_error(5.0) == pytest.approx(-0.2)
