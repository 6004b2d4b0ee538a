"""Curves between, beyond and on their points."""

import numpy as np
import pytest

from perfmodel.cost import CurveDraws
from perfmodel.machine.measured import CurvePoint


def curve(*points: tuple[float, float], error: float = 0.0, num_draws: int = 3) -> CurveDraws:
    return CurveDraws.sample(
        [CurvePoint(at=at, time_s=time_s, relative_error=error) for at, time_s in points],
        num_draws=num_draws,
        rng=np.random.default_rng(0),
    )


def read(draws: CurveDraws, at: float) -> float:
    return float(draws.read(at)[0])


def test_points_are_read_as_they_are_and_straight_between_and_beyond_them() -> None:
    """From 10 at 2 to 30 at 6 is 5 per unit: 20 at 4; from 30 at 6 to 40 at 16 is 1: 32 at 8, 44 at 20."""
    draws = curve((6, 30.0), (2, 10.0), (16, 40.0))
    times_s = [read(draws, at) for at in (2, 4, 6, 8, 16, 20)]
    assert times_s == pytest.approx([10, 20, 30, 32, 40, 44])
    # A falling curve stays at its last point; a single one is constant below, proportional above.
    assert read(curve((1, 10.0), (2, 8.0)), 4) == pytest.approx(8.0)
    assert [read(curve((4, 20.0)), at) for at in (2, 4, 8)] == pytest.approx([20.0, 20.0, 40.0])


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (28.0, 16.0),  # slope 2: 20 - 2 * 2
        (60.0, 10.0),  # slope 10 would give 0: half the samples, at least half the time
        (12.0, 20.0),  # slope -2 would give 24: no more than the first point
    ],
)
def test_before_the_first_point_the_first_slope_continues_within_limits(
    second: float, expected: float
) -> None:
    """First point 20 at 4, second at 8; read at 2."""
    assert read(curve((4, 20.0), (8, second)), 2) == pytest.approx(expected)


def test_uncertainty_grows_with_the_distance_from_the_range() -> None:
    """20 % at a factor of e, by the square root of the distance; the curve itself has no error."""
    draws = curve((1, 1.0), (2, 2.0), num_draws=4000)
    for at, expected in ((1.5, 0.0), (2 * np.e, 0.2), (2 * np.e**4, 0.4), (1 / np.e, 0.2)):
        values = draws.read(at)
        assert np.log(values).std() == pytest.approx(expected, rel=0.05, abs=1e-12)
