"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import errno
import json
import os
from pathlib import Path

import pytest

from perfmodel import documents as base
from perfmodel.errors import EXIT_CALIBRATION, EXIT_OK, EXIT_USAGE
from tests.examples import ROOT
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.profiles import Machine, as_file, profile

ASKED = ("predict", "--workload", "light", "--profile")


@pytest.mark.parametrize("count", [16_384, 1_000_003, 2**20])
def test_a_huge_count_is_fine(run: Run, stored: Path, count: int) -> None:
    result = run(*ASKED, stored, "--devices", f"1,{count}", "--json")
    assert result.exit_code == EXIT_OK
    assert json.loads(result.stdout)["points"][1]["setting"]["world_size"] == count


def test_a_profile_that_may_not_be_read_is_unavailable(
    run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer looked first, and said that the command line was wrong."""
    monkeypatch.setattr(os, "access", lambda *_arguments, **_options: False)

    def refuse(_path: Path, **_options: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(base, "read_text", refuse)
    line = complaint(run(*ASKED, stored), EXIT_CALIBRATION)
    assert "profile cannot be read: Permission denied" in line


def test_one_rank_predicts_many_with_a_cluster_file_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    as_file(profile(Machine(world_size=1))).write(path)
    line = complaint(run(*ASKED, path), EXIT_CALIBRATION)
    assert "name them (--cluster '2 pcie4-x16', or a file), or calibrate with --nproc 2" in line
    shipped = ROOT / "docs" / "clusters" / "ethernet.toml"
    result = run(*ASKED, path, "--devices", "1,8", "--cluster", shipped)
    assert result.exit_code == EXIT_OK, result
    assert "assumed" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("network",)])
def test_a_group_without_a_command_prints_its_help(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    lines = (result.stdout + result.stderr).splitlines()
    assert result.exit_code == EXIT_USAGE
    assert lines[0] == f"Usage: {' '.join(('perfmodel', *arguments))} [OPTIONS] COMMAND [ARGS]..."
    assert ("Predict:" if not arguments else "Commands:") in lines


def test_the_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stderr) == (EXIT_OK, "")
    assert result.stdout.startswith("perfmodel ")
