"""``import perfmodel as pm``."""

import json
import pkgutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.errors import CalibrationUnavailable, UsageError
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import LIGHT, Machine, as_file, profile

ROOT = Path(__file__).parents[2]
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
    printed = run(
        *("predict", "--profile", path, "--workload", "light"),
        *("--devices", "1,2,16", "--batch", "16", "--json"),
    )
    theirs = PredictionDocument.of_text(printed.stdout)
    ours = pm.predict(path, "light", devices=(1, 2, 16), batch=16)
    assert ours.points == theirs.points
    assert ours.caveats == theirs.caveats
    ours.write(tmp_path / "prediction.json")
    assert pm.read_prediction(tmp_path / "prediction.json") == ours


def test_documents_and_paths_are_the_same(tmp_path: Path) -> None:
    as_file(MACHINE).write(tmp_path / "profile.json")
    assert asdict(pm.read_profile(tmp_path / "profile.json")) == asdict(MACHINE)
    by_path = pm.explain(str(tmp_path / "profile.json"), "light", devices=4)
    assert by_path == pm.explain(MACHINE, "light", devices=4)
    assert by_path.setting.workload == LIGHT.name


def test_an_old_calibration_is_a_caveat() -> None:
    assert not any("calibrate again" in caveat for caveat in pm.predict(MACHINE, "light").caveats)
    origin = replace(MACHINE.origin, made_utc="2020-01-01T00:00:00+00:00")
    old = replace(MACHINE, origin=origin)
    assert "calibration made" in pm.predict(old, "light").caveats[0]


def test_errors_are_those_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(CalibrationUnavailable, match=r"none\.json"):
        pm.read_profile(tmp_path / "none.json")
    with pytest.raises(UsageError, match="light, heavy"):
        pm.predict(MACHINE, "nothing")
