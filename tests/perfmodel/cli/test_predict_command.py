"""``perfmodel predict`` and layouts of traced workloads as a user sees them; what ``answers.txt`` does not hold."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel import documents as base
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_CALIBRATION
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.llama import document
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


@pytest.mark.parametrize(
    ("asked", "device"),
    [
        (
            "--profile {0}/profile.json --workload {0}/linear.json --device h100-sxm",
            "NVIDIA H100 SXM5",
        ),
        ("--machine dgx-a100 --workload resnet50", "a100-sxm4-80"),
    ],
)
def test_predicting_a_traced_workload_needs_nothing_that_is_slow_to_import(
    tmp_path: Path, asked: str, device: str
) -> None:
    machine, workload = tmp_path / "profile.json", tmp_path / "linear.json"
    as_file(replace(profile(Machine()), operators=costs_of_the_made_up_machine())).write(machine)
    WorkloadDocument(provenance=PROVENANCE, workload=WORKLOAD, trace=traced()).write(workload)
    code = (
        "import sys\nfrom perfmodel.cli import main\n"
        f"sys.argv = 'perfmodel predict {asked.format(tmp_path)} --devices 1 --json'.split()\n"
        "try:\n    main()\nfinally:\n"
        "    assert sys.modules.keys().isdisjoint({'torch', 'scipy', 'matplotlib', 'rich'})\n"
    )
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["device_name"].startswith(device)


TEXT = "fsdp=4 tp=2 micro_batch=2"


@pytest.fixture
def given(tmp_path: Path) -> tuple[str | Path, ...]:
    """A profile with curves of operators, a traced model, and a layout."""
    costs = costs_of_the_made_up_machine()
    as_file(replace(profile(Machine(world_size=4)), operators=costs)).write(
        tmp_path / "profile.json"
    )
    document().write(tmp_path / "llama.json")
    files = tmp_path / "profile.json", tmp_path / "llama.json"
    return "--profile", files[0], "--workload", files[1], "--layout", TEXT


def test_a_layout_is_one_point_with_its_batch_and_evidence(
    run: Run, given: tuple[str | Path, ...]
) -> None:
    found = PredictionDocument.of_text(run("predict", *given, "--json").stdout)
    (point,) = found.points
    assert (point.setting.world_size, point.setting.global_batch) == (8, 8)
    assert point.setting.divided == "dp=4 tp=2 zero=3 micro_batch=2"
    assert {"communication", "tensor collectives"} <= set(point.evidence)
    assert sum(point.breakdown_s.values()) == pytest.approx(point.step_s.nominal, rel=0.1)
    api = pm.predict(given[1], given[3], layout=TEXT)
    assert api.points[0].step_s == point.step_s
    shown = run("predict", *given, "--device-memory", "80GiB").words
    assert "layout: dp=4 tp=2" in shown
    assert "memory of a rank: " in shown
    assert "fits into 80 GiB with probability 100%" in shown


@pytest.mark.parametrize(("own", "text"), [(16, "fsdp=2"), (16, TEXT), (1, "fsdp=2")])
def test_a_layout_without_a_micro_batch_has_one_sample(
    given: tuple[str | Path, ...], own: int, text: str
) -> None:
    trace = replace(existing(document().trace), own_micro_batch=own)
    document().model_copy(update={"trace": trace}).write(Path(given[3]))
    caveats = pm.predict(given[1], given[3], layout=text).caveats
    assert any("add micro_batch=16" in said for said in caveats) is (own > 1 and text != TEXT)


def test_keys_of_the_layout_are_set_in_a_what_if(run: Run, given: tuple[str | Path, ...]) -> None:
    shown = run("whatif", *given, "--set", "tp=1", "--set", "network.bandwidth=2x", "--json")
    was, now = WhatIfDocument.of_text(shown.stdout).scenarios
    assert now.point.setting.world_size == 4
    assert now.contrast is not None
    alone = pm.predict(given[1], given[3], layout="fsdp=4 micro_batch=2").points[0].step_s
    assert now.point.step_s.nominal < alone.nominal
    assert was.lost_s["tensor"] > 0
    printed = run("whatif", *given, "--set", "network.bandwidth=2x", "--verbose").words
    assert "stays as measured is assumed" in printed


def test_explain_names_what_sharding_costs(run: Run, given: tuple[str | Path, ...]) -> None:
    explained = json.loads(run("explain", *given, "--json").stdout)["explanation"]
    assert explained["setting"]["world_size"] == 8
    assert {"all_gather", "reduce_scatter"} <= {loss["cause"] for loss in explained["losses"]}
