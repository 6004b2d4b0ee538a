"""The testbed for real: namespaces, shaped links, gloo. Under a minute."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from perfmodel.errors import MeasurementFailed
from validate.testbed.cluster import Cluster, CollectiveSetting, obstacle, running_server

MBIT = 125_000.0
ROOT = Path(__file__).resolve().parent.parent.parent.parent
OBSTACLE = "torch is not installed" if find_spec("torch") is None else obstacle()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no shaped namespaces here: {OBSTACLE}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_server() as server:
        yield server


def setting(collective: str, *sizes_bytes: int, **changes: object) -> CollectiveSetting:
    given = {"name": collective, "collective": collective, "num_ranks": 2, "mbit": 200.0}
    return CollectiveSetting.model_validate({**given, "sizes_bytes": sizes_bytes, **changes})


@pytest.mark.parametrize(
    ("collective", "passes"),
    [
        ("all_reduce", 1.0),
        ("reduce_scatter", 1.0),  # torch's is an all-reduce of which a part is kept
        ("all_gather", 0.5),
        ("all_to_all", 0.5),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_collectives_send_over_their_links_what_they_are_said_to(
    cluster: Cluster, collective: str, passes: float
) -> None:
    """1 MiB at 200 Mbit/s between two: each link carries this part of the array.

    Large all-gathers and all-to-alls of two ranks take up to twice as long; why is not known. The rest
    of the upper bound is for machines that are busy.
    """
    run = cluster.play(setting(collective, 1000, 2**20, target_s=0.02))
    assert [len(durations_s) >= 3 for durations_s in run.durations_s] == [True, True]
    wire_s = passes * 2**20 / (200 * MBIT)
    assert 0.85 * wire_s < np.median(run.durations_s[1]) < 3 * wire_s


def test_a_ring_of_four_moves_three_quarters_of_the_array_twice(cluster: Cluster) -> None:
    """4 MiB at 200 Mbit/s: 1.5 arrays over each link take 252 ms, plus headers."""
    run = cluster.play(setting("all_reduce", 4 * 2**20, num_ranks=4))
    assert np.median(run.durations_s[0]) == pytest.approx(0.252, rel=0.06)


def test_a_rank_that_fails_is_named_and_the_server_goes_on(cluster: Cluster) -> None:
    with pytest.raises(MeasurementFailed, match=r"huge: testbed: rank \d failed: RuntimeError"):
        cluster.play(setting("all_reduce", 10**15, name="huge"))
    assert cluster.play(setting("all_reduce", 1000)).durations_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "perfmodel", "validate", "network", "--out", str(tmp_path))
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        children: list[psutil.Process] = []
        deadline_s = time.monotonic() + 120
        while len(children) < 3 and time.monotonic() < deadline_s:
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(children) >= 3
        time.sleep(0.5)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        process.wait(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    if number is not signal.SIGKILL:
        assert process.returncode == 130
    assert not list(Path("/run/netns").glob("node*"))


def test_a_warm_up_uses_the_burst_of_idle_links_up(cluster: Cluster) -> None:
    """16 KiB at 120 Mbit/s take 1.1 ms; the first four fit into what idle links let through at once."""
    # A busy machine that pauses for 5 ms lets links save up again: one of many attempts is spared.
    for _ in range(40):
        cold, warm = (
            cluster.play(setting("send_recv", 16_384, mbit=120.0, **changes)).durations_s[0]
            for changes in ({"warm_up_bytes": 0}, {})
        )
        steady_s = np.median(warm)
        if min(cold[:3]) < 0.5 * steady_s and np.median(warm[:3]) > 0.7 * steady_s:
            break
    assert min(cold[:3]) < 0.5 * steady_s
    assert np.median(warm[:3]) > 0.7 * steady_s
