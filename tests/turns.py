"""Whether somebody holds the machine for a measurement."""

import fcntl
from pathlib import Path

from calibrate import locks


def machine_is_held(path: Path | None = None) -> bool:
    """A second open file is refused the lock, even in the process that holds it."""
    with (path or locks.lock_path()).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
