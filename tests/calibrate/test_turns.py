"""Two measurements on one machine take turns."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calibrate.campaign import LOCK_VARIABLE, lock_path, machine_to_itself
from tests.turns import machine_is_held

HOLD = """
import sys
from pathlib import Path
from calibrate.campaign import machine_to_itself
with machine_to_itself(print, path=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the machine until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_free_machine_is_not_waited_for_and_is_free_again_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waits: list[str] = []
    held = []
    for _ in range(2):
        with machine_to_itself(waits.append, path=path):
            held.append(machine_is_held(path))
            assert path.read_text() == f"process {os.getpid()}"
        held.append(machine_is_held(path))
    assert held == [True, False, True, False]
    assert waits == []


def test_the_second_waits_until_the_first_has_ended_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        seen = []

        def on_wait(words: str) -> None:
            seen.append(words)
            assert first.poll() is None
            assert first.stdin is not None
            first.stdin.close()

        with machine_to_itself(on_wait, path=path, poll_s=0.01):
            assert first.wait() == 0
    assert seen == [f"waiting for another measurement on this machine (process {first.pid})"]


def test_a_killed_measurement_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        assert machine_is_held(path)
        first.kill()
        first.wait()
    waits: list[str] = []
    held = []
    with machine_to_itself(waits.append, path=path):
        held.append(machine_is_held(path))
    assert held == [True]
    assert waits == []


def test_a_lock_that_cannot_be_made_is_no_reason_not_to_measure(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "lock"
    waits: list[str] = []
    ran = []
    with machine_to_itself(waits.append, path=path):
        ran.append(path.exists())
    assert ran == [False]
    assert waits == []


def test_the_lock_of_the_machine_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    assert lock_path().parent == Path(tempfile.gettempdir())
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    waits: list[str] = []
    with machine_to_itself(waits.append):
        assert machine_is_held(tmp_path / "lock")
