"""A shim that counts calls of the system below a folder, and lets one of them fail, or be the last of its process."""

import contextlib
import errno
import io
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest

from calibrate.locks import FOLDER_LOCK

#: Number of a call that never comes.
NEVER: Final = 0
#: Exit code of a process that a call ended.
KILLED: Final = 99


class Faults:
    """Counts calls of the system below a folder; the one of that number fails.

    ``ends``: It ends the process instead, as a kill does: nothing is cleaned up.
    """

    def __init__(self, fails_at: int, folder: Path, *, ends: bool = False) -> None:
        self.calls: list[str] = []
        self._fails_at, self._folder, self._ends = fails_at, str(folder), ends

    def count(self, call: str, where: object = "") -> None:
        """One call; it fails if it is its turn."""
        self.calls.append(f"{call} {where}".strip())
        if len(self.calls) == self._fails_at:
            if self._ends:
                os._exit(KILLED)
            code = errno.EAGAIN if call in ("spawn", "fork") else errno.EIO
            raise OSError(code, os.strerror(code))

    def is_ours(self, path: object) -> bool:
        """Whether a file belongs to the campaign; the lock may fail silently."""
        return str(path).startswith(self._folder) and Path(str(path)).name != FOLDER_LOCK


class CountedFile:
    """A file whose reads and writes are counted; half of what fails to be written arrives."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, content: Any) -> Any:
        try:
            self._faults.count("write")
        except OSError:
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            raise
        return self._file.write(content)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def read(self, *arguments: int) -> Any:
        self._faults.count("read")
        return self._file.read(*arguments)

    def readline(self, *arguments: int) -> Any:
        self._faults.count("read")
        return self._file.readline(*arguments)

    def truncate(self, *arguments: int) -> Any:
        self._faults.count("truncate")
        return self._file.truncate(*arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Every open, read, write, fsync and rename below the folder, every spawn and fork, goes through the counter."""
    real_open, real_fdopen, real_fsync, real_replace = io.open, os.fdopen, os.fsync, os.replace
    real_os_open, real_popen, real_fork = os.open, subprocess.Popen, os.fork

    def open_(file: Any, *arguments: Any, **options: Any) -> Any:
        if not faults.is_ours(file):
            return real_open(file, *arguments, **options)
        faults.count("open", Path(file).name)
        return CountedFile(real_open(file, *arguments, **options), faults)

    def os_open(path: Any, *arguments: Any, **options: Any) -> int:
        if faults.is_ours(path):
            faults.count("open", "new")
        return real_os_open(path, *arguments, **options)

    def fsync(descriptor: int) -> None:
        faults.count("fsync")
        real_fsync(descriptor)

    def replace(source: Any, target: Any, **options: Any) -> None:
        faults.count("rename", Path(target).name)
        real_replace(source, target, **options)

    def spawn(*arguments: Any, **options: Any) -> Any:
        faults.count("spawn")
        return real_popen(*arguments, **options)

    def fork() -> int:
        faults.count("fork")
        return real_fork()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", open_)
        patch.setattr(os, "open", os_open)
        patch.setattr(os, "fdopen", lambda *a, **k: CountedFile(real_fdopen(*a, **k), faults))
        patch.setattr(os, "fsync", fsync)
        patch.setattr(subprocess, "Popen", spawn)
        patch.setattr(os, "fork", fork)
        patch.setattr(os, "replace", replace)
        yield
