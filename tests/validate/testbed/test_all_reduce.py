"""All-reduces over shaped links: loads by hand, laws, recovery."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.validate.testbed.played import PlayedCluster, known_ring
from validate.testbed import plan
from validate.testbed.all_reduce import ShapedRing, message_bytes_of, ring_bytes
from validate.testbed.campaign import play
from validate.testbed.plan import flat
from validate.testbed.records import CollectiveRun, Fabric, TrainingRun


def time_s(size_bytes: int, fabric: Fabric) -> float:
    ring = known_ring()
    none = np.zeros(1)
    return float(ring.time_s(size_bytes, fabric, num_cores=2, burst_s=none)[0])


def test_the_time_of_a_large_all_reduce_by_hand() -> None:
    """4 ranks, 10 MB at 100 Mbit/s: (15 MB x 1.01 + 6 x 698 B) / 12.5 MB/s + 0.4 ms + 6 x 0.1 ms = 1.2133 s.

    The host needs 4 x 0.4 ms + 48 x 37.5 us + 60 MB x 1 ns = 63 ms on two cores: nothing beside it.
    """
    assert time_s(10_000_000, flat(4, 100)) == pytest.approx(1.213335, abs=1e-6)


def test_the_machine_limits_small_all_reduces_of_many_ranks() -> None:
    """16 ranks: (16 x 0.4 ms + 960 x 37.5 us + 30 x 1 kB x 1 ns) / 2 = 21.2 ms, far above the wire."""
    assert time_s(1000, flat(16, 1000)) == pytest.approx(21.215e-3, abs=1e-6)


def test_a_ring_sends_what_its_edges_carry_and_one_rank_takes_no_time() -> None:
    """Edges of four ranks carry 2 x 3 / 4 of the array."""
    assert ring_bytes(1000, 4) == pytest.approx(1500)
    assert ring_bytes(1000, 1) == 0.0
    assert time_s(10**7, flat(1, 100)) == 0.0


sizes = st.integers(min_value=1, max_value=10**8)
ranks = st.integers(min_value=2, max_value=32)
rates = st.floats(min_value=1, max_value=1e5)


@given(size=sizes, num_ranks=ranks, rate=rates, faster=st.floats(min_value=1, max_value=100))
def test_more_bandwidth_never_hurts(size: int, num_ranks: int, rate: float, faster: float) -> None:
    slow_s = time_s(size, flat(num_ranks, rate))
    assert time_s(size, flat(num_ranks, rate * faster)) <= slow_s * (1 + 1e-12)


@given(size=sizes, num_ranks=ranks, rate=rates)
def test_more_bytes_and_more_ranks_never_help(size: int, num_ranks: int, rate: float) -> None:
    base_s = time_s(size, flat(num_ranks, rate))
    assert time_s(2 * size, flat(num_ranks, rate)) >= base_s
    assert time_s(size, flat(num_ranks + 1, rate)) >= base_s


def test_known_parameters_are_recovered_from_two_ranks() -> None:
    cluster = PlayedCluster()
    settings = (*plan.collectives(), *plan.machine_costs(0)[:2])
    played = [play(cluster, setting) for setting in settings]
    runs = [run for run in played if isinstance(run, CollectiveRun)]
    found = ShapedRing.fit(runs, message_bytes=500.0, num_draws=5, rng=np.random.default_rng(0))
    truth = known_ring().nominal()
    for name, value in found.nominal().items():
        tolerance = 0.15 if name == "launch_s" else 0.05
        assert value == pytest.approx(truth[name], rel=tolerance), name
    assert found.overhead.shape == (5,)


def test_what_comes_with_every_message_is_read_off_the_counters() -> None:
    cluster = PlayedCluster()
    pairs = [s for s in plan.trainings() if s.fabric.num_ranks == 2][:4]
    played = [play(cluster, setting) for setting in pairs]
    runs = [run for run in played if isinstance(run, TrainingRun)]
    assert message_bytes_of(runs) == pytest.approx(500.0, rel=0.01)
