"""Who decides where ranks run; how they are started, fail, and end: no process of a run survives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from calibrate.launch import (
    Launch,
    LaunchFlags,
    TorchrunLauncher,
    default_ranks,
    first_failure,
    first_node,
    resolve_topology,
)
from calibrate.processes import terminate_as_interrupt
from perfmodel.errors import Interrupted, MeasurementFailed, UsageError
from tests.calibrate.played import AGENT, ALONE, Ranks, run_ranks, runs
from tests.existing import existing


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchrunLauncher:
    (tmp_path / "played_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return TorchrunLauncher(agent=("played_agent",), grace_s=0.3)


def test_progress_keeps_slow_ranks_alive(launcher: TorchrunLauncher) -> None:
    ranks = Ranks()
    stop_at_s = time.monotonic() + 1.2

    def last_progress() -> float:
        return min(time.monotonic(), stop_at_s)

    with pytest.raises(MeasurementFailed, match="got none"):
        run_ranks(launcher, ranks, "hang", stall_s=0.5, last_progress=last_progress)
    assert time.monotonic() >= stop_at_s + 0.5
    assert ranks.survivors() == []


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


#: The last line of its report is the sleep in which the signal found it.
ENDED = """\
W1121 01:55 3440 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal, shutting down workers
Traceback (most recent call last):
  File "/x/torch/distributed/elastic/agent/server/api.py", line 918, in _invoke_run
    time.sleep(monitor_interval)
  File "/x/torch/distributed/elastic/multiprocessing/api.py", line 86, in _terminate_process_handler
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 3440 got signal: 15
"""
#: Seen on a busy machine: both ended between two looks, and the lower one was called the cause.
BOTH = REPORT.format(words="peer is gone", exit_code="-15 (pid: 3)", traceback="Signal 15")
SILENT = REPORT.format(words="", exit_code="-9 (pid: 3)  (SIGKILL)", traceback="Signal 9")
FAILED = {"exit_code": "1 (pid: 3447)"}


@pytest.mark.parametrize(
    ("text", "exit_code", "said"),
    [
        (
            REPORT.format(words="peer is gone", traceback=RECORDED, **FAILED),
            1,
            "rank 9 must exit with 0, got exit code 1: RuntimeError: boom",
        ),
        (
            REPORT.format(words="boom", traceback="To enable traceback see", **FAILED),
            1,
            "rank 9 must exit with 0, got exit code 1: RuntimeError: boom",
        ),
        (
            SILENT[SILENT.index("W1121") :],
            1,
            "rank 9 must exit with 0, got SIGKILL (out of memory?)",
        ),
        (BOTH, 1, "rank 9 must exit with 0, got SIGTERM: RuntimeError: peer is gone"),
        (
            BOTH.replace("exitcode  : -15 (pid: 3446)  (SIGTERM)", "exitcode  : -9 (pid: 3446)"),
            1,
            "rank 0 must exit with 0, got SIGKILL (out of memory?): RuntimeError: peer is gone",
        ),
        (
            "usage: run.py\nrun.py: no such option: --x",
            2,
            "torchrun must exit with 0, got exit code 2: run.py: no such option: --x",
        ),
        ("", -11, "torchrun must exit with 0, got SIGSEGV"),
        ("", -200, "torchrun must exit with 0, got signal 200"),
        (ENDED, 1, "torchrun was ended from outside by SIGTERM"),
    ],
)
def test_the_root_cause_names_rank_and_words(text: str, exit_code: int, said: str) -> None:
    assert first_failure(text.splitlines(), exit_code=exit_code) == said


# The second may arrive while psutil reads a file, which the collector then closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(launcher: TorchrunLauncher) -> None:
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


def fail() -> None:
    raise RuntimeError("bad line")


def interrupt(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


CRASH = (
    "^torchrun must exit with 0, got exit code 3: ValueError: planted; what was measured is kept; "
    "mend the cause and repeat with --resume$"
)
STALL = "progress within 500 ms, got none"


@pytest.mark.parametrize(
    ("how", "on_start", "error", "words"),
    [
        ("crash", None, MeasurementFailed, CRASH),
        *((how, None, MeasurementFailed, STALL) for how in ("hang", "stubborn", "orphan")),
        # Ranks of a killed torchrun are found without their parent.
        ("killed", None, MeasurementFailed, "SIGKILL"),
        ("stubborn", interrupt(signal.SIGINT), Interrupted, "--resume"),
        # What a scheduler does to end a job.
        ("hang", interrupt(signal.SIGTERM), Interrupted, "--resume"),
        ("hang", interrupt(signal.SIGHUP), Interrupted, "--resume"),
        ("hang", fail, RuntimeError, "bad line"),
        ("leave", None, None, ""),
    ],
)
def test_no_process_of_a_run_survives_it(
    launcher: TorchrunLauncher,
    how: str,
    on_start: Callable[[], None] | None,
    error: type[Exception] | None,
    words: str,
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    ranks = Ranks() if on_start is None else Ranks(on_start)
    with (
        nullcontext() if error is None else pytest.raises(error, match=words),
        terminate_as_interrupt(),
    ):
        run_ranks(launcher, ranks, how, stall_s=0.5 if words == STALL else 20)
    assert len(ranks.pids) == 2
    assert ranks.survivors() == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_die_with_a_parent_that_was_killed(
    launcher: TorchrunLauncher, tmp_path: Path
) -> None:
    assert launcher.agent == ("played_agent",)
    script = tmp_path / "parent.py"
    script.write_text(
        "from calibrate.launch import Launch, Topology, TorchrunLauncher\n"
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


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
STEP = SLURM | {
    "SLURM_JOB_ID": "123456",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[07,09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[01-09]",
}


def resolved(environ: dict[str, str], flags: LaunchFlags | None = None) -> tuple[object, ...]:
    return astuple(resolve_topology(environ, flags=flags, num_local_devices=8))


HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({}, None, (1, 8, 0, HERE, None)),
        (SLURM, None, (2, 8, 1, "n1", 20_005)),
        # The step wins over the job; 20000 + 123456 mod 10000 = 23456.
        (STEP, None, (2, 8, 1, "n07", 23_456)),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4(x2)"}, None, (2, 4, 1, "n1", 20_005)),
        # One task per node is how our launcher is started; uneven ones need a flag.
        (SLURM | {"SLURM_TASKS_PER_NODE": "1(x2)"}, None, (2, 8, 1, "n1", 20_005)),
        (
            SLURM | {"SLURM_TASKS_PER_NODE": "4, 2"},
            LaunchFlags(nproc_per_node=2),
            (2, 2, 1, "n1", 20_005),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"},
            None,
            (1, 4, 0, HERE, None),
        ),
        # A flag wins; the rest stays, unless the number of nodes contradicts it.
        (SLURM, LaunchFlags(nproc_per_node=2, master_port=4000), (2, 2, 1, "n1", 4000)),
        (SLURM, LaunchFlags(nnodes=1), (1, 8, 0, HERE, None)),
        ({}, LaunchFlags(nnodes=3, node_rank=2, master_addr="head"), (3, 8, 2, "head", 29_500)),
    ],
)
def test_who_decides(
    environ: dict[str, str], flags: LaunchFlags | None, expected: tuple[object, ...]
) -> None:
    assert resolved(environ, flags) == expected


@pytest.mark.parametrize(
    ("devices", "default", "asked", "shared", "ranks"),
    [(64, 8, None, False, 8), (64, 8, 16, False, 16), (2, None, 9, True, 9)],
)
def test_ranks_follow_flag_default_and_devices(
    *, devices: int, default: int | None, asked: int | None, shared: bool, ranks: int
) -> None:
    topology = resolve_topology(
        {},
        flags=LaunchFlags(nproc_per_node=asked),
        num_local_devices=devices,
        default_ranks_per_node=default,
        allow_oversubscription=shared,
    )
    assert topology.ranks_per_node == ranks


def test_torchrun_cannot_start_it() -> None:
    environ = {"RANK": "5", "GROUP_RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match="must not run under torchrun"):
        resolved({**SLURM, **environ})
    del environ["RANK"]
    assert resolved(environ) == (1, 8, 0, HERE, None)


@pytest.mark.parametrize(
    ("kind", "num_devices", "ranks"),
    [("cuda", 16, 16), ("cpu", 64, 8), ("cpu", 2, 2), ("cpu", 1, 1)],
)
def test_default_ranks(kind: str, num_devices: int, ranks: int) -> None:
    assert default_ranks(kind, num_devices=num_devices) == ranks


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("node1", "node1"),
        ("gnode[10,20,25-27]", "gnode10"),
        ("a[1-2]b[01-03]", "a1b01"),
        ("n[098-101]-ib", "n098-ib"),
        ("login1,gpu[1,3],x-2.site", "login1"),
        *(
            (text, None)
            for text in ("n[1-", "n1]", "n[[1]]", "n[a-b]", "n[]", "", ",a", "n[\u0661-3]")
        ),
    ],
)
def test_the_first_node_of_a_list_is_the_master(text: str, name: str | None) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "must be 1, got 8; .*srun --ntasks-per-node=1"),
        ({"SLURM_LOCALID": "3"}, "must be 1"),
        ({"SLURM_STEP_NODELIST": "n[07"}, "SLURM_STEP_NODELIST must look like .* got 'n\\[07'"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a whole number, got 'one'"),
        ({"SLURM_TASKS_PER_NODE": "4,2", "SLURM_STEP_TASKS_PER_NODE": ""}, "same .* got '4,2'"),
        *(
            ({"SLURM_STEP_TASKS_PER_NODE": text}, r"must look like '2\(x3\),1'")
            for text in (",", "x3", "2(x", "-1", "2x3", "\u0662(x3)", "1(x2),")
        ),
    ],
)
def test_contradictions_of_slurm_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_topology({**STEP, **change}, num_local_devices=8)
