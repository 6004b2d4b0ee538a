"""Process trees that end completely, and signals that arrive as ``KeyboardInterrupt``.

``python -m calibrate.processes MODULE ...`` runs a module in a process that dies with its parent.

torchrun puts every worker into a session of its own, so a process group does not hold the tree
together, and a worker whose torchrun was killed has no parent to be found by. Every process that
we start therefore carries a mark in its environment, which its children inherit.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from perfmodel.errors import MeasurementFailed, why

if TYPE_CHECKING:
    import psutil

_MARK: Final = "PERFMODEL_RUN_MARK"
_POLL_S: Final = 0.05
_KILL_S: Final = 10.0
#: For a program that answers a question. [s]
_TIMEOUT_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask Linux to signal this process as soon as its parent is gone; elsewhere nothing happens.

    The setting survives ``exec`` and is not inherited by children. "Parent" is the thread that
    started this process.
    """
    if not sys.platform.startswith("linux"):
        return
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


class ProcessTree:
    """One command and everything it starts, directly or not."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._root: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], *, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start the command in a session of its own, with both outputs as pipes of text.

        ``MeasurementFailed`` if the system starts no more processes.
        """
        try:
            self._root = subprocess.Popen(
                command,
                env={**environ, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise MeasurementFailed(
                f"{command[0]}: cannot be started: {why(error)}; what was measured is kept; "
                "free memory or processes and repeat with --resume"
            ) from error
        return self._root

    def stop(self, *, grace_s: float) -> None:
        """End every process of the tree: ask, wait, kill; return when none is left."""
        try:
            self._signal(signal.SIGTERM)
            self._wait(grace_s)
        finally:
            deadline_s = time.monotonic() + _KILL_S
            while self._signal(signal.SIGKILL) and time.monotonic() < deadline_s:
                self._wait(_POLL_S)

    def _members(self) -> list["psutil.Process"]:
        """Processes of the tree that still run, orphans included, zombies not."""
        import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

        found: dict[int, psutil.Process] = {}
        if self._root is not None:
            self._root.poll()
            with suppress(psutil.Error):
                root = psutil.Process(self._root.pid)
                found = {each.pid: each for each in (root, *root.children(recursive=True))}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self._mark:
                    found[process.pid] = process
        return [process for process in found.values() if _runs(process)]

    def _signal(self, number: signal.Signals) -> bool:
        """Whether there was a process to signal."""
        import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

        members = self._members()
        for process in members:
            with suppress(psutil.Error):
                process.send_signal(number)
        return bool(members)

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._members() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _runs(process: "psutil.Process") -> bool:
    import psutil  # noqa: PLC0415 - an extra; what measures nothing does without

    with suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``KeyboardInterrupt`` inside the block.

    Schedulers send the first and a closed terminal the second; both deserve the tidy end that
    Ctrl-C has. A signal that is ignored stays so (``nohup``). Outside the main thread, where
    Python allows no handlers, nothing changes.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def answer_of(
    command: Sequence[str], folder: Path | None = None, *, timeout_s: float | None = None
) -> str | None:
    """What a program prints; None if it is missing, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s or _TIMEOUT_S,
            check=True,
        )
        return done.stdout
    return None


def main(arguments: Sequence[str]) -> None:
    """Become ``python -m <arguments>``, bound to the life of the parent."""
    # torchrun ends its workers on SIGTERM; SIGKILL would leave them behind.
    die_with_parent(signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", *arguments])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
