"""What tests of the command line, and of what it reads, start from."""

from pathlib import Path

import pytest

from tests.perfmodel.cli.command import Run, runner
from tests.perfmodel.profiles import Machine, as_file, profile


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A profile as a file."""
    path = tmp_path / "profile.json"
    as_file(profile(Machine())).write(path)
    return path
