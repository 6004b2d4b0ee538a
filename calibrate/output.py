"""The two outputs of a running process, read beside it so that neither pipe ever fills."""

import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Final

from perfmodel.units import Seconds

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
