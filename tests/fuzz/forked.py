"""A command in a forked process: what it prints, what it takes, and what it leaves behind."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final, NamedTuple

from calibrate.processes import ProcessTree
from perfmodel.cli import main
from perfmodel.errors import MeasurementFailed
from perfmodel.page import server
from tests.fuzz.nonsense import GARBAGE

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


class Outcome(NamedTuple):
    """How a command ended, what it printed, and what it took."""

    code: int
    """Exit code, or minus the signal that ended it."""
    out: str
    err: str
    cpu_s: float = 0.0
    growth_kib: int = 0
    """Largest memory beyond that of the process it was forked from. [KiB]"""


def run_forked(words: list[str], folder: Path) -> Outcome:
    """Run a command in ``folder / "work"``; its temporary folder is ``folder / "temporary"``."""
    for name in _OWN:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
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
        try:
            while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if time.monotonic() > end_s:
                    break
                time.sleep(0.002)
        finally:  # what it started ends with it, also where the attack itself is interrupted
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):  # it has no group yet
                    kill(process, signal.SIGKILL)
            _, status, used = os.wait4(process, 0)
        said = [os.pread(file.fileno(), 1 << 24, 0) for file in (out, err)]
    printed, complained = (text.decode("utf-8", "replace") for text in said)
    code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    return Outcome(code, printed, complained, cpu_s, max(0, used.ru_maxrss - own_kib))


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
    os.environ["PERFMODEL_LOCK"] = str(folder / "lock")
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


def faults_of(found: Outcome, words: list[str], folder: Path) -> list[str]:
    """What a command took, left behind or wrote otherwise than it should: each fault in a line."""
    faults = []
    if found.cpu_s > _MOST_CPU_S:
        faults.append(f"took {found.cpu_s:.0f} s")
    if found.growth_kib > _MOST_GROWTH_KIB:
        faults.append(f"took {found.growth_kib // 1024} MiB")
    left = [path.name for path in (folder / "temporary").iterdir()]
    if left and not all(name.startswith("torchinductor_") for name in left):  # torch's own
        faults.append(f"left behind: {left}")
    if found.code == 0 and "--json" in words and "--help" not in words:
        try:
            json.loads(found.out, parse_constant=faults.append)
        except ValueError as error:
            faults.append(f"no JSON: {error}")
    if found.code == 0 and "--output" in words:
        target = folder / "work" / words[words.index("--output") + 1]
        if not target.exists():
            faults.append(f"said nothing, wrote no {target.name[:40]!r}")
    return faults


#: What moves a terminal's cursor or hides text; progress returns to the start of its line.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]")
#: A warning of a factory itself, which Python prints as it is: whoever runs a file trusts it (SECURITY.md).
_OF_FACTORY: Final = re.compile(r"^\S*factory\.py:\d+: \w*Warning: .*$", re.MULTILINE)


def faults_of_words(
    found: Outcome,
    words: list[str],
    *,
    garbage: re.Pattern[str] = GARBAGE,
    is_interrupted: bool = False,
) -> list[str]:
    """What is wrong with an exit code and with what is printed: one complaint where there is no answer."""
    faults = []
    if found.code not in {0, 1, 2, 3, 4, 5, *[_INTERRUPTED] * is_interrupted}:
        faults.append(f"exit code {found.code}: {words} {found.err[-300:]!r}")
    if garbage.search(found.err):
        faults.append(f"words of a library: {found.err[-300:]!r}")
    if _CONTROLS.search(_OF_FACTORY.sub("", found.out + found.err).replace("\x1b[K", "")):
        faults.append(f"control characters: {(found.out + found.err)[:300]!r}")
    complaints = sum(line.startswith("perfmodel: ") for line in found.err.splitlines())
    if words[:1] == ["check"] and found.code and not complaints:
        if not _names_what_is_wrong(found.out, words[1]):
            faults.append(f"does not say what is wrong: {found.out[-300:]!r}")
    elif "Usage:" not in found.err + found.out and complaints != (found.code != 0):
        faults.append(f"{complaints} complaints with exit code {found.code}: {found.err[-300:]!r}")
    return faults


def _names_what_is_wrong(answer: str, file: str) -> bool:
    """Whether the answer of ``check`` tells the file and the rule that it breaks, or why its seal does not fit."""
    said = " ".join(answer.replace('"', "").split())
    rule = re.search(rf"valid: no, {re.escape(file)}: \w", said)
    return rule is not None or re.search(r"seal: (was|carries) ", said) is not None


def checked(
    words: list[str],
    folder: Path,
    *,
    garbage: re.Pattern[str] = GARBAGE,
    is_interrupted: bool = False,
) -> tuple[Outcome, list[str]]:
    """How a command ended in ``folder / "forked"``, and its faults: one is what it changed in the folder."""
    before = _state_of(folder)
    found = run_forked(words, folder / "forked")
    after = _state_of(folder)
    touched = {path for path in before | after if before.get(path) != after.get(path)}
    if words[:1] == ["fit"]:  # it writes beside what it fits
        touched -= {str(Path(word, name)) for word in words[1:] for name in ("", "profile.json")}
    is_interrupted |= measures(words)
    faults = faults_of_words(found, words, garbage=garbage, is_interrupted=is_interrupted)
    faults += faults_of(found, words, folder / "forked")
    return found, faults + ([f"touched: {sorted(touched)}"] if touched else [])


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below a folder, but in the folder of a forked command.

    Python keeps what it compiles of a factory's file beside it.
    """
    inside = [path for path in folder.iterdir() if path.name not in ("forked", "__pycache__")]
    every = [file for path in inside for file in (path, *path.rglob("*"))]
    return {str(path): ((at := path.lstat()).st_size, at.st_mtime_ns) for path in every}
