"""Whatever stands in a file or on the command line: an answer, or one line and an exit code."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.files import unsealed_content
from tests.fuzz import forked
from tests.fuzz.attack import READERS, Target, attacks, guarded, target_in
from tests.fuzz.forked import Outcome, faults_of_words
from tests.fuzz.nonsense import page_check

#: Past failures: ``reader | content`` with Python's escapes, ``$ | command line``, or
#: ``= document place value | command line`` of a document that somebody edited, or ``? | question at the page``.
CORPUS = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()
#: Tries of each kind.
TRIES = {**dict.fromkeys(READERS, 30), "lines": 50, "edited": 50, "questions": 80}
TRIES |= {"spoilt": 40, "messages": 50, "factories": 15}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        yield target_in(Path(name))


@pytest.mark.parametrize("row", [row for row in CORPUS if row and not row.startswith("#")])
def test_past_failures_stay_mended(target: Target, row: str) -> None:
    name, _, content = row.partition(" | ")
    text = content.encode("latin-1").decode("unicode_escape")

    def act(_: object) -> list[str]:
        if name.startswith("= "):
            _, document, place, value = name.split(" ")
            return target.edited(document, text, edited(target.files[document], place, value))
        if name == "?":
            return page_check()(("/answer", text.encode()))
        if name == "$":
            return target.line(text.split(" "))
        return target.read(name, text.encode("utf-8", "surrogatepass"))

    assert guarded(act)(None) == []


def edited(file: str, place: str, value: str) -> Any:
    """A document with one value changed, without its seal."""
    found = inside = unsealed_content(json.loads(Path(file).read_text(encoding="utf-8")))
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in path:
        inside = inside[key]  # type: ignore[index]
    inside[last] = json.loads(value)  # type: ignore[index]
    return found


THREE = "".join(f"step: {step} tps: 1\n" for step in (9, 10, 11))
#: Texts that a pattern could divide in many ways, with a part that is repeated for half a megabyte, by reader.
LONG = (
    ("training config", "a: x@y", " "),
    ("training config", "a: @}", "{a: "),
    ("log of torchtitan", "step: 1 mfu: @x", "1"),
    ("log of torchtitan", "step: 1 mfu: @x", "1,"),
    ("log of torchtitan", f"{THREE}@", "Total train batch size ("),
    ("nccl-tests", "# Rank 0@", " on a"),
    ("log of torchtitan", "@", "\n"),
    ("log of torchtitan", "@", "step: 1 tps: 1\n"),
    # patterns with ``.*`` behind a word took hours
    ("log of torchtitan", "@", "step: 1 "),
    ("log of lightning", "@", "epoch 1 "),
    ("log of megatron", "@", "iteration 1/"),
    ("nccl-tests", "@", "# Rank 0 device 0 ["),
    ("training config", "@", "a.a-"),
)


@pytest.mark.parametrize(("name", "text", "part"), LONG)
def test_long_lines_are_read_in_time(target: Target, name: str, text: str, part: str) -> None:
    content = text.replace("@", part * (500_000 // len(part))).encode()
    start_s = time.process_time()
    assert target.read(name, content) == []
    assert time.process_time() - start_s < 5


@pytest.mark.long
@pytest.mark.parametrize("kind", TRIES)
def test_what_is_hostile(target: Target, kind: str) -> None:
    with contextlib.ExitStack() as opened:
        strategy, act = attacks(target, opened)[kind]

        @settings(max_examples=TRIES[kind], deadline=None, suppress_health_check=list(HealthCheck))
        @given(data=st.data())
        def attacked(data: st.DataObject) -> None:
            assert act(data.draw(strategy)) == []

        attacked()


@pytest.mark.parametrize(
    ("answer", "is_enough"),
    [
        ("kind: profile", False),
        ("seal: fits\nvalid: no, other.json: x: must be 1", False),
        ("seal: fits\nvalid: no, a.json: ", False),
        ("seal: fits\nvalid: no, a.json: x:\n  must be 1", True),
        ('{"file": {"seal": "fits", "valid": "no, a.json: x: must be 1"}}', True),
        ("seal: was changed after it was written: its seal does not fit\nvalid: yes", True),
    ],
)
def test_a_check_that_fails_says_what_is_wrong(answer: str, *, is_enough: bool) -> None:
    assert (faults_of_words(Outcome(1, answer, ""), ["check", "a.json"]) == []) == is_enough


def test_what_a_command_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        sys.stdout.write(f"{subprocess.Popen(['sleep', '60']).pid}")
        sys.stdout.flush()
        time.sleep(60)

    monkeypatch.setattr(forked, "main", main)
    monkeypatch.setattr(forked, "_MOST_WALL_S", 2.0)
    found = forked.run_forked([], tmp_path)
    assert found.code == -signal.SIGKILL
    end_s = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(found.out)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_what_a_command_writes_beside_its_files_is_seen(target: Target) -> None:
    assert all(Path(file).is_relative_to(target.folder) for file in target.files.values())
    beside = Path(target.files["folder"], "written")
    line = ["predict", "--profile", "{stored}", "--workload", "light", "--output", str(beside)]
    assert target.line(line) == [f"touched: {sorted(map(str, (beside.parent, beside)))}"]
