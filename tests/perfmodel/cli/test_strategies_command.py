"""``perfmodel validate strategies`` where it cannot run, or is asked for nonsense."""

from pathlib import Path

import pytest

from perfmodel.errors import EXIT_NOT_FEASIBLE, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint


def test_without_rights_one_line_says_what_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "validate.testbed.cluster.obstacle", lambda: "unshare: Operation not permitted"
    )
    line = complaint(run("validate", "strategies", "--out", tmp_path / "runs"), EXIT_NOT_FEASIBLE)
    assert "Operation not permitted; run as root, or where user namespaces are allowed" in line
    assert not (tmp_path / "runs").exists()


def test_options_that_make_no_sense(run: Run, tmp_path: Path) -> None:
    line = complaint(run("validate", "strategies", "--out", tmp_path, "--minutes", "0"), EXIT_USAGE)
    assert "--minutes: must be finite and > 0" in line
    (tmp_path / "calibration.jsonl").write_text("")
    line = complaint(run("validate", "strategies", "--out", tmp_path), EXIT_USAGE)
    assert "continue with --resume" in line
