"""One measurement at a time: on a machine, and in a folder. Folders that killed ones left behind.

A lock is an open file under ``flock``: the kernel lets go of it when its process ends. The file says who
holds it and since when.
"""

import datetime as dt
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from perfmodel.errors import MeasurementFailed, PerfModelError, UsageError, why
from perfmodel.units import HOUR_S, Seconds, format_duration

#: Names another lock: containers may share a machine without sharing a folder for temporary files.
LOCK_VARIABLE: Final = "PERFMODEL_LOCK"
#: Longer than any measurement: whoever holds the machine for so long was stopped, or hangs.
LOCK_TIMEOUT_S: Final[Seconds] = 12 * HOUR_S
#: In the folder of a campaign.
FOLDER_LOCK: Final = ".lock"
_POLL_S: Final = 0.5
_HOLDER: Final = b"process "
#: Of what a process left behind; younger folders may not have been locked yet.
_STALE_S: Final[Seconds] = HOUR_S
#: File systems that know no locks.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


def lock_path() -> Path:
    """The file that a measurement holds while it runs."""
    named = os.environ.get(LOCK_VARIABLE)
    return Path(named) if named else _own_folder() / "measuring.lock"


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"perfmodel-{os.getuid()}"


@contextmanager
def machine_to_itself(
    on_wait: Callable[[str], None],
    *,
    path: Path | None = None,
    poll_s: Seconds = _POLL_S,
    timeout_s: Seconds = LOCK_TIMEOUT_S,
) -> Iterator[None]:
    """Hold the machine for one measurement; ``on_wait`` is told once who else holds it.

    Raises
    ------
    MeasurementFailed
        If it is still held after ``timeout_s``.
    """
    where = path or lock_path()
    try:
        lock = _opened(where)
    except OSError as error:
        # A link, another user's folder or a read-only one: measuring matters more than queueing.
        on_wait(f"measuring without a lock: {where}: {why(error)}")
        yield
        return
    with os.fdopen(lock):
        if not _acquired(lock):
            on_wait(f"waiting for another measurement on this machine ({_holder(lock)})")
            deadline_s = time.monotonic() + timeout_s
            while not _acquired(lock):
                if time.monotonic() > deadline_s:
                    raise MeasurementFailed(
                        f"{where}: must be free within {format_duration(timeout_s)}, held by "
                        f"{_holder(lock)}; end that process, or name another lock: "
                        f"{LOCK_VARIABLE}=FILE"
                    )
                time.sleep(poll_s)
        _sign(lock)
        yield


@contextmanager
def folder_to_itself(folder: Path) -> Iterator[None]:
    """Hold the folder of a campaign, whichever lock of the machine is used.

    Raises
    ------
    UsageError
        If another campaign fills it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _opened(folder / FOLDER_LOCK)
    except OSError as error:
        raise PerfModelError(
            f"{folder}: cannot be written: {why(error)}; choose another --out"
        ) from error
    with os.fdopen(lock):
        if not _acquired(lock):
            raise UsageError(
                f"{folder}: is being filled by another measurement ({_holder(lock)}); wait for it, "
                "or choose another --out"
            )
        _sign(lock)
        yield


def _opened(path: Path) -> int:
    """A lock file, made if there is none; links and whatever else lies there stay untouched."""
    if path.parent == _own_folder():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(os.lstat(path.parent), stat.S_ISDIR)
    # without O_TRUNC: it may hold something else
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # where all may write, Linux refuses O_CREAT on files of others
        lock = os.open(path, flags)
    except FileNotFoundError:
        lock = os.open(path, flags | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link; remove it") from None
        raise
    try:
        _refuse_strange(lock, is_own=path.parent == _own_folder())
    except OSError:
        os.close(lock)
        raise
    return lock


def _refuse_strange(lock: int, *, is_own: bool) -> None:
    """Refuse an open file that no lock of ours can be: writing to it would spoil it."""
    found = os.fstat(lock)
    if is_own:
        _refuse_foreign(found, stat.S_ISREG)
    said = os.pread(lock, len(_HOLDER), 0) if stat.S_ISREG(found.st_mode) else b"?"
    if found.st_nlink > 1 or said not in (b"", _HOLDER):
        raise OSError(errno.EEXIST, "it is no lock of perfmodel")


def _refuse_foreign(found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Refuse what another user made, or may write to."""
    writable = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022
    if not is_kind(found.st_mode) or found.st_uid != os.getuid() or writable:
        raise PermissionError(errno.EPERM, "another user may have made it")


def _acquired(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _sign(lock: int) -> None:
    """Say who holds a lock; a full disk is no reason not to."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    said = _HOLDER + f"{os.getpid()} since {now}".encode()
    with suppress(OSError):
        os.pwrite(lock, said, 0)
        os.ftruncate(lock, len(said))


def _holder(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown process"


@contextmanager
def work_folder(prefix: str) -> Iterator[str]:
    """A temporary folder that ends with the block; those of killed processes of this user end as well."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_stale(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _acquired(held)
            yield folder
        finally:
            os.close(held)


def _remove_stale(path: Path) -> None:
    """Remove a folder of this user that is old and that no process holds."""
    found = os.lstat(path)
    _refuse_foreign(found, stat.S_ISDIR)
    if time.time() - found.st_mtime < _STALE_S:
        return
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if _acquired(held):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)
