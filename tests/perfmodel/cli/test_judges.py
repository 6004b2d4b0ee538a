"""perfmodel validate network and published: where they cannot run, where they write."""

from pathlib import Path

import pytest

from perfmodel.documents.verdicts import PublishedDocument
from perfmodel.errors import EXIT_NOT_FEASIBLE, EXIT_USAGE
from tests.calibrate.samples import table_of
from tests.perfmodel.cli.command import Run, complaint
from tests.validate.published.test_published import ring_rows


def test_without_rights_one_line_says_what_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "validate.testbed.cluster.obstacle", lambda: "unshare: Operation not permitted"
    )
    line = complaint(run("validate", "network", "--out", tmp_path / "new"), EXIT_NOT_FEASIBLE)
    assert "Operation not permitted; run as root, or where user namespaces are allowed" in line
    assert not (tmp_path / "new").exists()


def test_a_folder_with_runs_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("")
    line = complaint(run("validate", "network", "--out", tmp_path), EXIT_USAGE)
    assert "continue with --resume" in line


def test_a_published_verdict_is_printed_and_written(run: Run, tmp_path: Path) -> None:
    table_of(tmp_path / "collectives.csv", *ring_rows())
    asked = ("validate", "published", "--data", tmp_path, "--sources", "collectives")
    out = tmp_path / "out.json"
    printed = run(*asked, "--json", "--output", out)
    assert printed.exit_code == 0, printed
    written = PublishedDocument.read(out)
    assert PublishedDocument.of_text(printed.stdout).series == written.series
