"""Links of nodes; ranks that fail: the first one is named, whatever its end did to the others."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from perfmodel.errors import MeasurementFailed
from validate.testbed.server import Found, ip_batches, shaper, together


def _breaks() -> Found:
    raise ValueError("no route")


def _ends() -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("first", "says"), [(_breaks, "ValueError: no route"), (_ends, "CrashedError: .*SIGKILL")]
)
def test_the_rank_that_failed_first_is_named(first: Callable[[], Found], says: str) -> None:
    """Rank 0 fails because rank 1 has ended; both have answered before anybody reads."""
    peer, alive = os.pipe()
    either, running = os.pipe()

    def second() -> Found:
        os.close(alive)
        os.read(peer, 1)
        raise ConnectionError("closed by peer")

    def plays() -> Iterator[Callable[[], Found]]:
        yield second
        yield first
        os.close(alive)
        os.close(running)
        os.read(either, 1)

    with pytest.raises(MeasurementFailed, match=f"rank 1 failed: {says}"):
        together(plays())
    os.close(peer)
    os.close(either)


def test_what_ranks_found_is_in_their_order() -> None:
    plays = (lambda rank=rank: [[(rank, rank + 1.0)]] for rank in (0.0, 1.0, 2.0))
    assert together(plays) == [[[(rank, rank + 1.0)]] for rank in (0.0, 1.0, 2.0)]


def test_nodes_hang_on_a_switch_and_send_at_their_rate() -> None:
    assert " ".join(shaper(25e6)) == (
        "qdisc add dev eth0 root tbf rate 200000000bit burst 70000 limit 4194304"
    )
    batches = ip_batches(2)
    assert tuple(batches) == ("switch", "node0", "node1")
    assert any("peer name eth0 mtu 9000 netns node1" in line for line in batches["switch"])
    assert "addr add 10.99.0.2/24 dev eth0" in batches["node1"]
