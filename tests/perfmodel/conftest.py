"""What tests of the command line read."""

from pathlib import Path

import pytest

from tests.perfmodel.profiles import Machine, as_file, profile


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A profile as a file."""
    path = tmp_path / "profile.json"
    as_file(profile(Machine())).write(path)
    return path
