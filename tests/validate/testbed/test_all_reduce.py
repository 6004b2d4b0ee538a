"""All-reduces over shaped links: loads by hand, laws, recovery."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.validate.testbed.played import PlayedCluster, known_ring
from validate.testbed import plan
from validate.testbed.all_reduce import (
    ShapedRing,
    message_bytes_of,
    path,
    ring_bytes,
    ring_crossings,
)
from validate.testbed.campaign import play
from validate.testbed.records import CollectiveRun, Fabric, TrainingRun

MBIT = 125_000.0


def flat(num_ranks: int, *mbit: float) -> Fabric:
    rates = mbit * num_ranks if len(mbit) == 1 else mbit
    return Fabric(
        node_of_rank=tuple(range(num_ranks)), node_bytes_per_s=tuple(rate * MBIT for rate in rates)
    )


def time_s(size_bytes: int, fabric: Fabric) -> float:
    ring = known_ring()
    none = np.zeros(1)
    return float(ring.time_s(size_bytes, fabric, num_cores=2, burst_s=none)[0])


def test_a_ring_in_block_order_crosses_every_uplink_once() -> None:
    fabric = Fabric(node_of_rank=(0, 0, 1, 1), node_bytes_per_s=(1e6, 1e6))
    assert ring_crossings(fabric) == {"uplink of node 0": 1, "uplink of node 1": 1}


def test_racks_are_crossed_where_neighbours_live_in_different_ones() -> None:
    fabric = Fabric(
        node_of_rank=(0, 1, 2, 3),
        node_bytes_per_s=(1e6,) * 4,
        rack_of_node=(0, 0, 1, 1),
        rack_bytes_per_s=(1e6, 1e6),
    )
    crossings = ring_crossings(fabric)
    assert crossings["uplink of rack 0"] == crossings["uplink of rack 1"] == 1
    assert path(fabric, 0, 1) == ("uplink of node 0",)
    assert path(fabric, 1, 2) == ("uplink of node 1", "uplink of rack 0")
    # Edges carry 2 * 3 / 4 of 1000 bytes.
    assert ring_bytes(1000, fabric)["uplink of rack 1"] == pytest.approx(1500)


def test_the_time_of_a_large_all_reduce_by_hand() -> None:
    """4 ranks, 10 MB at 100 Mbit/s: (15 MB x 1.01 + 6 x 698 B) / 12.5 MB/s + 0.4 ms + 6 x 0.1 ms = 1.2133 s.

    The host needs 4 x 0.4 ms + 48 x 37.5 us + 60 MB x 1 ns = 63 ms on two cores: nothing beside it.
    """
    assert time_s(10_000_000, flat(4, 100)) == pytest.approx(1.213335, abs=1e-6)


def test_the_machine_limits_small_all_reduces_of_many_ranks() -> None:
    """16 ranks: (16 x 0.4 ms + 960 x 37.5 us + 30 x 1 kB x 1 ns) / 2 = 21.2 ms, far above the wire."""
    assert time_s(1000, flat(16, 1000)) == pytest.approx(21.215e-3, abs=1e-6)


def test_ranks_of_one_node_need_no_link_and_one_rank_no_time() -> None:
    alone = Fabric(node_of_rank=(0, 0), node_bytes_per_s=(1e3,))
    assert float(known_ring().wire_s(10**9, alone)[0]) == pytest.approx(6e-4)
    assert float(known_ring().burst_s(alone)[0]) == 0.0
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


@given(size=sizes, num_ranks=st.integers(2, 16), rate=rates, uplink=rates)
def test_a_tier_never_helps(size: int, num_ranks: int, rate: float, uplink: float) -> None:
    one_switch = flat(num_ranks, rate)
    racks = one_switch.model_copy(
        update={
            "rack_of_node": tuple(node % 2 for node in range(num_ranks)),
            "rack_bytes_per_s": (uplink * MBIT,) * 2,
        }
    )
    assert time_s(size, racks) >= time_s(size, one_switch) * (1 - 1e-12)


@given(
    nodes=st.lists(st.integers(0, 5), min_size=2, max_size=16),
    racks=st.tuples(*[st.integers(0, 2)] * 6),
    size=sizes,
)
def test_every_byte_that_leaves_a_rank_crosses_each_tier_on_its_way_once(
    nodes: list[int], racks: tuple[int, ...], size: int
) -> None:
    """Conservation of bytes, wherever the ranks stand: edges of the ring, tier by tier."""
    fabric = Fabric(
        node_of_rank=tuple(nodes),
        node_bytes_per_s=(1e6,) * 6,
        rack_of_node=racks,
        rack_bytes_per_s=(1e6,) * 3,
    )
    edges = list(zip(nodes, (*nodes[1:], nodes[0]), strict=True))
    of_an_edge = 2 * (len(nodes) - 1) / len(nodes) * size
    sent = ring_bytes(size, fabric)
    for tier, ends in (
        ("node", edges),
        ("rack", [(racks[source], racks[target]) for source, target in edges]),
    ):
        crossing = sum(source != target for source, target in ends)
        found = sum(value for link, value in sent.items() if link.startswith(f"uplink of {tier}"))
        assert found == pytest.approx(of_an_edge * crossing)


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
