"""Progress without a terminal: what the time left is made from."""

import sys

import pytest

from calibrate.campaign import Progress
from perfmodel.cli import output as progress


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
