"""Start ranks under torchrun, watch them, and leave nothing behind.

The supervisor is the only one that survives a crash, a hang or Ctrl-C of the ranks, so it owns
three duties: say which rank failed and why, notice that nothing moves any more, and end every
process that was started.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from calibrate.conditions import under
from calibrate.failure import MAX_CHARACTERS, first_failure
from calibrate.output import Output
from calibrate.processes import ProcessTree
from calibrate.topology import Topology
from perfmodel import checks
from perfmodel.errors import Interrupted, MeasurementFailed, UsageError
from perfmodel.units import Seconds, format_duration

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
            Variables of the environment of every rank; see ``calibrate.conditions``.
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
