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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Final, Protocol

from calibrate.placement import under
from calibrate.processes import ProcessTree
from calibrate.topology import Topology
from perfmodel import checks
from perfmodel.errors import Interrupted, MeasurementFailed, UsageError
from perfmodel.units import Seconds, format_duration

_FAILURES: Final = "Failures:"
_ROOT_CAUSE: Final = "Root Cause (first observed failure)"
_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+)")
_EXIT_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_EXCEPTION: Final = re.compile(
    r"^\s*(?:\[\w+\]:)?\s*([A-Za-z_][\w.]*(?:Error|Exception|Exit|Failed|Interrupt)\b.*)$"
)
# torchrun's own report of the crash, not its cause.
_NOISE: Final = re.compile(
    r"ChildFailedError|SignalException|torch/distributed/elastic|^\s*[=\-*]{5,}|^\s*error_file\s*:"
)
#: Of what a process said last, in a message.
MAX_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first rank that failed, as far as it is known.

    Attributes
    ----------
    rank
        None if torchrun itself failed, or does not say.
    exit_code
        Of that rank, else of torchrun; negative for a signal.
    last_words
        The line of its error output that says most; empty if there is none.
    """

    rank: int | None
    exit_code: int
    last_words: str

    def __str__(self) -> str:
        """One clause for an error message."""
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        words = f": {self.last_words}" if self.last_words else ""
        return f"{who} must exit with 0, got {exit_text(self.exit_code)}{words}"


def first_failure(stderr_lines: Sequence[str], *, exit_code: int) -> Failure:
    """Find the first failed rank, its exit code and its last useful words."""
    report = _first_section(stderr_lines)
    rank = _first_number(_RANK, report)
    rank_code = _first_number(_EXIT_CODE, report)
    words = [match[1] for line in report if (match := _EXCEPTION.match(line))]
    return Failure(
        rank=rank,
        exit_code=exit_code if rank_code is None else rank_code,
        last_words=(words[-1] if words else _fallback(stderr_lines)).strip()[:MAX_CHARACTERS],
    )


def exit_text(exit_code: int) -> str:
    """Name an exit code the way a user knows it: ``SIGKILL (out of memory?)``, ``exit code 1``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    starts = [index for index, line in enumerate(lines) if _ROOT_CAUSE in line]
    return lines[starts[-1] :] if starts else ()


def _first_section(lines: Sequence[str]) -> Sequence[str]:
    """Part of torchrun's report on the rank that failed first.

    torchrun ends the others with SIGTERM. Where it sees all of them end at once, it takes the
    lowest rank for the first; one that nobody ended by SIGTERM is the likelier cause.
    """
    root_cause = _root_cause(lines)
    starts = [index for index, line in enumerate(lines) if line.strip() == _FAILURES]
    others = lines[starts[-1] : len(lines) - len(root_cause)] if starts and root_cause else ()
    ranks = [index for index, line in enumerate(others) if _RANK.match(line)]
    sections = [others[i:j] for i, j in pairwise([*ranks, len(others)])]
    sections = [root_cause, *sections]
    return next((found for found in sections if not _was_ended(found)), root_cause)


def _was_ended(section: Sequence[str]) -> bool:
    return _first_number(_EXIT_CODE, section) == -signal.SIGTERM


def _first_number(pattern: re.Pattern[str], lines: Sequence[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := pattern.match(line))), None)


def _fallback(lines: Sequence[str]) -> str:
    useful = [line for line in lines if line.strip() and not _NOISE.search(line)]
    # The first exception: the others fail because their peer is gone.
    exceptions = (match[1] for line in useful if (match := _EXCEPTION.match(line)))
    if (first := next(exceptions, None)) is not None:
        return first
    return "" if _root_cause(lines) else next(reversed(useful), "")


_TAIL_LINES: Final = 2000
_END_S: Final = 2.0


class Output:
    """Lines of standard output in order, and the last lines of standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            _start_reader(process.stdout, self._lines.put),
            _start_reader(process.stderr, self._stderr.append),
        ]

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines of standard error."""
        # A copy at once: the reader may be appending.
        return tuple(self._stderr.copy())

    def next_line(self, *, timeout_s: Seconds) -> str | None:
        """Wait for a line of standard output; None if none comes in time."""
        with suppress(queue.Empty):
            return self._lines.get(timeout=timeout_s)
        return None

    def rest(self) -> Iterator[str]:
        """Yield what is left after the process and its children have ended."""
        for reader in self._readers:
            reader.join(timeout=_END_S)
        while not self._lines.empty():
            yield self._lines.get()


def _start_reader(stream: IO[str] | None, keep: Callable[[str], object]) -> threading.Thread:
    if stream is None:
        raise ValueError("outputs of the process must be pipes, got None")
    reader = threading.Thread(target=_read, args=(stream, keep), daemon=True)
    reader.start()
    return reader


def _read(stream: IO[str], keep: Callable[[str], object]) -> None:
    with stream:
        for line in stream:
            keep(line.rstrip("\n"))


_POLL_S: Final = 0.2
_KEPT: Final = "what was measured is kept; repeat the command with --resume"


class Launcher(Protocol):
    """Runs one group of ranks to its end."""

    def run(
        self,
        arguments: Sequence[str],
        *,
        topology: Topology,
        conditions: Mapping[str, str],
        on_line: Callable[[str], None],
        last_progress: Callable[[], Seconds],
        stall_timeout_s: Seconds,
    ) -> None:
        """Return when every rank has finished well; raise otherwise, with no process left.

        Parameters
        ----------
        arguments
            Command line of the worker.
        conditions
            Variables of the environment of every rank; see ``calibrate.placement``.
        on_line
            Called in the caller's thread with each line that ranks write to standard output.
        last_progress
            When the caller last saw progress, on the clock ``time.monotonic``. [s]
        stall_timeout_s
            Longest time without progress, the start included. [s]

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
    """Runs ranks as processes of this node under torchrun.

    Attributes
    ----------
    worker_module
        What each rank runs as ``python -m``.
    agent
        Module and leading arguments of the process that starts the ranks.
    grace_s
        Time between asking processes to end and killing them. [s]
    """

    worker_module: str = "calibrate.worker"
    agent: Sequence[str] = ("torch.distributed.run",)
    grace_s: Seconds = 5.0

    def run(
        self,
        arguments: Sequence[str],
        *,
        topology: Topology,
        conditions: Mapping[str, str],
        on_line: Callable[[str], None],
        last_progress: Callable[[], Seconds],
        stall_timeout_s: Seconds,
    ) -> None:
        """Start the ranks and return when all have finished; see ``Launcher``."""
        checks.positive("stall_timeout_s", stall_timeout_s)
        _refuse_busy_port(topology)
        watch = _Watch(
            on_line=on_line,
            last_progress=last_progress,
            stall_timeout_s=stall_timeout_s,
            num_nodes=topology.num_nodes,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="perfmodel-torchrun-") as log_dir:
                self._supervise(
                    self.command(arguments, topology=topology, log_dir=log_dir),
                    environ=worker_environ(os.environ, conditions),
                    watch=watch,
                )
        except KeyboardInterrupt:
            raise Interrupted(f"stopped by the user; {_KEPT}") from None

    def command(
        self, arguments: Sequence[str], *, topology: Topology, log_dir: str
    ) -> tuple[str, ...]:
        """Build the command line that starts the ranks of this node."""
        return (
            *(sys.executable, "-m", "calibrate.agent", *self.agent),
            f"--nnodes={topology.num_nodes}",
            f"--nproc-per-node={topology.ranks_per_node}",
            *_rendezvous(topology),
            f"--log-dir={log_dir}",
            *("-m", self.worker_module, *arguments),
        )

    def _supervise(
        self, command: Sequence[str], *, environ: Mapping[str, str], watch: "_Watch"
    ) -> None:
        tree = ProcessTree()
        try:
            output = Output(tree.start(command, environ=environ))
            exit_code = watch.until_exit(output)
        finally:
            tree.stop(grace_s=self.grace_s)
        for line in output.rest():
            watch.on_line(line)
        if exit_code:
            failure = first_failure(output.stderr_tail, exit_code=exit_code)
            raise MeasurementFailed(f"{failure}; {_KEPT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    on_line: Callable[[str], None]
    last_progress: Callable[[], Seconds]
    stall_timeout_s: Seconds
    num_nodes: int

    def until_exit(self, output: Output) -> int:
        start_s = time.monotonic()
        while (exit_code := output.process.poll()) is None:
            line = output.next_line(timeout_s=_POLL_S)
            if line is not None:
                self.on_line(line)
            if time.monotonic() - max(start_s, self.last_progress()) > self.stall_timeout_s:
                raise self._stalled(output)
        return exit_code

    def _stalled(self, output: Output) -> MeasurementFailed:
        last = next((line.strip() for line in reversed(output.stderr_tail) if line.strip()), "")
        words = f" (last words: {last[:MAX_CHARACTERS]})" if last else ""
        advice = (
            f"start the command on each of the {self.num_nodes} nodes and "
            "check that they reach each other; "
            if self.num_nodes > 1
            else ""
        )
        return MeasurementFailed(
            f"ranks must make progress within {format_duration(self.stall_timeout_s)}, "
            f"got none{words}; they were ended; {advice}{_KEPT}"
        )


def worker_environ(environ: Mapping[str, str], conditions: Mapping[str, str]) -> dict[str, str]:
    """What ranks need of an environment, under conditions."""
    wanted = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    inherited = under(environ, conditions)
    return {**inherited, **{name: inherited.get(name) or value for name, value in wanted.items()}}


def _rendezvous(topology: Topology) -> tuple[str, ...]:
    if topology.master_port is None:
        # Not every host can resolve its own name.
        return ("--standalone", "--local-addr=127.0.0.1")
    return (
        f"--node-rank={topology.node_rank}",
        f"--master-addr={topology.master_addr}",
        f"--master-port={topology.master_port}",
    )


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
