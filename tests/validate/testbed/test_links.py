"""Commands that make the network; nothing is run."""

import pytest

from perfmodel.errors import MeasurementFailed
from validate.testbed import links
from validate.testbed.records import Fabric

RACKS = Fabric(
    node_of_rank=(0, 1),
    node_bytes_per_s=(25e6, 12.5e6),
    rack_of_node=(0, 1),
    rack_bytes_per_s=(5e6, 5e6),
)
PROC_NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:     100       2    0    0    0     0          0         0      300       2    0
  eth0:    5000      10    0    0    0     0          0         0     7000      12    0
"""


def test_every_link_is_shaped_at_its_rate() -> None:
    shapers = {name: " ".join(words) for name, words in links.shapers(RACKS).items()}
    assert shapers["node0"] == (
        "qdisc add dev eth0 root tbf rate 200000000bit burst 70000 limit 4194304"
    )
    assert "rate 100000000bit" in shapers["node1"]
    assert "dev trunk root tbf rate 40000000bit" in shapers["rack0"]
    assert set(shapers) == {"node0", "node1", "rack0", "rack1"}


def test_racks_hang_on_a_core_and_nodes_on_their_rack() -> None:
    assert tuple(links.ip_batches(RACKS)) == ("core", "rack0", "rack1", "node0", "node1")
    batches = links.ip_batches(RACKS)
    assert any("peer name trunk mtu 9000 netns rack1" in line for line in batches["core"])
    assert any("peer name eth0 mtu 9000 netns node1" in line for line in batches["rack1"])
    assert not any("node1" in line for line in batches["rack0"])
    assert "addr add 10.99.0.2/24 dev eth0" in batches["node1"]


def test_one_switch_needs_no_core() -> None:
    flat = Fabric(node_of_rank=(0, 1), node_bytes_per_s=(1e6, 1e6))
    assert tuple(links.ip_batches(flat)) == ("rack0", "node0", "node1")
    assert set(links.links(flat)) == {"uplink of node 0", "uplink of node 1"}


def test_counters_are_read_from_the_kernels_table() -> None:
    assert links.sent_bytes(PROC_NET_DEV, "eth0") == 7000
    with pytest.raises(MeasurementFailed, match="no device 'eth1'"):
        links.sent_bytes(PROC_NET_DEV, "eth1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node_of_rank": (0, 2)}, "nodes 0..1"),
        ({"rack_of_node": (0,)}, "one entry per node"),
        ({"rack_of_node": (0, 2)}, "racks 0..1"),
        ({"node_bytes_per_s": (0.0, 1.0)}, "greater than 0"),
    ],
)
def test_fabrics_that_do_not_add_up_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fabric.model_validate(RACKS.model_dump() | change)
