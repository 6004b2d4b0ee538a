"""Predictions on a cluster file, and cluster files from logs, through the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli.app import app
from perfmodel.errors import NotFeasible
from tests.perfmodel.documents.test_topology_logs import MATRIX
from tests.perfmodel.profiles import Machine, as_file, profile

ROOT = Path(__file__).parents[3]
RUNNER = CliRunner()


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    as_file(profile(Machine(noise=(0.9, 1.0, 1.1, 1.3)))).write(path)
    return str(path)


def predicted(machine: str, cluster: str, devices: str) -> dict[str, object]:
    done = RUNNER.invoke(
        app,
        [
            *("predict", "--profile", machine, "--workload", "heavy", "--devices", devices),
            *("--cluster", cluster, "--json"),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_prediction_names_the_cluster_its_bottleneck_link_and_the_tail(machine: str) -> None:
    cluster = str(ROOT / "docs/clusters/two-data-centres.toml")
    document = predicted(machine, cluster, "8,64")
    assert document["cluster"] == "2 data centres of 4 x 8 H100"
    points = document["points"]
    assert isinstance(points, list)
    assert points[0]["bottleneck_link"].startswith("node")
    assert points[1]["evidence"]["communication"] == "assumed"
    assert set(points[1]["tail_s"]) == {"p95", "p99"}
    assert "assume links as in" in str(document["caveats"])


def test_explain_takes_a_cluster_too(machine: str) -> None:
    cluster = str(ROOT / "docs/clusters/ethernet.toml")
    done = RUNNER.invoke(
        app,
        [
            *("explain", "--profile", machine, "--workload", "heavy", "--devices", "32"),
            *("--cluster", cluster),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "all reduce" in done.stdout


def test_more_devices_than_the_file_has_are_not_feasible(machine: str) -> None:
    with pytest.raises(NotFeasible, match="at most 8, all that 8 PCIe cards has, got 16"):
        predicted(machine, str(ROOT / "docs/clusters/pcie-box.toml"), "16")


def test_an_imported_cluster_can_be_predicted_on(machine: str, tmp_path: Path) -> None:
    matrix, cluster = tmp_path / "topo.txt", tmp_path / "cluster.toml"
    matrix.write_text(MATRIX, encoding="utf-8")
    done = RUNNER.invoke(
        app,
        [
            *("network", "import", str(matrix), "--output", str(cluster)),
            *("--nodes", "4", "--nic-bandwidth", "400Gb/s"),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "8 devices" in done.stdout
    assert predicted(machine, str(cluster), "8")["cluster"] == "topo"
