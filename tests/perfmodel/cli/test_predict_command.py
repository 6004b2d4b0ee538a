"""``perfmodel predict`` as a user sees it; what a row of ``answers.txt`` does not hold."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel import documents as base
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_CALIBRATION, EXIT_OK
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import LIGHT, PROVENANCE, Machine, as_file, profile
from tests.perfmodel.traces import WORKLOAD, traced
from tests.perfmodel.tracing.configs import llama_config

LLAMA = llama_config(2048, 8192, 16, 32, 32000, 4096) | {"num_key_value_heads": 8}


@pytest.fixture
def asked(stored: Path) -> str:
    return f"predict --profile {stored} --workload light"


def test_what_was_written_is_said_beside_csv(run: Run, asked: str, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("prediction", "trace")}
    result = run(f"{asked} --csv --output {paths['prediction']} --trace {paths['trace']}")
    assert result.stderr.splitlines() == [f"{name}: {path}" for name, path in paths.items()]
    assert "prediction.json" not in result.stdout


def test_points_are_the_same_in_any_order_of_a_file_and_without_their_baseline(
    run: Run, asked: str, stored: Path, tmp_path: Path
) -> None:
    """One device is the baseline even if nobody asks for it."""
    path, file = tmp_path / "deep" / "prediction.json", tmp_path / "light.json"
    WorkloadDocument(workload=LIGHT, trace=traced()).write(file)

    def predicted(words: str) -> PredictionDocument:
        return PredictionDocument.of_text(run(f"{words} --json").stdout)

    whole = predicted(f"{asked} --devices 64,1,2 --output {path}")
    assert PredictionDocument.read(path) == whole
    assert predicted(f"{asked} --devices 1,2,64,64").points == whole.points
    assert predicted(f"{asked} --devices 2,64").points == whole.points[1:]
    by_file = predicted(f"predict --profile {stored} --workload {file} --devices 1,2,64")
    assert by_file.points == whole.points


def test_a_layout_is_predicted_from_a_configuration(run: Run, tmp_path: Path) -> None:
    names = ("inferred", "config", "answer", "trace")
    machine, config, output, trace = (tmp_path / f"{name}.json" for name in names)
    inferred().write(machine)
    config.write_text(json.dumps(LLAMA))
    given = f"predict --profile {machine} --model {config} --device-memory 40GiB --batch 32 --json"
    layout = "dp=2 tp=2 pp=2 micro_batch=2 zero=1"
    result = run(f"{given} --layout '{layout}' --output {output} --trace {trace}")
    assert result.exit_code == 0, result
    document = PredictionDocument.of_text(result.stdout)
    assert document == PredictionDocument.read(output)
    [answer] = document.points
    large = existing(answer.large_model)
    assert large.trained.devices == 8
    assert "accumulation=8" in answer.layout
    assert large.tokens_per_s.nominal == pytest.approx(32 * 4096 / answer.step_s.nominal)
    assert sum(large.parts_s.model_dump().values()) == pytest.approx(large.formula_step_s)
    assert large.simulated_step_s == pytest.approx(large.formula_step_s, rel=0.06)
    first = answer.memory[0]
    assert sum(first.parts_bytes.values()) == pytest.approx(first.needed_bytes)
    assert [stage.stage for stage in answer.memory] == [0, 1]
    assert answer.fit_probability is not None
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * large.simulated_step_s)


def test_a_profile_that_may_not_be_read_is_unavailable(
    run: Run, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer looked first, and said that the command line was wrong."""
    monkeypatch.setattr(os, "access", lambda *_arguments, **_options: False)

    def refuse(_path: Path, **_options: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(base, "read_text", refuse)
    line = complaint(run(asked), EXIT_CALIBRATION)
    assert "profile cannot be read: Permission denied" in line


def test_one_rank_predicts_many_with_a_cluster_file_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    as_file(profile(Machine(world_size=1))).write(path)
    alone = f"predict --profile {path} --workload light"
    line = complaint(run(alone), EXIT_CALIBRATION)
    assert "name them (--cluster '2 pcie4-x16', or a file), or calibrate with --nproc 2" in line
    result = run(f"{alone} --devices 1,8 --cluster {ROOT}/docs/clusters/ethernet.toml")
    assert result.exit_code == EXIT_OK, result
    assert "assumed" in result.stdout


def test_predicting_a_traced_workload_needs_nothing_that_is_slow_to_import(tmp_path: Path) -> None:
    machine, workload = tmp_path / "profile.json", tmp_path / "linear.json"
    as_file(replace(profile(Machine()), operators=costs_of_the_made_up_machine())).write(machine)
    WorkloadDocument(provenance=PROVENANCE, workload=WORKLOAD, trace=traced()).write(workload)
    code = (
        "import sys\nfrom perfmodel.cli.app import main\n"
        f"sys.argv = ['perfmodel', 'predict', '--profile', {str(machine)!r}, '--workload', "
        f"{str(workload)!r}, '--device', 'h100-sxm', '--devices', '1', '--json']\n"
        "try:\n    main()\nfinally:\n"
        "    assert sys.modules.keys().isdisjoint({'torch', 'scipy', 'matplotlib', 'rich'})\n"
    )
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["device_name"].startswith("NVIDIA H100 SXM5")
