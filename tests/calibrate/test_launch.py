"""What the user reads when ranks crash or hang, and how ranks are started."""

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.launch import Launch, TorchrunLauncher, exit_text, first_failure
from perfmodel.errors import MeasurementFailed, UsageError
from tests.calibrate.played import ALONE, Ranks, played_launcher, run_ranks


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
    with pytest.raises(MeasurementFailed, match="progress within 500 ms, got none"):
        run_ranks(launcher, ranks, how, stall_s=0.5)
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
        topology, ranks = replace(ALONE, master_port=port), Ranks()
        with pytest.raises(UsageError, match=f"--master-port: must be free, got {port}"):
            run_ranks(launcher, ranks, "quiet", topology=topology)
    assert ranks.lines == []


SECOND = replace(ALONE, num_nodes=2, node_rank=1, master_addr="n0", master_port=20_007)


def test_several_nodes_meet_at_the_master() -> None:
    topology = replace(SECOND, ranks_per_node=4)
    launch = Launch(arguments=("order",), topology=topology, conditions={}, stall_timeout_s=1.0)
    command = TorchrunLauncher().command(launch, "logs")
    assert command[1:] == (
        *("-m", "calibrate.processes", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4"),
        *("--node-rank=1", "--master-addr=n0", "--master-port=20007", "--log-dir=logs"),
        *("-m", "calibrate.worker", "order"),
    )


def test_a_node_that_waits_for_others_says_so(launcher: TorchrunLauncher) -> None:
    with pytest.raises(MeasurementFailed, match="each of the 2 nodes"):
        run_ranks(launcher, Ranks(), "hang", topology=SECOND, stall_s=0.5)


# What torchrun 2.15 wrote when ranks failed, and what we make of it.
REPORT = """\
Traceback (most recent call last):
  File "/x/w.py", line 5, in <module>
RuntimeError: {words}
W1121 01:55 3440 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
E1121 01:55 3440 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
  File "/x/torch/distributed/launcher/api.py", line 386, in launch_agent
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
w FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 3446)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 3446
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_01:55:15
  host      : localhost
  rank      : 9 (local_rank: 1)
  exitcode  : {exit_code}
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""
RECORDED = """Traceback (most recent call last):
    File "/x/w.py", line 6, in main
      raise RuntimeError("boom")
  RuntimeError: boom
  second line
  """


@pytest.mark.parametrize(
    ("words", "traceback"),
    [("peer is gone", RECORDED), ("boom", "To enable traceback see")],
    ids=["recorded traceback", "first exception"],
)
def test_the_root_cause_names_rank_and_words(words: str, traceback: str) -> None:
    text = REPORT.format(words=words, exit_code="1 (pid: 3447)", traceback=traceback)
    failure = first_failure(text.splitlines(), exit_code=1)
    assert failure == "rank 9 must exit with 0, got exit code 1: RuntimeError: boom"


def test_a_killed_rank_has_a_signal_and_no_words() -> None:
    text = REPORT.format(words="", exit_code="-9 (pid: 3)  (SIGKILL)", traceback="Signal 9")
    silent = text[text.index("W1121") :]
    failure = first_failure(silent.splitlines(), exit_code=1)
    assert failure == "rank 9 must exit with 0, got SIGKILL (out of memory?)"


def test_a_rank_that_torchrun_ended_is_not_the_first() -> None:
    """Seen on a busy machine: both ended between two looks, and the lower one was called the cause."""
    text = REPORT.format(words="peer is gone", exit_code="-15 (pid: 3)", traceback="Signal 15")
    swapped = text.replace("exitcode  : -15 (pid: 3446)  (SIGTERM)", "exitcode  : -9 (pid: 3446)")
    failure = first_failure(swapped.splitlines(), exit_code=1)
    assert failure.startswith("rank 0 must exit with 0, got SIGKILL")
    assert first_failure(text.splitlines(), exit_code=1).startswith("rank 9 ")


def test_a_torchrun_that_never_started_says_its_last_line() -> None:
    failure = first_failure(["usage: run.py", "run.py: no such option: --x"], exit_code=2)
    expected = "torchrun must exit with 0, got exit code 2: run.py: no such option: --x"
    assert failure == expected


def test_silence_is_told_as_such() -> None:
    assert first_failure([], exit_code=-11) == "torchrun must exit with 0, got SIGSEGV"


@pytest.mark.parametrize(
    ("exit_code", "text"), [(3, "exit code 3"), (-15, "SIGTERM"), (-200, "signal 200")]
)
def test_exit_codes_have_names(exit_code: int, text: str) -> None:
    assert exit_text(exit_code) == text


def test_a_torchrun_that_was_told_to_end_blames_nobody_else() -> None:
    """The last line of its report is the sleep in which the signal found it."""
    report = """\
W1121 01:55 3440 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal, shutting down workers
Traceback (most recent call last):
  File "/x/torch/distributed/elastic/agent/server/api.py", line 918, in _invoke_run
    time.sleep(monitor_interval)
  File "/x/torch/distributed/elastic/multiprocessing/api.py", line 86, in _terminate_process_handler
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 3440 got signal: 15
"""
    failure = first_failure(report.splitlines(), exit_code=1)
    assert failure == "torchrun was ended from outside by SIGTERM"
