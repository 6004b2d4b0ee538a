"""Start ranks under torchrun, watch them, and leave nothing behind.

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

from calibrate.environment import under
from calibrate.locks import work_folder
from calibrate.processes import ProcessTree
from calibrate.topology import Topology
from perfmodel.errors import Interrupted, MeasurementFailed, UsageError, check_positive
from perfmodel.units import Seconds, format_duration

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
    inherited = under(os.environ if environ is None else environ, conditions)
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
