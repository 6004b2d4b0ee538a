"""perfmodel network as a user sees it."""

from pathlib import Path

import pytest

from perfmodel.cli.output import wrapped
from perfmodel.errors import EXIT_OK
from tests.perfmodel.cli.command import Run
from tests.perfmodel.documents.test_nccl_tests import TEXT


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "nccl.log"
    path.write_text(TEXT)
    return path


def test_no_cell_is_cut_on_80_columns(run: Run, log: Path) -> None:
    result = run("network", "show", log, "--collective", "all_reduce")
    assert result.exit_code == EXIT_OK
    for words in ("all_reduce", "1 MiB", "50 us", "21 GB/s", "51.2 MB/s"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_long_line_is_wrapped_between_words() -> None:
    assert wrapped("  on and on --and-on", 12) == "  on and on\n    --and-on"
