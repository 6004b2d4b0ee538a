"""Which links a group of devices uses, by hand."""

import pytest

from perfmodel.machine import Cluster, Tier


def cluster() -> Cluster:
    """4 nodes of 8: 100 GB/s inside; two adapters of 10 GB/s each between nodes."""
    tiers = (
        Tier(name="node", of="device", count=8, link_bytes_per_s=100e9, latency_s=1e-6),
        Tier(name="fabric", of="node", count=4, links=2, link_bytes_per_s=10e9, latency_s=4e-6),
    )
    return Cluster(name="small", tiers=tiers)


def test_devices_fill_node_by_node() -> None:
    """12 devices: 8 and 4; a chain through all crosses inside nodes 10 times, between once."""
    inside, between = cluster().levels(12)
    assert (inside.members, inside.crossings, inside.bytes_per_s) == (8, 10, 100e9)
    assert (between.members, between.crossings, between.bytes_per_s) == (2, 1, 20e9)
    assert between.latency_s == pytest.approx(5e-6)
    assert [level.tier for level in cluster().levels(8)] == ["node"]
    assert cluster().levels(1) == ()


def test_a_node_sends_no_faster_than_its_devices() -> None:
    wide = Tier(name="fabric", of="node", count=4, link_bytes_per_s=1e12, latency_s=0.0)
    found = Cluster(name="wide", tiers=(cluster().tiers[0], wide))
    assert found.levels(16)[1].bytes_per_s == 800e9
    assert found.levels(9)[1].bytes_per_s == 800e9


def test_oversubscription_takes_its_part() -> None:
    thin = Tier(
        name="t", of="device", count=2, link_bytes_per_s=8e9, latency_s=0.0, oversubscription=4
    )
    assert Cluster(name="thin", tiers=(thin,)).levels(2)[0].bytes_per_s == 2e9


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="num_devices must be <= 32, got 33"):
        cluster().levels(33)
