"""Which links a group of devices uses, by hand."""

import pytest

from perfmodel.machine import Cluster, SlowDevice, SlowLink, Tier, Traffic


def cluster(**changes: tuple[object, ...]) -> Cluster:
    """4 nodes of 8: 100 GB/s inside; two adapters of 10 GB/s each between nodes."""
    tiers = (
        Tier(name="node", of="device", count=8, link_bytes_per_s=100e9, latency_s=1e-6),
        Tier(name="fabric", of="node", count=4, links=2, link_bytes_per_s=10e9, latency_s=4e-6),
    )
    return Cluster(name="small", tiers=tiers, **changes)  # type: ignore[arg-type]


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


def test_a_slow_link_counts_as_soon_as_its_node_takes_part() -> None:
    slow = cluster(slow_links=(SlowLink(tier="fabric", member=2, factor=0.5),))
    assert slow.levels(16)[1].bytes_per_s == 20e9
    assert slow.levels(17)[1].bytes_per_s == 10e9


def test_a_slow_device_counts_as_soon_as_it_takes_part() -> None:
    slow = cluster(slow_devices=(SlowDevice(device=9, factor=1.2),))
    assert [slow.slowest_device(n) for n in (9, 10)] == [1.0, 1.2]


def test_other_traffic_and_oversubscription_take_their_part() -> None:
    busy = cluster(traffic=(Traffic(tier="fabric", bytes_per_s=5e9),))
    assert busy.levels(16)[1].bytes_per_s == pytest.approx(15e9)
    thin = Tier(
        name="t", of="device", count=2, link_bytes_per_s=8e9, latency_s=0.0, oversubscription=4
    )
    assert Cluster(name="thin", tiers=(thin,)).levels(2)[0].bytes_per_s == 2e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slow_links": (SlowLink(tier="fabrik", member=0, factor=0.5),)}, "tier must be one of"),
        ({"slow_links": (SlowLink(tier="fabric", member=4, factor=0.5),)}, "must be below 4"),
        ({"slow_devices": (SlowDevice(device=32, factor=2.0),)}, "device must be below 32"),
        ({"traffic": (Traffic(tier="fabric", bytes_per_s=20e9),)}, "must leave something"),
    ],
)
def test_what_does_not_exist_is_refused(
    changes: dict[str, tuple[object, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(**changes)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="num_devices must be <= 32, got 33"):
        cluster().levels(33)
