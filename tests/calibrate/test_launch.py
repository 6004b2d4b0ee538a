"""What the user reads when ranks crash or hang, and how ranks are started."""

import socket
import time
from pathlib import Path

import pytest

from calibrate.launch import Launch, TorchrunLauncher
from calibrate.topology import Topology
from perfmodel.errors import MeasurementFailed, UsageError
from tests.calibrate.played import Ranks, played_launcher, run_ranks


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchrunLauncher:
    return played_launcher(tmp_path, monkeypatch)


def test_a_crash_is_told_in_one_line_and_leaves_no_orphan(launcher: TorchrunLauncher) -> None:
    ranks = Ranks()
    with pytest.raises(MeasurementFailed) as caught:
        run_ranks(launcher, ranks, "crash")
    assert str(caught.value) == (
        "torchrun must exit with 0, got exit code 3: ValueError: planted; "
        "what was measured is kept; mend the cause and repeat with --resume"
    )
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []


@pytest.mark.parametrize("how", ["hang", "stubborn", "orphan"])
def test_a_hang_ends_after_the_stall_timeout(launcher: TorchrunLauncher, how: str) -> None:
    ranks = Ranks()
    with pytest.raises(MeasurementFailed, match="progress within 1 s, got none"):
        run_ranks(launcher, ranks, how, stall_s=1.0)
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []


def test_progress_keeps_slow_ranks_alive(launcher: TorchrunLauncher) -> None:
    ranks = Ranks()
    stop_at_s = time.monotonic() + 1.2

    def last_progress() -> float:
        return min(time.monotonic(), stop_at_s)

    with pytest.raises(MeasurementFailed, match="got none"):
        run_ranks(launcher, ranks, "hang", stall_s=0.5, last_progress=last_progress)
    assert time.monotonic() >= stop_at_s + 0.5
    assert ranks.survivors() == []


def test_a_busy_port_is_refused_before_anything_starts(launcher: TorchrunLauncher) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        topology = Topology(
            num_nodes=1,
            ranks_per_node=1,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=port,
            source="flags",
        )
        ranks = Ranks()
        with pytest.raises(UsageError, match=f"--master-port: must be free, got {port}"):
            run_ranks(launcher, ranks, "quiet", topology=topology)
    assert ranks.lines == []


def test_several_nodes_meet_at_the_master() -> None:
    topology = Topology(
        num_nodes=2,
        ranks_per_node=4,
        node_rank=1,
        master_addr="n0",
        master_port=20_007,
        source="slurm",
    )
    launch = Launch(arguments=("order",), topology=topology, conditions={}, stall_timeout_s=1.0)
    command = TorchrunLauncher().command(launch, "logs")
    assert command[1:] == (
        *("-m", "calibrate.processes", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4"),
        *("--node-rank=1", "--master-addr=n0", "--master-port=20007", "--log-dir=logs"),
        *("-m", "calibrate.worker", "order"),
    )


def test_a_node_that_waits_for_others_says_so(launcher: TorchrunLauncher) -> None:
    topology = Topology(
        num_nodes=2,
        ranks_per_node=1,
        node_rank=1,
        master_addr="n0",
        master_port=20_007,
        source="flags",
    )
    with pytest.raises(MeasurementFailed, match="each of the 2 nodes"):
        run_ranks(launcher, Ranks(), "hang", topology=topology, stall_s=0.5)
