"""Commands that make the network; nothing is run."""

import pytest

from perfmodel.errors import MeasurementFailed
from validate.testbed import links
from validate.testbed.records import Fabric

FABRIC = Fabric(num_ranks=2, bytes_per_s=25e6)
PROC_NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:     100       2    0    0    0     0          0         0      300       2    0
  eth0:    5000      10    0    0    0     0          0         0     7000      12    0
"""


def test_nodes_hang_on_a_switch_and_send_at_their_rate() -> None:
    assert " ".join(links.shaper(FABRIC)) == (
        "qdisc add dev eth0 root tbf rate 200000000bit burst 70000 limit 4194304"
    )
    batches = links.ip_batches(FABRIC)
    assert tuple(batches) == ("switch", "node0", "node1")
    assert any("peer name eth0 mtu 9000 netns node1" in line for line in batches["switch"])
    assert "addr add 10.99.0.2/24 dev eth0" in batches["node1"]
    assert links.links(FABRIC) == {"uplink of node 0": "node0", "uplink of node 1": "node1"}


def test_counters_are_read_from_the_kernels_table() -> None:
    assert links.sent_bytes(PROC_NET_DEV) == 7000
    with pytest.raises(MeasurementFailed, match="no device 'eth0'"):
        links.sent_bytes(PROC_NET_DEV.replace("eth0", "eth1"))
