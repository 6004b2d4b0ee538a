"""Whatever stands in a file or on the command line: an answer, or one line and an exit code."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.attack import (
    READERS,
    Edit,
    check_hostile_input,
    check_line,
    command_lines,
    edits,
    read_hostile,
    spoilt,
    written_files,
)

#: Past failures: ``reader | content`` with Python's escapes, or ``$ | command line``.
CORPUS = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()
_FEW = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        yield Path(name)


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, str]:
    return written_files(folder)


@pytest.mark.parametrize("row", [row for row in CORPUS if row and not row.startswith("#")])
def test_past_failures_stay_mended(folder: Path, files: dict[str, str], row: str) -> None:
    name, _, content = row.partition(" | ")
    text = content.encode("latin-1").decode("unicode_escape")
    if name == "$":
        check_line(text.split(" "), files)
    else:
        read_hostile(name, text.encode("utf-8", "surrogatepass"), folder)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
@settings(_FEW, max_examples=40)
@given(changes=edits)
def test_a_hostile_file(folder: Path, name: str, changes: list[Edit]) -> None:
    read_hostile(name, spoilt(name, changes, folder), folder)


@pytest.mark.long
@settings(_FEW, max_examples=60)
@given(words=command_lines())
def test_a_hostile_command_line(files: dict[str, str], words: list[str]) -> None:
    check_line(words, files)


@pytest.mark.long
@settings(_FEW, max_examples=10)
@given(changes=edits)
def test_commands_that_read_hostile_files(files: dict[str, str], changes: list[Edit]) -> None:
    check_hostile_input(changes, files)
