"""Enter network namespaces."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def enter(path: Path) -> None:
    """Move this thread into the network namespace of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.setns(file, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(file)


def named(name: str) -> Path:
    """Where iproute2 keeps a namespace."""
    return Path("/run/netns") / name


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Be in a named namespace for as long as the block lasts; for one thread."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(named(name))
        yield
    finally:
        enter(Path(f"/proc/thread-self/fd/{home}"))
        os.close(home)
