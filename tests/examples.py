"""Worked examples in the README and in ``docs/*.md``: run them, and write their real output beside them.

Below a block of ``shell`` (lines that start with ``perfmodel``) or ``python`` stands a block of ``text``
with exactly what it prints on 80 columns. Where a command ends with another exit code than 0, its
line says so: ``# exit code 3``. ``python -m tests.examples`` writes the blocks again; read their diff.
"""

import contextlib
import datetime as dt
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

from perfmodel.cli import main

ROOT: Final = Path(__file__).resolve().parent.parent
_BLOCK: Final = re.compile(
    r"^```(shell|python)\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
#: The day of the pages: calibrations do not grow old in them.
_WRITTEN: Final = dt.date(2026, 11, 23)
_EXIT: Final = re.compile(r"#\s*exit code (\d+)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One block and what stands below it."""

    language: str
    source: str
    shown: str


def examples(path: Path) -> list[Example]:
    """All examples of a page, in its order."""
    return [
        Example(language=match[1], source=match[2], shown=match[3])
        for match in _BLOCK.finditer(path.read_text(encoding="utf-8"))
    ]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder in which ``docs`` is the one of the project; files of one page stay in it."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "docs").symlink_to(ROOT / "docs")
        yield Path(name)


def output(example: Example, folder: Path) -> str:
    """What the example prints, in this process; a wrong exit code raises ``AssertionError``."""
    if example.language == "python":
        program = compile(example.source, "<example>", "exec")
        return _printed(lambda: exec(program, {"__name__": "__main__"}), folder)  # noqa: S102
    return "".join(
        _command(shlex.split(line, comments=True), folder, expected=int(found[1]) if found else 0)
        for line in example.source.replace("\\\n", " ").splitlines()
        for found in (_EXIT.search(line),)
    )


def _command(words: list[str], folder: Path, *, expected: int) -> str:
    codes: list[object] = []

    def run() -> None:
        try:
            main()
        except SystemExit as end:
            codes.append(end.code or 0)

    with patch.object(sys, "argv", words):
        printed = _printed(run, folder)
    assert words[0] == "perfmodel", words
    assert codes == [expected], f"{words}: {codes}\n{printed}"
    return printed


def _printed(act: Callable[[], object], folder: Path) -> str:
    """Both outputs, as on a terminal of 80 columns without colours."""
    text = io.StringIO()
    with (
        contextlib.chdir(folder),
        patch("perfmodel.documents.today_utc", lambda: _WRITTEN),
        patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        act()
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def rewritten(path: Path) -> str:
    """The page with the output of every example as it is now."""
    text = path.read_text(encoding="utf-8")
    parts = io.StringIO()
    at = 0
    with workplace() as folder:
        for match in _BLOCK.finditer(text):
            example = Example(language=match[1], source=match[2], shown=match[3])
            parts.write(text[at : match.start(3)])
            parts.write(output(example, folder))
            at = match.end(3)
    return parts.getvalue() + text[at:]


def pages() -> list[Path]:
    """The README and pages that hold examples."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return [path for path in found if examples(path)]


if __name__ == "__main__":
    for page in sys.argv[1:] or pages():
        Path(page).write_text(rewritten(Path(page)), encoding="utf-8")
