"""Two measurements on one machine take turns."""

import subprocess
import sys
from pathlib import Path

import pytest

from calibrate.turns import machine_to_itself

HOLD = """
import sys
from pathlib import Path
from calibrate.turns import machine_to_itself
with machine_to_itself(print, path=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def unexpected(words: str) -> None:
    raise AssertionError(words)


def test_a_free_machine_is_not_waited_for(tmp_path: Path) -> None:
    for _ in range(2):
        with machine_to_itself(unexpected, path=tmp_path / "lock"):
            pass


def test_the_second_waits_until_the_first_has_ended_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "held\n"
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
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        first.wait()
    with machine_to_itself(unexpected, path=path):
        pass


def test_a_lock_that_cannot_be_made_is_no_reason_not_to_measure(tmp_path: Path) -> None:
    with machine_to_itself(unexpected, path=tmp_path / "missing" / "lock"):
        pass


def test_an_error_inside_passes_through(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="inside"),
        machine_to_itself(unexpected, path=tmp_path / "lock"),
    ):
        raise RuntimeError("inside")
