"""The verdict on published tables: where it is written."""

from pathlib import Path

from perfmodel.documents.verdicts import PublishedDocument
from tests.perfmodel.cli.command import Run, complaint
from tests.validate.published.test_published import ring_rows, write


def test_json_takes_a_file(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "collectives.csv", ring_rows())
    asked = ("validate", "published", "--data", tmp_path, "--sources", "collectives")
    out = tmp_path / "out.json"
    result = run(*asked, "--json", out)
    assert result.exit_code == 0, result
    written = PublishedDocument.read(out)
    printed = run(*asked, "--json")
    assert PublishedDocument.model_validate_json(printed.stdout).series == written.series
    assert "No such option: --output" in complaint(run(*asked, "--output", out), exit_code=2)
    assert "FILE: must follow --json" in complaint(run(*asked, out), exit_code=2)
