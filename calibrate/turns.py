"""One measurement at a time on one machine: two would measure each other."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from perfmodel.units import Seconds

_POLL_S: Final = 0.5
#: Names another lock: containers may share a machine without sharing a folder for temporary files.
LOCK_VARIABLE: Final = "PERFMODEL_LOCK"


def lock_path() -> Path:
    """The file that a measurement holds while it runs; the kernel lets go of it if it dies."""
    named = os.environ.get(LOCK_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / "perfmodel-measuring.lock"


@contextmanager
def machine_to_itself(
    on_wait: Callable[[str], None], *, path: Path | None = None, poll_s: Seconds = _POLL_S
) -> Iterator[None]:
    """Hold the machine for one measurement; wait for another one that holds it.

    Parameters
    ----------
    on_wait
        Called once, with words that name the other process, if there is something to wait for.
    """
    try:
        file = (path or lock_path()).open("a+", encoding="utf-8")
    except OSError:
        # Another user's file or a read-only folder: measuring matters more than queueing.
        yield
        return
    with file:
        if not _acquired(file):
            on_wait(f"waiting for another measurement on this machine ({_holder(file)})")
            while not _acquired(file):
                time.sleep(poll_s)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _acquired(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "unknown process"
