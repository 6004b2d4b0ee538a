"""A played torchrun, whose one real rank misbehaves as told, and a campaign of played ranks."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from calibrate.campaign import Campaign
from calibrate.environment import Placement
from calibrate.launch import Launch, Launcher, Topology
from calibrate.task import StepTask
from perfmodel.layout import RunSetting

ALONE = Topology(
    num_nodes=1, ranks_per_node=2, node_rank=0, master_addr="127.0.0.1", master_port=None
)

# Plays torchrun: starts one rank in a session of its own, says its pid, then does as told.
AGENT = """
import os, signal, subprocess, sys, time
how = sys.argv[-1]
RANK = '''
import signal, sys, time
from calibrate.processes import die_with_parent
if "mortal" in sys.argv: die_with_parent()
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
'''
if how == "orphan" and os.fork():
    signal.pause()
rank = subprocess.Popen([sys.executable, "-c", RANK, how], start_new_session=True,
                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
rank.stdout.readline()
print("rank", rank.pid, os.getpid(), flush=True)
if how == "crash":
    print("Traceback\\nValueError: planted", file=sys.stderr, flush=True)
    os._exit(3)
if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
if how == "leave": os._exit(0)
if how == "orphan": os._exit(0)
signal.pause()
"""


class Ranks:
    """What ranks wrote, and what became of them."""

    def __init__(self, on_start: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self.pids: list[int] = []
        self._on_start = on_start
        self._last_s = time.monotonic() + 60
        """When the first line came; until then they are given a minute to start."""

    def last_progress(self) -> float:
        return min(self._last_s, time.monotonic())

    def on_line(self, line: str) -> None:
        self._last_s = min(self._last_s, time.monotonic())
        self.lines.append(line)
        if line.startswith("rank "):
            self.pids += map(int, line.split()[1:])
            self._on_start()

    def survivors(self) -> list[int]:
        return [pid for pid in self.pids if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_ranks(
    launcher: Launcher,
    ranks: Ranks,
    how: str,
    *,
    topology: Topology = ALONE,
    stall_s: float = 20,
    last_progress: Callable[[], float] | None = None,
) -> None:
    launcher.run(
        Launch(
            arguments=(how,),
            topology=topology,
            conditions={},
            stall_timeout_s=stall_s,
            on_line=ranks.on_line,
            last_progress=last_progress or ranks.last_progress,
        )
    )


def played_campaign(folder: Path, *rounds: Sequence[str]) -> Campaign:
    """Steps of a light model by name, ``round-micro_batch``, on two ranks."""
    return Campaign(
        folder=folder,
        plan={"what": "the plan"},
        rounds=tuple(tuple(map(_step, names)) for names in rounds),
        placement=Placement(
            device_kind="cpu",
            topology=ALONE,
            conditions={"OMP_NUM_THREADS": "1"},
            fingerprint="here",
        ),
    )


def _step(name: str) -> StepTask:
    index, micro_batch = map(int, name.split("-"))
    setting = RunSetting(workload="light", world_size=2, micro_batch=micro_batch)
    return StepTask(name=name, round=index, setting=setting, target_s=0.1)
