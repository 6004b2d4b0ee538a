"""A command in a forked process: what it prints, what it takes, and what it leaves behind."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from calibrate.processes import ProcessTree
from perfmodel.cli import main
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import MeasurementFailed, PerfModelError
from perfmodel.page import server

#: A command may take so much of a processor, of the clock on a busy machine, and of memory.
_MOST_CPU_S: Final = 10
_MOST_WALL_S: Final = 90.0
_MOST_GROWTH_KIB: Final = 1024**2
#: A command that would measure is interrupted after so long; ranks are never started.
_INTERRUPTED_AFTER_S: Final = 3.0
_INTERRUPTED: Final = 130
#: Folders that are made afresh for each command.
_OWN: Final = ("work", "temporary", "home")
_RAISED: Final = 70
#: A complaint that shows a fault of the program, not of its input.
_INTERNAL: Final = re.compile(r"Traceback \(|internal error|pydantic|https?://errors|set_int_max")


class Outcome(NamedTuple):
    """How a command ended, what it printed, and what it took."""

    code: int
    """Exit code, or minus the signal that ended it."""
    out: str
    err: str
    cpu_s: float
    growth_kib: int
    """Largest memory beyond that of the process it was forked from. [KiB]"""


def run_forked(words: list[str], folder: Path) -> Outcome:
    """Run a command in ``folder / "work"``; its temporary folder is ``folder / "temporary"``."""
    for name in _OWN:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    own_kib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (process := os.fork()):
            code = _RAISED
            try:
                code = _run(words, folder, out.fileno(), err.fileno())
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                sys.stderr.write(traceback.format_exc())
            finally:
                with open(os.devnull, "w") as nothing:  # noqa: PTH123 - flushing may fail
                    for stream in (sys.stdout, sys.stderr):
                        getattr(stream or nothing, "flush", int)()
                os._exit(code)
        end_s = time.monotonic() + _MOST_WALL_S
        while True:
            done, status, used = os.wait4(process, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end_s:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.002)
        said = [os.pread(file.fileno(), 1 << 24, 0) for file in (out, err)]
    cpu_s = used.ru_utime + used.ru_stime
    growth_kib = max(0, used.ru_maxrss - own_kib)
    printed, complained = (text.decode("utf-8", "replace") for text in said)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, printed, complained, cpu_s, growth_kib)


def _run(words: list[str], folder: Path, out: int, err: int) -> int:
    """The exit code of a command whose outputs are these descriptors."""

    def refuse(*_: object, **__: object) -> Any:
        raise MeasurementFailed("no ranks are started here")

    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    ProcessTree.start = refuse  # type: ignore[method-assign]
    server.serve = lambda *_: None
    temporary = str(folder / "temporary")
    os.chdir(folder / "work")
    os.environ |= {"TMPDIR": temporary, "HOME": str(folder / "home"), "COLUMNS": "80"}
    os.environ |= {
        "PERFMODEL_LOCK": str(folder / "lock"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "home"),  # torch makes one below TMPDIR
    }
    tempfile.tempdir = temporary
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S + 2, _MOST_CPU_S + 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if measures(words):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_AFTER_S)
    sys.argv = ["perfmodel", *words]
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"SystemExit({ended.code!r})")
            return _RAISED
        return ended.code or 0
    return 0


def measures(words: list[str]) -> bool:
    """Whether a command may train or time something."""
    return words[:1] in (["calibrate"], ["validate"], ["doctor"])


def faults_of(words: list[str], found: Outcome, folder: Path) -> list[str]:
    """What is wrong with an outcome: each fault in a line."""
    faults = _faults_of_words(words, found)
    if found.cpu_s > _MOST_CPU_S:
        faults.append(f"took {found.cpu_s:.0f} s")
    if found.growth_kib > _MOST_GROWTH_KIB:
        faults.append(f"took {found.growth_kib // 1024} MiB")
    if left := [path.name for path in (folder / "temporary").iterdir()]:
        faults.append(f"left behind: {left}")
    if found.code == 0 and "--json" in words and "--help" not in words:
        faults += _faults_of_json(found.out)
    if found.code == 0 and "--output" in words:
        target = folder / "work" / words[words.index("--output") + 1]
        if not target.exists():
            faults.append(f"said nothing, wrote no {target.name[:40]!r}")
    return faults


#: What moves a terminal's cursor or hides text; progress returns to the start of its line.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]")


def _faults_of_words(words: list[str], found: Outcome) -> list[str]:
    """What is wrong with an exit code and with what is printed."""
    faults = []
    allowed = {0, 1, 2, 3, 4, 5, *([_INTERRUPTED] if measures(words) else [])}
    if found.code not in allowed:
        faults.append(f"exit code {found.code}: {found.err[-300:]!r}")
    if _INTERNAL.search(found.err):
        faults.append(f"words of a fault: {found.err[-300:]!r}")
    if _CONTROLS.search((found.out + found.err).replace("\x1b[K", "")):
        faults.append(f"control characters: {(found.out + found.err)[:300]!r}")
    complaints = sum(line.startswith("perfmodel: ") for line in found.err.splitlines())
    # What is wrong with a file is the answer of ``check``.
    most = 1 if found.code else 0
    least = 0 if words[:1] == ["check"] else most
    if "Usage:" not in found.err + found.out and not least <= complaints <= most:
        faults.append(f"{complaints} complaints with exit code {found.code}: {found.err[-300:]!r}")
    return faults


def _faults_of_json(text: str) -> list[str]:
    faults: list[str] = []
    try:
        json.loads(text, parse_constant=faults.append)
    except ValueError as error:
        faults.append(f"no JSON: {error}")
    return faults


def checked_lines(folder: Path, files: dict[str, str]) -> Callable[[list[str]], list[str]]:
    """Runs a command with these files; whatever it changes outside its own folder is a fault."""

    def act(words: list[str]) -> list[str]:
        filled = [re.sub(r"\{(\w+)\}", lambda m: files.get(m[1], m[0]), word) for word in words]
        return _checked(filled, folder)

    return act


def factory_check(folder: Path) -> Callable[[tuple[str, str]], list[str]]:
    """Writes a module with a factory and runs a command on it; a workload that it writes must be sound."""

    def act(drawn: tuple[str, str]) -> list[str]:
        text, line = drawn
        path = folder / "factory.py"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        faults = _checked(shlex.split(line.replace("{factory}", str(path))), folder)
        if not faults and (written := folder / "forked" / "work" / "o.json").exists():
            try:
                WorkloadDocument.read(written)
            except PerfModelError as error:
                faults.append(f"wrote what it refuses: {error}")
        return faults

    return act


def _checked(words: list[str], folder: Path) -> list[str]:
    own = folder / "forked"
    own.mkdir(exist_ok=True)
    before = _state_of(folder)
    faults = faults_of(words, run_forked(words, own), own)
    after = _state_of(folder)
    touched = [path for path in before | after if before.get(path) != after.get(path)]
    return [*faults, *([f"touched: {touched}"] if touched else [])]


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below a folder, but in the folder of a forked command."""
    inside = [path for path in folder.iterdir() if path.name != "forked"]
    every = [file for path in inside for file in (path, *path.rglob("*"))]
    return {str(path): ((at := path.lstat()).st_size, at.st_mtime_ns) for path in every}
