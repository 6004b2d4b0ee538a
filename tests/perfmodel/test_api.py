"""``import perfmodel as pm``."""

import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.machine import Evidence
from tests.examples import ROOT
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import Machine, as_file, profile

MACHINE = profile(Machine(noise=(0.9, 1.0, 1.1), residual=0.03))


def test_names_are_no_modules() -> None:
    """A module of that name would replace the function as soon as something imports it."""
    modules = {module.name for module in pkgutil.iter_modules(pm.__path__)}
    assert modules.isdisjoint(pm.__all__)
    assert all(callable(getattr(pm, name)) for name in pm.__all__)
    assert set(pm.__all__) <= set(dir(pm))
    with pytest.raises(AttributeError, match="nothing"):
        _ = pm.nothing


def test_importing_is_light() -> None:
    code = "import json, sys, perfmodel; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint({"torch", "numpy", "scipy", "pydantic", "simpy"})


def test_predict_says_what_the_command_line_says(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    as_file(MACHINE).write(path)
    printed = run(f"predict --profile {path} --workload light --devices 1,2,16 --batch 16 --json")
    theirs = PredictionDocument.of_text(printed.stdout)
    ours = pm.predict(path, "light", devices=(1, 2, 16), batch=16)
    assert ours.points == theirs.points
    assert ours.caveats == theirs.caveats
    ours.write(tmp_path / "prediction.json")
    assert pm.read_prediction(tmp_path / "prediction.json") == ours


def test_an_old_calibration_is_a_caveat() -> None:
    old = replace(MACHINE, origin=replace(MACHINE.origin, made_utc="2020-01-01T00:00:00+00:00"))
    for machine, said in ((MACHINE, False), (old, True)):
        [*caveats] = pm.predict(machine, "light").caveats
        assert any(re.search("calibration made .* old", caveat) for caveat in caveats) == said


def test_errors_are_those_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(CalibrationUnavailable, match=r"none\.json"):
        pm.read_profile(tmp_path / "none.json")
    with pytest.raises(UsageError, match="light, heavy"):
        pm.predict(MACHINE, "nothing")
    for devices in (8.5, "8", [1, None]):
        with pytest.raises(UsageError, match="devices: must be whole numbers, got"):
            pm.predict(MACHINE, "light", devices=devices)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"at most 128 counts, got more; name 1, 2, 4, 8, \.\.\.:"):
        pm.predict(MACHINE, "light", devices=range(1, 10**9))
    with pytest.raises(UsageError, match="devices: must be one number or more, got none"):
        pm.predict(MACHINE, "light", devices=())
    with pytest.raises(
        UsageError, match="shape alone; predict --machine dgx-a100 --model llama2-7b"
    ):
        pm.predict("dgx-h100", "llama2-7b")
    with pytest.raises(UsageError, match=r"must be traced, got a object; pm\.trace"):
        pm.predict(MACHINE, object())  # type: ignore[arg-type]


def test_a_strategy_that_nobody_knows_is_refused() -> None:
    said: dict[str, Any] = {"device": "h100-sxm", "precision": "bf16", "micro_batch": 1}
    for observed in ("8 GPUs: 3 s", "8 GPUs dp=8 zero=1: 3 s", "1 GPU 3 s"):
        with pytest.raises(UsageError, match=r"^--strategy: must be one of ddp, .*, got 'fsdp1'"):
            pm.diagnose(
                "llama2-7b", **said, devices_per_node=8, strategy="fsdp1", observed=[observed]
            )


def test_memory_takes_a_model_by_its_short_name_as_the_command_does(run: Run) -> None:
    found = pm.memory("lenet", device="h100-sxm")
    told = json.loads(run("memory --workload lenet --device h100-sxm --json").stdout)
    assert (found.name, found.untried) == ("lenet", ())
    assert json.loads(json.dumps(found.as_json())) == {**told, "schema_version": 2}
    assert "--precision bf16" in {row.name for row in found.techniques}


def test_other_nodes_are_joined_like_those_of_a_shipped_machine(tmp_path: Path, run: Run) -> None:
    """Inside its node the machine stays as it was measured; between nodes nothing counts as measured."""
    joined = pm.with_nodes_of(MACHINE, "dgx-h100")
    (alone,), (within, beyond) = (
        pm.predict(MACHINE, "light", devices=2, batch=16).points,
        pm.predict(joined, "light", devices=(2, 64), batch=16).points,
    )
    assert within.step_s.nominal == pytest.approx(alone.step_s.nominal, rel=1e-9)
    assert within.evidence == alone.evidence
    between = {beyond.evidence[name] for name in ("communication", "stragglers")}
    assert between == {Evidence.INFERRED}
    slower = pm.predict(pm.with_nodes_of(MACHINE, "dgx-a100"), "light", devices=64, batch=16)
    assert slower.cluster == "nodes like dgx-a100"
    # 17 and 61 GB/s for each device: the slower network makes the longer step.
    assert slower.points[0].step_s.nominal > beyond.step_s.nominal
    path = tmp_path / "profile.json"
    as_file(joined).write(path)
    assert pm.read_profile(path).cluster == joined.cluster
    asked = f"--profile {path} --workload light --batch 16"
    cluster = ROOT / "docs/clusters/ethernet.toml"
    explained = run(f"explain {asked} --devices 32 --cluster {cluster} --verbose")
    assert "assume links as in" in explained.words
    told = run(f"predict {asked} --devices 2,64 --nodes-like dgx-h100 --json")
    assert PredictionDocument.of_text(told.stdout).points == (within, beyond)


def test_nodes_that_nobody_knows_are_refused() -> None:
    with pytest.raises(
        CalibrationUnavailable, match=r"name: must be .*dgx-a100, dgx-h100.*rtx-3090"
    ):
        pm.with_nodes_of(MACHINE, "rtx-3090")
    with pytest.raises(UsageError, match="several ranks, got one device"):
        pm.with_nodes_of("rtx-3090", "dgx-h100")
