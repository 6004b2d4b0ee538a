"""All-reduces over tiers: sums by hand, and what must hold on every cluster."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.collectives import (
    SWITCH_LATENCY_S,
    LevelCost,
    SwitchedSum,
    all_reduce_s,
    bottleneck,
    broadcast_s,
    half_s,
    start_s,
)
from perfmodel.machine import Cluster, Level, Tier

MS = 1e-3
LIBRARIES = st.sampled_from(["gloo", "nccl"])
ALL_LIBRARIES = st.sampled_from(["gloo", "nccl", "unknown"])


def priced(cluster: Cluster, num_devices: int) -> list[LevelCost]:
    def transfer(bytes_per_s: float, size: float | np.ndarray) -> np.ndarray:
        return np.atleast_1d(size / bytes_per_s)

    return [
        LevelCost(
            tier=level.tier,
            members=level.members,
            crossings=level.crossings,
            latency_s=np.array([level.latency_s]),
            transfer_s=lambda size, rate=level.bytes_per_s: transfer(rate, size),  # type: ignore[misc]
            switch=switched(level) if level.in_switch_reduction else None,
        )
        for level in cluster.levels(num_devices)
    ]


def switched(level: Level) -> SwitchedSum:
    rate = level.bytes_per_s * level.in_switch_reduction
    return SwitchedSum(
        latency_s=np.array([SWITCH_LATENCY_S]),
        transfer_s=lambda size: np.atleast_1d(size * (1 + 1 / level.members) / rate),
    )


def time(cluster: Cluster, num_devices: int, size: float, library: str) -> float:
    levels = priced(cluster, num_devices)
    return float(all_reduce_s(levels, size, library=library)[0]) if levels else 0.0


def tier(name: str, of: str, count: int, rate: float, latency_s: float) -> Tier:
    return Tier(name=name, of=of, count=count, link_bytes_per_s=rate, latency_s=latency_s)


def nodes(inside: int, count: int, rate: float = 5e5, latency_s: float = 3 * MS) -> Cluster:
    """Nodes of ``inside`` devices: 1 MB/s and 1 ms inside, a rate and more latency between."""
    inner, outer = (
        tier("node", "device", inside, 1e6, MS),
        tier("fabric", "node", count, rate, latency_s),
    )
    return Cluster(name="nodes", tiers=(inner, outer) if count > 1 else (inner,))


def with_switches(cluster: Cluster, reached: float) -> Cluster:
    inner, *outer = cluster.tiers
    adding = dataclasses.replace(inner, in_switch_reduction=reached)
    return dataclasses.replace(cluster, tiers=(adding, *outer))


TWO_NODES, SIX, CHAIN, NODE = nodes(4, 2), nodes(3, 2), nodes(2, 64, 1e6, MS), nodes(8, 1)
SLOW = Cluster(name="slow", tiers=(tier("room", "device", 8, 1.0, MS),))
ADDED = SWITCH_LATENCY_S


@pytest.mark.parametrize(
    ("cluster", "devices", "size", "library", "expected_s"),
    [
        # A ring waits for the slowest tier: 12 messages of latency 1 ms, 2 of 4 ms, 14 of 1 kB at 0.5 MB/s.
        (TWO_NODES, 8, 8000, "gloo", 48 * MS),
        # A hierarchy: inside 4 messages of 2 kB, 4 * (1 + 2); between 2 of 3 kB, 2 * (4 + 6).
        (SIX, 6, 6000, "unknown", 32 * MS),
        # NCCL has none: its ring has 8 messages of latency 1 ms, 2 of 4 ms, and 10 of 1 kB at 0.5 MB/s.
        (SIX, 6, 6000, "nccl", 36 * MS),
        # A tree wins by latency: 2 * (1 * 1 + 6 * 2); the ring's are 380 ms.
        (CHAIN, 128, 1, "nccl", 2 * (1 + 6 * 2) * MS),
        # A switch that adds: 9 kB at 0.9 of the rate are 10 ms; the ring takes 14 * (1 + 1) ms.
        (NODE, 8, 8000, "nccl", 28 * MS),
        (with_switches(NODE, 0.9), 8, 8000, "nccl", 10 * MS + ADDED),
        (with_switches(NODE, 0.9), 8, 8000, "gloo", 28 * MS),
        # Trees over nodes whose switches add: inside 10 kB in 10 ms; between two nodes 8 kB once in 16 ms,
        # and 2 * 4 ms of latency; between four nodes twice.
        (with_switches(TWO_NODES, 1.0), 8, 8000, "nccl", 24 * MS + ADDED),
        (with_switches(nodes(4, 4), 1.0), 16, 8000, "nccl", 48 * MS + ADDED),
        # Halving and doubling: 6 messages, 2 * (4 + 2 + 1) s; a ring has 14 and as many bytes. Of 6 ranks two
        # send all to a partner first, and get all back: 2 * (8 + 4 + 2) s; a ring has less to send.
        (SLOW, 8, 8, "unknown", 14.0 + 6 * MS),
        (SLOW, 8, 8, "gloo", 14.0 + 14 * MS),
        (SLOW, 6, 8e-9, "unknown", 6 * MS + 28e-9),
        (SLOW, 6, 8, "unknown", 10 * (8 / 6 + MS)),
    ],
)
def test_all_reduces_by_hand(
    cluster: Cluster, devices: int, size: float, library: str, expected_s: float
) -> None:
    within = 1e-3 if cluster is CHAIN else 1e-6  # a byte takes time too
    assert time(cluster, devices, size, library) == pytest.approx(expected_s, rel=within)


def test_what_binds_is_named() -> None:
    for cluster, size, library, found in (
        (SIX, 6000, "unknown", "fabric (bandwidth, hierarchical of 2)"),
        (with_switches(TWO_NODES, 1.0), 8000, "nccl", "fabric (bandwidth, NVLS tree of 2)"),
    ):
        assert bottleneck(priced(cluster, cluster.num_devices), size, library=library) == found


def test_broadcasts_by_hand() -> None:
    """1 kB doubles in every tier: 2 rounds of 1 + 1 ms inside, 1 of 4 + 2 ms between.

    NCCL's goes along a chain: 6 sends of 1 ms inside, 1 of 4 ms between, and 2 ms over the slower tier once.
    """
    for library, expected_s in (("gloo", 10 * MS), ("nccl", 12 * MS)):
        [found_s] = broadcast_s(priced(TWO_NODES, 8), 1000, library=library)
        assert found_s == pytest.approx(expected_s)


def test_an_all_gather_is_half_of_a_ring_and_starts_once() -> None:
    """7 of the 14 messages: 24 ms; both tiers start."""
    levels = priced(TWO_NODES, 8)
    assert half_s(levels, 8000, library="gloo") == pytest.approx(24 * MS)
    slow = [dataclasses.replace(level, start_s=np.array([5 * MS])) for level in levels]
    assert half_s(slow, 8000, library="gloo") == pytest.approx(34 * MS)


def test_nccl_takes_small_arrays_by_its_low_latency_protocol() -> None:
    """Ring of 4 over told links, 10 us each: LL leaves 2 us and 0.4 of the rate, LL128 5 us and 0.94."""
    filed = dataclasses.replace(
        LevelCost(
            tier="node",
            members=4,
            crossings=3,
            inside_node=True,
            latency_s=np.array([10e-6]),
            transfer_s=lambda size: np.atleast_1d(size / 1e9),
        ),
        is_measured=False,
    )

    def ring_s(library: str, size: float, **changed: Any) -> float:
        level = dataclasses.replace(filed, **changed)
        return float(all_reduce_s([level], size, library=library)[0])

    assert ring_s("nccl", 4) == pytest.approx(6 * 2e-6, rel=1e-2)
    assert ring_s("nccl", 16e3) == pytest.approx(6 * (5e-6 + 4e-6 / 0.9375))
    assert ring_s("nccl", 4e6) == pytest.approx(6 * (10e-6 + 1e-3))
    assert ring_s("nccl", 4, is_measured=True) == pytest.approx(6 * 10e-6, rel=1e-2)
    assert ring_s("gloo", 4) == pytest.approx(6 * 10e-6, rel=1e-2)
    # A protocol spares 12 us at most, and no distance.
    assert ring_s("nccl", 4, latency_s=np.array([1e-2])) == pytest.approx(6 * (1e-2 - 12e-6))


def test_large_arrays_of_nccl_start_later() -> None:
    """8 us, and of 4 MB on 4 ranks half of 15 us more."""
    assert start_s(0, 4, library="nccl") == pytest.approx(8e-6)
    assert start_s(4e6, 4, library="nccl") == pytest.approx(15.5e-6)
    assert start_s(4e6, 4, library="gloo") == 0


@pytest.mark.parametrize(
    ("ring_rate", "reached", "measured", "within"),
    [(367.6e9, 0.85, 482e9, 0.02), (682e9, 0.74, 838e9, 0.07)],
)
def test_switches_as_others_measured_them(
    ring_rate: float, reached: float, measured: float, within: float
) -> None:
    """Bus bandwidth of 8 H100 and 8 B200, from that of their rings and what NCCL's tuner grants.

    .. [1] S. Bekman, Machine Learning Engineering Open Book, 2026: rings 367.6 and 682 GB/s, NVLS 482
       and 838 GB/s; four and fewer H100 gain nothing.
    """
    node = Cluster(name="node", tiers=(tier("node", "device", 8, ring_rate, 3.4e-6),))
    adding, size = with_switches(node, reached), 16 * 2**30
    assert 2 * 7 / 8 * size / time(adding, 8, size, "nccl") == pytest.approx(measured, rel=within)
    gain = time(node, 4, size, "nccl") / time(adding, 4, size, "nccl")
    assert 1.0 <= gain < 1.05


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    tiers, inner = [], "device"
    for name in ("node", "pod", "data_centre")[: draw(st.integers(1, 3))]:
        rate, latency_s = draw(st.floats(1e5, 1e12)), draw(st.floats(0, 1e-2))
        tiers.append(tier(name, inner, draw(st.integers(1, 9)), rate, latency_s))
        inner = name
    return Cluster(name="any", tiers=tuple(tiers))


@settings(max_examples=80)
@given(cluster=clusters(), size=st.floats(1, 1e10), library=LIBRARIES, data=st.data())
def test_more_devices_slower_links_and_longer_ways_never_help(
    cluster: Cluster, size: float, library: str, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, cluster.num_devices))
    base_s = time(cluster, n, size, library)
    more = data.draw(st.integers(n, cluster.num_devices))
    assert time(cluster, more, size, library) >= base_s * (1 - 1e-9)
    assert time(cluster, n, size * 2, library) >= base_s * (1 - 1e-9)
    place = data.draw(st.integers(0, len(cluster.tiers) - 1))
    old = cluster.tiers[place]
    for worse in (
        dataclasses.replace(old, link_bytes_per_s=old.link_bytes_per_s / 2),
        dataclasses.replace(old, latency_s=old.latency_s + 1e-4),
        dataclasses.replace(old, oversubscription=2.0),
    ):
        tiers = (*cluster.tiers[:place], worse, *cluster.tiers[place + 1 :])
        slower = dataclasses.replace(cluster, tiers=tiers)
        assert time(slower, n, size, library) >= base_s * (1 - 1e-9)


@settings(max_examples=80)
@given(cluster=clusters(), size=st.floats(1, 1e10), library=ALL_LIBRARIES)
def test_no_algorithm_sends_less_over_a_tier_than_its_members_have_to_learn(
    cluster: Cluster, size: float, library: str
) -> None:
    """Conservation of bytes: of m members each sends (m - 1) / m of the array, and as much again.

    The bound of every all-reduce in a tier that joins m members, whatever happens inside them.
    """
    found_s = time(cluster, cluster.num_devices, size, library)
    for level in cluster.levels(cluster.num_devices):
        least_bytes = 2 * (level.members - 1) / level.members * size
        assert found_s >= least_bytes / level.bytes_per_s * (1 - 1e-9)


@settings(max_examples=80)
@given(
    cluster=clusters(),
    sizes=st.lists(st.floats(1, 1e10), min_size=1, max_size=8),
    library=ALL_LIBRARIES,
)
def test_many_sizes_at_once_cost_what_each_costs_alone(
    cluster: Cluster, sizes: list[float], library: str
) -> None:
    levels = priced(cluster, cluster.num_devices)
    if levels:
        column = np.array(sizes)[:, np.newaxis]
        together_s = all_reduce_s(levels, column, library=library)[:, 0]
        alone_s = [float(all_reduce_s(levels, size, library=library)[0]) for size in sizes]
        assert together_s.tolist() == pytest.approx(alone_s, rel=1e-12)
