"""The cost of a checkpoint, read off those that were timed."""

import pytest

from perfmodel.cost.memory import checkpoint_draws, rate_bytes_per_s
from perfmodel.machine.machine import Evidence
from perfmodel.machine.measured import CheckpointProfile, CurvePoint
from perfmodel.units import Bytes


def timed(size_bytes: Bytes, time_s: float) -> CurvePoint:
    return CurvePoint(at=size_bytes, time_s=time_s, relative_error=0.05)


#: Writes: 0.1 s and 100 MB/s; reads twice as fast.
PROFILE = CheckpointProfile(
    write=(timed(10**6, 0.11), timed(10**8, 1.1)),
    read=(timed(10**6, 0.055), timed(10**8, 0.55)),
)


def test_a_larger_file_goes_on_at_the_measured_rate() -> None:
    cost = checkpoint_draws(PROFILE, 10**10)
    assert cost.write.nominal == pytest.approx(100.1)
    assert cost.read.nominal == pytest.approx(50.05)
    assert cost.evidence is Evidence.EXTRAPOLATED
    assert cost.write.p5 < 0.8 * 100.1
    assert cost.write.p95 > 1.2 * 100.1


def test_between_two_files_the_uncertainty_is_that_of_the_files() -> None:
    cost = checkpoint_draws(PROFILE, 5 * 10**7)
    assert cost.write.nominal == pytest.approx(0.6)
    assert cost.evidence is Evidence.INTERPOLATED
    assert cost.write.p95 < 1.1 * 0.6


def test_parts_take_what_a_file_of_their_size_takes_as_an_assumption() -> None:
    cost = checkpoint_draws(PROFILE, 8 * 10**8, writers=8)
    assert cost.write.nominal == pytest.approx(1.1)
    assert cost.evidence is Evidence.ASSUMED


def test_the_rate_is_that_of_the_largest_file() -> None:
    assert rate_bytes_per_s(PROFILE.write) == pytest.approx(10**8 / 1.1)


@pytest.mark.parametrize(("size_bytes", "writers"), [(0, 1), (10, 0)])
def test_nothing_to_write_and_nobody_to_write_are_refused(size_bytes: int, writers: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        checkpoint_draws(PROFILE, size_bytes, writers=writers)
