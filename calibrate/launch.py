"""Which ranks run where, told by flags, by Slurm, or this node alone; start them under torchrun, and watch them.

The supervisor is the only one that survives a crash, a hang or Ctrl-C of the ranks, so it owns
three duties: say which rank failed and why, notice that nothing moves any more, and end every
process that was started.
"""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Final, Protocol

from calibrate.locks import work_folder
from calibrate.processes import ProcessTree
from perfmodel.errors import (
    Interrupted,
    MeasurementFailed,
    UsageError,
    check_at_least,
    check_positive,
    check_within,
)
from perfmodel.units import Seconds, format_duration

_NODE_LIST: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES: Final = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_STEP_TASKS: Final = "SLURM_STEP_TASKS_PER_NODE"
_TASKS_PER_NODE: Final = (_STEP_TASKS, "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
# Below the range from which Linux picks ports for outgoing connections (32768 and up).
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 10_000
# torchrun's own default; without a job id all nodes must still agree on one.
_DEFAULT_PORT: Final = 29_500
_LARGEST_PORT: Final = 65_535
_MAX_CPU_RANKS: Final = 8
_LOOPBACK: Final = "127.0.0.1"
# The variables by which Lightning, too, recognises a process that torchrun started.
_TORCHRUN: Final = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes and ranks of one run, as seen from one node."""

    num_nodes: int
    ranks_per_node: int
    node_rank: int
    master_addr: str
    master_port: int | None
    """None on a single node: torchrun then takes a free port by itself."""

    def __post_init__(self) -> None:
        check_at_least("num_nodes", self.num_nodes, 1)
        check_at_least("ranks_per_node", self.ranks_per_node, 1)
        check_within("node_rank", self.node_rank, 0, self.num_nodes - 1)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """Where ranks run as the user, or Slurm, says it; None where nothing was said."""

    nnodes: int | None = None
    nproc_per_node: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def default_ranks(device_kind: str, *, num_devices: int) -> int:
    """Ranks per node if nobody says: every GPU, or every usable core up to eight.

    More than eight processes on one CPU measure the memory bus, not training.
    """
    return min(num_devices, _MAX_CPU_RANKS) if device_kind == "cpu" else num_devices


def resolve_topology(
    environ: Mapping[str, str],
    *,
    flags: LaunchFlags | None = None,
    num_local_devices: int,
    default_ranks_per_node: int | None = None,
    allow_oversubscription: bool = False,
) -> Topology:
    """Decide nodes and ranks: each flag wins over Slurm, that over one node.

    A flag overrides one value; the rest still comes from the environment, unless ``--nnodes``
    contradicts it: then nothing else is taken from there. This describes; it starts nothing.

    Parameters
    ----------
    num_local_devices
        GPUs of this node, or usable cores: the most ranks it can hold.
    default_ranks_per_node
        Ranks if nobody says; ``num_local_devices`` if not given.
    allow_oversubscription
        Let ranks share a device.

    Raises
    ------
    UsageError
        If flags or variables contradict each other, there are more ranks than devices, or torchrun started this.
    """
    flags = flags or LaunchFlags()
    _check_between("--nnodes", flags.nnodes, low=1, high=1_000_000)
    _check_between("--nproc", flags.nproc_per_node, low=1, high=4096)
    _check_between("--master-port", flags.master_port, low=1, high=_LARGEST_PORT)
    if all(name in environ for name in _TORCHRUN):
        raise UsageError(
            "calibrate: must not run under torchrun, whose variables are set; it starts the ranks itself: "
            "give --nproc, and --nnodes, --node-rank and --master-addr on every node"
        )
    slurm = LaunchFlags()
    if flags.nnodes != 1:
        slurm = _told_by_slurm(environ, any_ranks=flags.nproc_per_node is not None)
    told = slurm if flags.nnodes in (None, slurm.nnodes) else LaunchFlags()
    num_nodes = flags.nnodes or told.nnodes or 1
    node_rank = told.node_rank if flags.node_rank is None else flags.node_rank
    master_addr = flags.master_addr or told.master_addr
    for name, value in (("--node-rank", node_rank), ("--master-addr", master_addr)):
        if value is None and num_nodes > 1:
            raise UsageError(
                f"calibrate: {name} must be given with --nnodes {num_nodes}, got nothing; start "
                f"the command once per node with {name}, the address being that of node 0"
            )
    _check_between("the rank of this node", node_rank, low=0, high=num_nodes - 1)
    ranks = (
        flags.nproc_per_node or told.nproc_per_node or default_ranks_per_node or num_local_devices
    )
    if ranks > num_local_devices and not allow_oversubscription:
        raise UsageError(
            f"calibrate: ranks per node must be <= {num_local_devices}, the devices of this node, "
            f"got {ranks}; pass --nproc {num_local_devices}"
        )
    port = flags.master_port or told.master_port
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        node_rank=node_rank or 0,
        master_addr=master_addr or _LOOPBACK,
        master_port=port or (_DEFAULT_PORT if num_nodes > 1 else None),
    )


def _told_by_slurm(environ: Mapping[str, str], *, any_ranks: bool) -> LaunchFlags:
    """The nodes of a Slurm step, or of the job if no step was started; nothing outside Slurm.

    With ``any_ranks`` it does not matter how many tasks a node has.
    """
    num_nodes = _integer(environ, _NUM_NODES, default=1)
    if num_nodes <= 1 and "SLURM_PROCID" not in environ:
        return LaunchFlags()
    own = task_counts(environ.get(_STEP_TASKS) or "1", _STEP_TASKS)
    if max(own) > 1 or _integer(environ, ("SLURM_LOCALID",), default=0) > 0:
        raise UsageError(
            f"calibrate: tasks per node of this Slurm step must be 1, got {max(own)}; the "
            "command starts the ranks itself: srun --ntasks-per-node=1 perfmodel calibrate"
        )
    name, text = _first(environ, _TASKS_PER_NODE)
    tasks = task_counts(text or "1", name)
    if len(tasks) > 1 and not any_ranks:
        raise UsageError(
            f"calibrate: tasks per node must be the same on every node, got {text!r}; pass --nproc"
        )
    # One task per node is how our own launcher is started, not a wish for one rank.
    ranks = max(tasks) if len(tasks) == 1 and tasks != {1} else None
    node_rank = _integer(environ, ("SLURM_NODEID",), default=0)
    if num_nodes <= 1:
        return LaunchFlags(nnodes=1, nproc_per_node=ranks, node_rank=node_rank)
    name, text = _first(environ, _NODE_LIST)
    first = first_node(text)
    if first is None:
        raise UsageError(
            f"calibrate: {name or _NODE_LIST[0]} must look like 'gnode[01-03,20]', got {text!r:.80}; "
            "pass --nnodes, --node-rank and --master-addr"
        )
    job = _integer(environ, ("SLURM_JOB_ID", "SLURM_JOBID"), default=0)
    port = _FIRST_PORT + job % _NUM_PORTS
    return LaunchFlags(
        nnodes=num_nodes,
        nproc_per_node=ranks,
        node_rank=node_rank,
        master_addr=first,
        master_port=port,
    )


def first_node(text: str) -> str | None:
    """First of a compressed list such as ``gnode[08-10,20],login1``; None if it is no such list."""
    found = re.match(r"([\w.-]+|\[[0-9]+[0-9,-]*\])+(?=,|$)", text.strip(), re.ASCII)
    return found and re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[0])


def task_counts(text: str, where: str) -> set[int]:
    """Different ones of compressed counts: of ``2(x3),1`` they are 1 and 2."""
    counts = re.compile(r"\s*([0-9]{1,6})(?:\(x[0-9]{1,6}\))?\s*")
    found = [counts.fullmatch(item) for item in text.split(",")]
    if not all(found):
        raise UsageError(
            f"calibrate: {where} must look like '2(x3),1', got {text!r:.80}; "
            "pass --nnodes and --nproc"
        )
    return {int(match[1]) for match in found if match}


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))


def _integer(environ: Mapping[str, str], names: tuple[str, ...], *, default: int) -> int:
    name, text = _first(environ, names)
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(f"calibrate: {name} must be a whole number, got {text!r:.40}; unset it")
    return int(text)


def _check_between(name: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"calibrate: {name} must be between {low} and {high}, got {value}; "
            "correct the flag or start the command once per node"
        )


THREADS: Final = "OMP_NUM_THREADS"
#: Variables that change what is measured: a validation sets those of its calibration.
_GOVERNING: Final = (THREADS, "MALLOC_")


def governing(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of an environment that change what is measured."""
    return {name: value for name, value in environ.items() if name.startswith(_GOVERNING)}


_KEPT: Final = "what was measured is kept; repeat the command with --resume"
_POLL_S: Final = 0.2
#: For the last lines of a process that has ended. [s]
_END_S: Final = 2.0
_TAIL_LINES: Final = 2000
#: Of what a process said last, in a message.
_MAX_CHARACTERS: Final = 300

_ROOT_CAUSE: Final = "Root Cause (first observed failure)"
_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+)")
_EXIT_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_EXCEPTION: Final = re.compile(
    r"^\s*(?:\[\w+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Failed|Interrupt)\b.*)$"
)
# torchrun's own report of the crash, not its cause.
_ENDED: Final = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_NOISE: Final = re.compile(
    r"ChildFailedError|SignalException|torch/distributed/elastic|^\s*[=\-*]{5,}|^\s*error_file\s*:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One group of ranks: what they run, where, and who watches them."""

    arguments: tuple[str, ...]
    """Command line of the worker."""
    topology: Topology
    conditions: Mapping[str, str]
    """Variables of the environment of every rank; see ``calibrate.environment``."""
    stall_timeout_s: Seconds
    """Longest time without progress, the start included. [s]"""
    on_line: Callable[[str], None] = lambda _line: None
    """Called in the caller's thread with each line that ranks write to standard output."""
    last_progress: Callable[[], Seconds] = lambda: 0.0
    """When the caller last saw progress, on the clock ``time.monotonic``. [s]"""

    def __post_init__(self) -> None:
        """Refuse a launch that cannot but stall."""
        check_positive("stall_timeout_s", self.stall_timeout_s)


class Launcher(Protocol):
    """Runs one group of ranks to its end."""

    def run(self, launch: Launch) -> None:
        """Return when every rank has finished well; raise otherwise, with no process left.

        Raises
        ------
        MeasurementFailed
            If a rank crashed, or nothing moved for ``stall_timeout_s``.
        Interrupted
            If ``KeyboardInterrupt`` arrived.
        UsageError
            If the ranks cannot be started as asked.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunLauncher:
    """Runs ranks as processes of this node under torchrun."""

    worker_module: str = "calibrate.worker"
    """What each rank runs as ``python -m``."""
    agent: Sequence[str] = ("torch.distributed.run",)
    """Module and leading arguments of the process that starts the ranks."""
    grace_s: Seconds = 5.0
    """Time between asking processes to end and killing them. [s]"""

    def run(self, launch: Launch) -> None:
        """Start the ranks and return when all have finished; see ``Launcher``."""
        _refuse_busy_port(launch.topology)
        tree = ProcessTree()
        try:
            with work_folder("perfmodel-torchrun-") as log_dir:
                try:
                    environ = worker_environ(launch.conditions)
                    output = _Output(tree.start(self.command(launch, log_dir), environ=environ))
                    while (exit_code := output.process.poll()) is None:
                        output.next_line(launch.on_line)
                        still_s = time.monotonic() - max(output.start_s, launch.last_progress())
                        if still_s > launch.stall_timeout_s:
                            raise _stalled(output, launch)
                finally:
                    tree.stop(grace_s=self.grace_s)
                output.finish(launch.on_line)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped by the user; {_KEPT}") from None
        if exit_code:
            failure = first_failure(tuple(output.stderr), exit_code=exit_code)
            # A cause that comes back is not helped by beginning where it stopped.
            raise MeasurementFailed(
                f"{failure}; what was measured is kept; mend the cause and repeat with --resume"
            )

    def command(self, launch: Launch, log_dir: str) -> tuple[str, ...]:
        """Build the command line that starts the ranks of this node."""
        topology = launch.topology
        # Not every host can resolve its own name.
        rendezvous: tuple[str, ...] = ("--standalone", "--local-addr=127.0.0.1")
        if topology.master_port is not None:
            rendezvous = (
                f"--node-rank={topology.node_rank}",
                f"--master-addr={topology.master_addr}",
                f"--master-port={topology.master_port}",
            )
        return (
            *(sys.executable, "-m", "calibrate.processes", *self.agent),
            f"--nnodes={topology.num_nodes}",
            f"--nproc-per-node={topology.ranks_per_node}",
            *rendezvous,
            f"--log-dir={log_dir}",
            *("-m", self.worker_module, *launch.arguments),
        )


class _Output:
    """What a process writes: lines of standard output in order, the last ones of standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.start_s = time.monotonic()
        self.stderr: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        assert process.stderr is not None
        pipes = ((process.stdout, self._lines.put), (process.stderr, self.stderr.append))
        self._readers = [threading.Thread(target=_read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def next_line(self, on_line: Callable[[str], None]) -> None:
        """Wait a moment for a line of standard output."""
        with suppress(queue.Empty):
            line = self._lines.get(timeout=_POLL_S)
            on_line(line)

    def finish(self, on_line: Callable[[str], None]) -> None:
        """Hand on what is left after the process and its children have ended."""
        for reader in self._readers:
            reader.join(timeout=_END_S)
        while not self._lines.empty():
            on_line(self._lines.get())


def _read(stream: IO[str], keep: Callable[[str], object]) -> None:
    with stream:
        for line in stream:
            keep(line.rstrip("\n"))


def _stalled(output: _Output, launch: Launch) -> MeasurementFailed:
    # A copy at once: the reader may be appending.
    lines = output.stderr.copy()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    words = f" (last words: {last[:_MAX_CHARACTERS]})" if last else ""
    num_nodes = launch.topology.num_nodes
    advice = (
        f"start the command on each of the {num_nodes} nodes and check that they reach each other; "
        if num_nodes > 1
        else ""
    )
    return MeasurementFailed(
        f"ranks must make progress within {format_duration(launch.stall_timeout_s)}, got none{words}; "
        f"they were ended; {advice}{_KEPT}"
    )


def worker_environ(
    conditions: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What ranks need of an environment, under conditions."""
    now = os.environ if environ is None else environ
    inherited = {n: v for n, v in now.items() if n not in governing(now)} | dict(conditions)
    wanted = dict.fromkeys(("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"), "1")
    return inherited | {name: inherited.get(name) or one for name, one in wanted.items()}


def _refuse_busy_port(topology: Topology) -> None:
    if topology.master_port is None or topology.node_rank != 0:
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", topology.master_port))
        except OSError as error:
            raise UsageError(
                f"--master-port: must be free, got {topology.master_port} "
                f"({error.strerror}); choose another one, the same on every node"
            ) from error


def first_failure(stderr_lines: Sequence[str], *, exit_code: int) -> str:
    """Which rank failed first, its exit code and the line of its error output that says most.

    torchrun itself is named where it failed, or does not say.
    """
    ended = [match[1] for line in stderr_lines if (match := _ENDED.search(line))]
    if ended:
        return f"torchrun was ended from outside by {exit_text(-int(ended[0]))}"
    causes = [at for at, line in enumerate(stderr_lines) if _ROOT_CAUSE in line]
    report = _first_section(stderr_lines, causes[-1]) if causes else ()
    rank, code = _number(_RANK, report), _number(_EXIT_CODE, report)
    who = "torchrun" if rank is None else f"rank {rank}"
    own = [match[1] for line in report if (match := _EXCEPTION.match(line))]
    useful = [line for line in stderr_lines if line.strip() and not _NOISE.search(line)]
    # The first exception of all ranks: the others fail because their peer is gone.
    anyone = [match[1] for line in useful if (match := _EXCEPTION.match(line))]
    words = [*anyone[:1], *own[-1:]] or (() if causes else useful[-1:])
    said = f": {words[-1].strip()[:_MAX_CHARACTERS]}" if words else ""
    return f"{who} must exit with 0, got {exit_text(exit_code if code is None else code)}{said}"


def _first_section(lines: Sequence[str], cause: int) -> Sequence[str]:
    """Part of torchrun's report on the rank that failed first; ``cause`` is where its root cause begins.

    torchrun ends the others with SIGTERM. Where it sees all of them end at once, it takes the
    lowest rank for the first; one that nobody ended by SIGTERM is the likelier cause.
    """
    starts = [at for at, line in enumerate(lines[:cause]) if line.strip() == "Failures:"]
    others = lines[starts[-1] : cause] if starts else ()
    ranks = [at for at, line in enumerate(others) if _RANK.match(line)]
    sections = [lines[cause:], *(others[i:j] for i, j in pairwise([*ranks, len(others)]))]
    return next(
        (each for each in sections if _number(_EXIT_CODE, each) != -signal.SIGTERM), sections[0]
    )


def _number(pattern: re.Pattern[str], lines: Sequence[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := pattern.match(line))), None)


def exit_text(exit_code: int) -> str:
    """Name an exit code the way a user knows it: ``SIGKILL (out of memory?)``, ``exit code 1``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
