"""Help, progress, and lines that fit a terminal."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from calibrate.campaign import Progress
from perfmodel import cli
from perfmodel.cli import _Row, _runnable, app, progress
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_OK, UsageError, WrongArgument, check_positive
from perfmodel.report import wrapped
from tests.perfmodel.cli.command import Run


def test_every_command_stands_once_in_the_help_in_a_line_that_is_not_cut(run: Run) -> None:
    shown = run("--help")
    assert shown.exit_code == EXIT_OK
    lines = [line.split() for line in shown.stdout.splitlines()]
    for name in vars(get_command(app))["commands"]:
        [line] = [words for words in lines if name in words[:2]]
        assert len(line) > 2
        assert line[-1].endswith(".")
        assert not line[-1].endswith("...")


def test_json_is_one_object_and_files_are_told_beside_it(run: Run, tmp_path: Path) -> None:
    written = tmp_path / "lenet.json"
    result = run("trace", "lenet", "--output", written, "--json")
    assert WorkloadDocument.of_text(result.stdout) == WorkloadDocument.read(written)
    assert result.stderr == f"workload: {written}\n"
    checked = json.loads(run("check", written, "--json").stdout)
    assert (checked["schema_version"], checked["exit_code"]) == (1, EXIT_OK)
    assert checked["file"]["kind"] == WorkloadDocument.title
    assert checked["file"]["valid"] == "yes"


def test_a_refused_argument_is_named_by_its_flag() -> None:
    def command(*, bucket_cap_mb: float) -> None:
        check_positive("bucket_cap_mb", bucket_cap_mb)

    with pytest.raises(UsageError, match=r"^--bucket-cap-mb: must be finite and > 0, got 0$"):
        _runnable(command, _Row("predict", shared=()))(bucket_cap_mb=0)


@pytest.mark.parametrize(
    "error", [ValueError("batch axis is missing"), WrongArgument("axis", "must be given")]
)
def test_other_errors_blame_no_flag(error: ValueError) -> None:
    def command(*, batch: int) -> None:
        del batch
        raise error

    with pytest.raises(ValueError, match="axis") as caught:
        _runnable(command, _Row("predict", shared=()))(batch=1)
    assert caught.value is error


def test_waiting_for_the_machine_says_nothing_about_the_pace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour of waiting, then a task every 20 s: after 7 of 10 about a minute is left."""
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    lines = progress._Lines("calibrate")
    lines(Progress(done=0, total=10, task="waiting for process 7", is_waiting=True))
    now_s = 3600.0
    for done in range(1, 8):
        lines(Progress(done=done, total=10, task=f"task {done}"))
        now_s += 20
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "calibrate: 0/10 (waiting for process 7)"
    assert shown[-1] == "calibrate: 7/10, about 60 s left (task 7)"


def test_the_bar_measures_its_pace_without_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --resume tasks were done before the wait: they must not count as done in it."""
    updates: list[dict[str, object]] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        "rich.progress.Progress.update", lambda _self, _row, **values: updates.append(values)
    )
    with progress._shown("calibrate") as show:
        show(Progress(done=4, total=10, task="waiting", is_waiting=True))
        show(Progress(done=5, total=10, task="task 5"))
    assert [entry["completed"] for entry in updates] == [None, 5]


def test_long_computations_are_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_SILENT_S", 0.0)
    with cli.working("plan"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.working("plan"):
        time.sleep(0.5)
    assert "plan" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_output_is_utf_8_whatever_the_terminal_says(encoding: str) -> None:
    """JSON demands it, and older sets have no rules for tables."""
    done = subprocess.run(
        (sys.executable, "-m", "perfmodel", "machines"),
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert "─" in done.stdout.decode()


def test_the_doctor_fits_80_columns(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == EXIT_OK
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_long_line_is_wrapped_between_words() -> None:
    assert wrapped("  on and on --and-on", 12) == "  on and on\n    --and-on"
