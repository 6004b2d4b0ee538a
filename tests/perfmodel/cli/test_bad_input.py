"""Whatever a user gets wrong is one line that names the place and the value, and an exit code."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perfmodel import documents as base
from perfmodel.documents.seals import sealed
from perfmodel.errors import EXIT_CALIBRATION, EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.profiles import Machine, as_file, profile

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture
def predict(run: Run, stored: Path) -> Run:
    return lambda *arguments: run("predict", "--profile", stored, "--workload", "light", *arguments)


# The command line in a process of its own.


def test_a_reader_that_leaves_early_gets_no_traceback(stored: Path) -> None:
    """``perfmodel predict | head -1``."""
    command = f"{sys.executable} -m perfmodel predict --profile {stored} --workload light | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("count", [16_384, 1_000_003, 2**20])
def test_a_huge_count_is_fine(predict: Run, count: int) -> None:
    result = predict("--devices", f"1,{count}", "--json")
    assert result.exit_code == EXIT_OK
    assert json.loads(result.stdout)["points"][1]["setting"]["world_size"] == count


def test_a_file_of_another_kind_is_told_apart(run: Run, stored: Path) -> None:
    result = run("predict", "--profile", stored, "--workload", "light", "--validation", stored)
    said = "must be a validation, got the profile of a machine; perfmodel validate writes one"
    assert said in complaint(result, EXIT_FAILURE)


def test_a_profile_that_may_not_be_read_is_unavailable(
    run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer looked first, and said that the command line was wrong."""
    monkeypatch.setattr(os, "access", lambda *_arguments, **_options: False)

    def refuse(_path: Path, **_options: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(base, "read_text", refuse)
    result = run("predict", "--profile", stored, "--workload", "light")
    assert "profile cannot be read: Permission denied" in complaint(result, EXIT_CALIBRATION)


@pytest.mark.parametrize(
    ("changes", "expected", "says"),
    [
        ({"dispatch_s": float("nan")}, EXIT_CALIBRATION, ("dispatch_s", "nan", "profile.json")),
        ({"dispatch_s": True}, EXIT_CALIBRATION, ("dispatch_s",)),
        ({"dispatch_s": "0.1"}, EXIT_CALIBRATION, ("dispatch_s",)),
        ({"ranks_per_node": 2.5}, EXIT_CALIBRATION, ("ranks_per_node",)),
        ({"workloads": []}, EXIT_USAGE, ("must be in the profile",)),
    ],
)
def test_a_profile_that_breaks_a_rule_is_unavailable(
    predict: Run, stored: Path, changes: dict[str, Any], expected: int, says: tuple[str, ...]
) -> None:
    content = json.loads(stored.read_bytes())
    content["machine"].update(changes)
    stored.write_text(sealed(json.dumps(content)))
    line = complaint(predict(), expected)
    assert all(words in line for words in says)


def test_one_rank_predicts_many_with_a_cluster_file_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    as_file(profile(Machine(world_size=1))).write(path)
    asked = ("predict", "--profile", path, "--workload", "light")
    line = complaint(run(*asked), EXIT_CALIBRATION)
    assert "name them (--cluster '2 pcie4-x16', or a file), or calibrate with --nproc 2" in line
    shipped = Path(__file__).parents[3] / "docs" / "clusters" / "ethernet.toml"
    result = run(*asked, "--devices", "1,8", "--cluster", shipped)
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
