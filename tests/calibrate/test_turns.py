"""Two measurements on one machine take turns."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calibrate import locks
from calibrate.locks import LOCK_VARIABLE, machine_to_itself, work_folder
from perfmodel.errors import MeasurementFailed
from tests.existing import existing
from tests.turns import machine_is_held

HOLD = """
import sys
from pathlib import Path
from calibrate.locks import machine_to_itself
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
        assert existing(process.stdout).readline() == "held\n"
        yield process


def said_without_a_lock(path: Path | None = None) -> str:
    waits: list[str] = []
    with machine_to_itself(waits.append, path=path):
        pass
    [words] = waits
    return words


def test_a_free_machine_is_not_waited_for_and_is_free_again_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with machine_to_itself(pytest.fail, path=path):
            assert machine_is_held(path)
            assert path.read_text().startswith(f"process {os.getpid()} since 20")
        assert not machine_is_held(path)


def test_the_second_waits_until_the_first_has_ended_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        seen = []

        def on_wait(words: str) -> None:
            seen.append(words)
            assert first.poll() is None
            existing(first.stdin).close()

        with machine_to_itself(on_wait, path=path, poll_s=0.01):
            assert first.wait() == 0
    [words] = seen
    assert words.startswith(
        f"waiting for another measurement on this machine (process {first.pid} since 20"
    )


def test_a_killed_measurement_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        assert machine_is_held(path)
        first.kill()
        first.wait()
    with machine_to_itself(pytest.fail, path=path):
        assert machine_is_held(path)


def test_a_lock_that_cannot_be_made_is_no_reason_not_to_measure(tmp_path: Path) -> None:
    path, notes = tmp_path / "missing" / "lock", tmp_path / "notes"
    said = said_without_a_lock(path)
    assert said == f"measuring without a lock: {path}: No such file or directory"
    notes.write_text("do not lose")
    assert "it is no lock of perfmodel" in said_without_a_lock(notes)
    assert notes.read_text() == "do not lose"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files in which anybody may write; the lock of the machine lies there."""
    monkeypatch.delenv(LOCK_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_the_lock_lies_in_a_private_folder_unless_it_is_named(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = shared / "lock"
    with machine_to_itself(pytest.fail):
        assert machine_is_held()
    assert (shared / f"perfmodel-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(LOCK_VARIABLE, str(named))
    with machine_to_itself(pytest.fail):
        assert machine_is_held(named)


def test_a_link_in_place_of_the_lock_wipes_no_file(shared: Path) -> None:
    victim = shared.parent / "thesis.txt"
    victim.write_text("years of work")
    folder = shared / f"perfmodel-{os.getuid()}"
    folder.mkdir(mode=0o700)
    (folder / "measuring.lock").symlink_to(victim)
    assert said_without_a_lock().endswith("measuring.lock: it is a link; remove it")
    (folder / "measuring.lock").unlink()
    (folder / "measuring.lock").hardlink_to(victim)
    assert "it is no lock of perfmodel" in said_without_a_lock()
    assert victim.read_text() == "years of work"


def test_a_folder_that_another_user_made_is_not_used(shared: Path) -> None:
    folder, elsewhere = shared / f"perfmodel-{os.getuid()}", shared / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert "another user may have made it" in said_without_a_lock()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert "another user may have made it" in said_without_a_lock()
    assert [*elsewhere.iterdir(), *folder.iterdir()] == []


def test_nobody_holds_the_machine_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as first:
        with (
            pytest.raises(MeasurementFailed) as caught,
            machine_to_itself(print, path=path, poll_s=0.01, timeout_s=0.05),
        ):
            pass
        assert f"held by process {first.pid} since 20" in str(caught.value)
        assert LOCK_VARIABLE in str(caught.value)
        existing(first.stdin).close()


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = shared / "perfmodel-test-left"
    (left / "logs").mkdir(parents=True, mode=0o700)
    left.chmod(0o700)
    other = shared / "perfmodel-test-link"
    other.symlink_to(shared.parent)
    with work_folder("perfmodel-test-") as first:
        assert left.exists()  # young: its process may not have locked it yet
        monkeypatch.setattr(locks, "_STALE_S", -1.0)
        with work_folder("perfmodel-test-") as second:
            assert sorted(map(str, shared.iterdir())) == sorted([first, second, str(other)])
    assert list(shared.iterdir()) == [other]
