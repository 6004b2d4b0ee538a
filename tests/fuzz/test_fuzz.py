"""Whatever stands in a file or on the command line: an answer, or one line and an exit code."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.attack import READERS, attacks, check_line, read_hostile, written_files

#: Past failures: ``reader | content`` with Python's escapes, or ``$ | command line``.
CORPUS = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()
#: Tries of each kind.
TRIES = {**dict.fromkeys(READERS, 40), "inputs": 10, "lines": 60}


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
        faults = check_line(text.split(" "), files)
    else:
        faults = read_hostile(name, text.encode("utf-8", "surrogatepass"), folder)
    assert faults == []


@pytest.mark.long
@pytest.mark.parametrize("kind", TRIES)
def test_what_is_hostile(folder: Path, files: dict[str, str], kind: str) -> None:
    strategy, act = attacks(folder, files)[kind]

    @settings(max_examples=TRIES[kind], deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def attacked(data: st.DataObject) -> None:
        assert act(data.draw(strategy)) == []

    attacked()
