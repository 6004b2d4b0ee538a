"""``perfmodel devices``, and ``--device`` of others, as a user sees them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_OK
from tests.perfmodel.cli.command import Run
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import PROVENANCE, Machine, as_file, profile
from tests.perfmodel.traces import WORKLOAD, traced


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    machine, workload = tmp_path / "profile.json", tmp_path / "linear.json"
    as_file(replace(profile(Machine()), operators=costs_of_the_made_up_machine())).write(machine)
    WorkloadDocument(provenance=PROVENANCE, workload=WORKLOAD, trace=traced()).write(workload)
    return machine, workload


def test_a_device_is_shown_with_its_sources(run: Run) -> None:
    listed = run("devices")
    assert listed.exit_code == EXIT_OK
    assert "h100-sxm5" in listed.stdout
    shown = run("devices", "NVIDIA A100-SXM4-80GB").stdout
    assert "2.04 TB/s" in shown
    assert "ml-engineering: Stas Bekman" in shown
    (found,) = json.loads(run("devices", "h200-sxm", "--json").stdout)["devices"]
    assert found["bandwidth"] == {"source": "epoch", "bytes_per_s": 4.8e12}
    assert "ib-ndr" in run("devices", "--links").stdout


def test_predicting_a_traced_workload_needs_nothing_that_is_slow_to_import(
    files: tuple[Path, Path],
) -> None:
    machine, workload = files
    code = (
        "import sys\nfrom perfmodel.cli.app import main\n"
        f"sys.argv = ['perfmodel', 'predict', '--profile', {str(machine)!r}, '--workload', "
        f"{str(workload)!r}, '--device', 'h100-sxm', '--devices', '1', '--json']\n"
        "try:\n    main()\nfinally:\n"
        "    assert sys.modules.keys().isdisjoint({'torch', 'scipy', 'matplotlib', 'rich'})\n"
    )
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["device_name"].startswith("NVIDIA H100 SXM5")
