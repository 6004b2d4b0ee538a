"""What all laws of collectives share: fits with their uncertainty, groups joined, neighbours, sizes between."""

import functools
import math

import numpy as np
import pytest

from perfmodel.cost import deviates
from perfmodel.cost.group_cost import Law, MessageCost, joined
from perfmodel.machine.measured import CurvePoint, MeasuredCollective
from perfmodel.statistics import FloatArray


def points(*found: tuple[float, float, float]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(at=at, time_s=t, relative_error=error) for at, t, error in found)


def group(ranks: int, *found: tuple[float, float, float]) -> MeasuredCollective:
    return MeasuredCollective(
        collective="all_reduce", world_size=ranks, num_nodes=1, points=points(*found)
    )


def test_repeated_sizes_are_averaged_and_larger_ones_are_never_faster() -> None:
    """1 and 4 ms at one size: 2 ms in log, as far apart as they are; two that agree halve the variance."""
    first = group(2, (1000.0, 1e-3, 0.01), (2000.0, 8e-3, 0.02), (4000.0, 2e-3, 0.03))
    again = group(2, (1000.0, 4e-3, 0.01), (2000.0, 8e-3, 0.01))
    larger, [found] = group(8, (1000.0, 1e-2, 0.1)), joined([first, again])
    assert [point.at for point in found.points] == [1000.0, 2000.0, 4000.0]
    # 8 and 2 ms at the next two: 4 ms each.
    assert [point.time_s for point in found.points] == pytest.approx([2e-3, 4e-3, 4e-3])
    errors = [point.relative_error for point in found.points]
    assert errors == pytest.approx([math.log(2), 0.02 / math.sqrt(2), 0.03])
    assert [each.world_size for each in joined([larger, first])] == [2, 8]


#: A line through four points: a straight problem, whose solution and covariance are known.
DESIGN = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 5.0]])


def line(missed: FloatArray, *, num_draws: int, num_points: int = 0) -> Law:
    def residuals(parameters: FloatArray) -> FloatArray:
        found: FloatArray = (
            DESIGN @ (parameters - np.array([[2.0], [-1.0]])) + missed[:, np.newaxis]
        )
        return found

    drawn = deviates(np.random.default_rng(0), 2, num_draws)
    starts = [np.array([0.0, 0.0]), np.array([9.0, 9.0])]
    return Law.fitted(residuals, starts, drawn, num_points=num_points)


def test_a_fit_finds_its_parameters_and_how_well_they_are_known() -> None:
    """The covariance of least squares is the inverse of the squared slopes."""
    found = line(np.zeros(4), num_draws=20_000)
    assert found.logs[:, 0] == pytest.approx([2.0, -1.0], abs=1e-6)
    assert found.nominal().logs.tolist() == found.logs[:, :1].tolist()
    known = np.linalg.inv(DESIGN.T @ DESIGN)
    assert np.cov(found.logs) == pytest.approx(known, abs=0.02)
    assert np.abs(found.logs - found.logs[:, :1]).max() <= 3.0


def test_what_a_law_misses_makes_its_parameters_less_certain() -> None:
    """Residuals beside any line, of one standard deviation less or more; that of priors does not count."""
    beside = np.array([1.0, -2.0, 1.0, 0.0])
    beside -= DESIGN @ np.linalg.lstsq(DESIGN, beside, rcond=None)[0]
    spreads = {
        (size, num_points): line(size * beside, num_draws=200, num_points=num_points).logs[1].std()
        for size in (1e-3, 0.3, 2.0)
        for num_points in (0, 4)
    }
    assert spreads[1e-3, 4] == spreads[1e-3, 0]
    assert spreads[0.3, 4] == pytest.approx(spreads[0.3, 0])
    rms = math.sqrt(float(np.mean((2.0 * beside) ** 2)))
    # The robust fit is not the least squares: it misses a little more.
    assert 0.95 * rms < spreads[2.0, 4] / spreads[2.0, 0] < 1.5 * rms


@functools.cache
def cost_of(*ranks: int, num_draws: int = 1) -> MessageCost:
    """Groups that took 1 ms and a nanosecond a byte, without error."""
    found = [
        group(n, *((size, 1e-3 + size * 1e-9, 0.0) for size in (1e3, 1e5, 1e7))) for n in ranks
    ]
    return MessageCost.sample(
        found, library="gloo", num_draws=num_draws, rng=np.random.default_rng(0)
    )


@pytest.mark.parametrize(
    ("ranks", "right", "weight"),
    [(1, 0, 1), (2, 0, 1), (4, 1, 1 / 2), (8, 1, 1), (16, 2, 1 / 2), (32, 2, 1), (64, 2, 1)],
)
def test_groups_between_two_lie_where_their_logarithm_does(
    ranks: int, right: int, weight: float
) -> None:
    assert cost_of(2, 8, 32).neighbours(ranks) == pytest.approx((right, weight))


def test_sizes_between_measured_ones_are_less_certain_and_those_beyond_are_no_business_of_it() -> (
    None
):
    """8 % one e-fold from the nearest, by the root of the distance."""
    cost = cost_of(2, num_draws=4000)
    known = np.array([1e3, 1e5, 1e7])
    at = np.array([1e3, 1e3 * math.e, 1e5 / math.sqrt(math.e), 1e7, 10.0, 1e12])
    found = np.log(cost.away_from_sizes(at, known))
    assert (found[:, 0] == 0).all()
    expected = [0, 0.08, 0.08 * math.sqrt(0.5), 0, 0, 0]
    assert found.std(axis=1) == pytest.approx(expected, rel=0.05, abs=1e-12)


def test_a_tier_hands_out_what_was_measured_inside_it() -> None:
    """Two messages of half the array each: latency is that of the smallest, 500 B."""
    level = cost_of(2).level("node", 2, crossings=1, inside_node=True)
    assert (level.tier, level.members, level.crossings) == ("node", 2, 1)
    assert (level.inside_node, level.is_measured) == (True, True)
    assert level.latency_s[0] == pytest.approx(0.5e-3 + 500e-9)
    assert level.transfer_s(5e6)[0] == pytest.approx((5e6 - 500) * 1e-9)
    whole = level.start_s + 2 * (level.latency_s + level.transfer_s(5e6))
    assert cost_of(2).group_s(1e7, 2)[0] == pytest.approx(float(np.asarray(whole)[0]))


def test_another_collective_goes_over_the_same_links() -> None:
    cost = cost_of(2).of_kind("all_gather")
    assert cost.collective == "all_gather"
    assert cost.group_s(1e7, 2)[0] == pytest.approx(0.5e-3 + 5e6 * 1e-9)
