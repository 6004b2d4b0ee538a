"""However a run ends, no process of it survives."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.launch import TorchrunLauncher
from calibrate.processes import terminate_as_interrupt
from perfmodel.errors import Interrupted, MeasurementFailed
from tests.calibrate.played import Ranks, played_launcher, run_ranks, runs
from tests.existing import existing


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchrunLauncher:
    return played_launcher(tmp_path, monkeypatch)


def test_ranks_of_a_killed_torchrun_are_found_without_their_parent(
    launcher: TorchrunLauncher,
) -> None:
    ranks = Ranks()
    with pytest.raises(MeasurementFailed, match="SIGKILL"):
        run_ranks(launcher, ranks, "killed")
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []


def test_ctrl_c_ends_the_whole_tree(launcher: TorchrunLauncher) -> None:
    ranks = Ranks(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match="--resume"):
        run_ranks(launcher, ranks, "stubborn")
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []


# The second may arrive while psutil reads a file, which the collector then closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(
    launcher: TorchrunLauncher,
) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def twice() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.raise_signal(signal.SIGINT)

    ranks = Ranks(twice)
    start_s = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            run_ranks(replace(launcher, grace_s=30), ranks, "stubborn")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start_s < 15
    assert ranks.survivors() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_that_ends_the_job_is_treated_as_ctrl_c(
    launcher: TorchrunLauncher, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    ranks = Ranks(lambda: signal.raise_signal(number))
    with terminate_as_interrupt(), pytest.raises(Interrupted):
        run_ranks(launcher, ranks, "hang")
    assert ranks.survivors() == []
    assert signal.getsignal(number) is before


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_of_the_caller_leaves_no_orphan(launcher: TorchrunLauncher) -> None:
    def fail() -> None:
        raise RuntimeError("bad line")

    ranks = Ranks(fail)
    with pytest.raises(RuntimeError, match="bad line"):
        run_ranks(launcher, ranks, "hang")
    assert ranks.survivors() == []


def test_what_a_finished_run_leaves_behind_is_ended(launcher: TorchrunLauncher) -> None:
    ranks = Ranks()
    run_ranks(launcher, ranks, "leave")
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []


def test_ranks_die_with_a_parent_that_was_killed(
    launcher: TorchrunLauncher, tmp_path: Path
) -> None:
    assert launcher.agent == ("played_agent",)
    script = tmp_path / "parent.py"
    script.write_text(
        "from calibrate.launch import Launch, TorchrunLauncher\n"
        "from calibrate.topology import Topology\n"
        "topology = Topology(num_nodes=1, ranks_per_node=1, node_rank=0, master_addr='x',\n"
        "    master_port=None)\n"
        "TorchrunLauncher(agent=('played_agent',)).run(Launch(arguments=('mortal',), topology=topology,\n"
        "    conditions={}, on_line=lambda line: print(line, flush=True), stall_timeout_s=60))\n"
    )
    # A killed parent cannot remove its folder of logs.
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environ
    )
    with parent:
        pids = list(map(int, existing(parent.stdout).readline().split()[1:]))
        parent.kill()
    assert len(pids) == 2
    assert _all_end(pids, within_s=5)


def _all_end(pids: list[int], *, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(map(runs, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
