"""Predictions on a cluster file, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import EXIT_OK
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import Machine, as_file, profile

CLUSTERS = Path(__file__).parents[3] / "docs/clusters"


@pytest.fixture
def asked(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "profile.json"
    as_file(profile(Machine(noise=(0.9, 1.0, 1.1, 1.3)))).write(path)
    return ("--profile", path, "--workload", "heavy", "--devices")


def test_a_prediction_names_the_cluster_its_bottleneck_link_and_the_tail(
    run: Run, asked: tuple[object, ...]
) -> None:
    cluster = CLUSTERS / "two-data-centres.toml"
    done = run("predict", *asked, "8,64", "--cluster", cluster, "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["cluster"] == "2 data centres of 4 x 8 H100"
    first, last = document["points"]
    assert first["bottleneck_link"].startswith("node")
    assert last["evidence"]["communication"] == "assumed"
    assert "assume links as in" in str(document["caveats"])


def test_explain_takes_a_cluster_too(run: Run, asked: tuple[object, ...]) -> None:
    done = run("explain", *asked, 32, "--cluster", CLUSTERS / "ethernet.toml")
    assert done.exit_code == EXIT_OK
    assert "all reduce" in done.stdout
