"""``import perfmodel as pm``."""

import datetime as dt
import json
import math
import pkgutil
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.errors import CalibrationUnavailable, PerfModelError, UsageError, WrongArgument
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


#: What no argument takes, or none but one of another kind.
ODD: tuple[Any, ...] = (
    *(0, -1, 1.5, math.nan, math.inf, 1e308, 10**400, True, 1 + 2j),
    *("", "x", "a\0b", "x" * 5000, b"x", [], [1, None], (), {}, {"a": 1}, {1}, range(10**9)),
    *(np.float64(2), np.int64(2), np.array([1.0, 2.0]), np.array([]), Path("/dev/zero")),
    *(object(), int, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
)
TODAY = dt.date(2026, 11, 21)
#: Functions, each with arguments that fit.
CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "predict": (
        [MACHINE, "light"],
        {"devices": 2, "scaling": "weak", "batch": 16, "accumulation": 1, "bucket_cap_mb": 25.0}
        | {"loader_samples_per_s": 1e4, "sync_every_step": False, "validation": None}
        | {"cluster": "2 nvlink3", "layout": None, "capacity_bytes": None},
    ),
    "explain": ([MACHINE, "light"], {"devices": 2, "scaling": "weak", "batch": 16}),
    "whatif": ([MACHINE, "light", {"devices": "4"}], {"devices": 2, "batch": 16}),
    "memory": (["none.json"], {"device": "h100-sxm", "micro_batch": 8, "devices": 2}),
    "diagnose": (
        ["llama2-7b"],
        {
            "device": "h100-sxm",
            "precision": "bf16",
            "micro_batch": 4,
            "observed": "8 GPUs 1 node 3 s",
        }
        | {"strategy": "fsdp", "log": None, "lora": False, "cluster": None, "global_batch": 32},
    ),
    "read_profile": (["dgx-a100"], {}),
    "read_prediction": (["none.json"], {}),
    "with_nodes_of": (["dgx-a100", "dgx-h100"], {}),
    "plan_options": (["none.toml"], {"today": TODAY}),
    "compare_costs": (["none.toml"], {"today": TODAY}),
    "search": (
        ["dgx-h100", "llama3-8b"],
        {"devices": 8, "global_batch": 8, "capacity_bytes": 8 * 10**10, "top": 1, "interleave": 1}
        | {"sequence_length": None, "devices_per_node": 8, "cluster": None},
    ),
    "predict_large_model": (
        ["dgx-h100", "llama3-8b", "dp=8 micro_batch=1"],
        {"sequence_length": 2048, "devices_per_node": 8, "capacity_bytes": 8 * 10**10},
    ),
    "acceptance_terms": ([MACHINE, "light"], {"confidence": 0.9, "observed": [], "logs": []}),
    "judge": (
        ["none.toml"],
        {"machine": MACHINE, "observed": [], "runs": [], "parts": [], "logs": [], "goodput": None},
    ),
    "compare_profiles": ([MACHINE, MACHINE], {}),
    "FailureCause": ([], {"name": "gpu", "mtbf_device_s": 1e9, "takes_node": False}),
    "Job": (
        [],
        {"devices": 8, "work_s": 1e6, "checkpoint_interval_s": 1e3, "spares": 1, "causes": ()},
    ),
    "goodput": (
        [pm.Job(devices=8, work_s=1e6, checkpoint_interval_s=1e3)],
        {"replicas": 2, "seed": 0, "mtbf_stops": 3, "deadline_s": 2e6},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_any_argument_of_another_kind_is_refused_in_our_words(name: str) -> None:
    """Never by a type of Python deep inside, nor in words of NumPy and pydantic."""
    given, named = CALLS[name]
    for where in (*range(len(given)), *named):
        for odd in ODD:
            arguments, options = list(given), dict(named)
            if isinstance(where, int):
                arguments[where] = odd
            else:
                options[where] = odd
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    getattr(pm, name)(*arguments, **options)
                except (PerfModelError, WrongArgument) as error:
                    said = str(error)
                    assert "\n" not in said
                    assert not re.search("pydantic|numpy|validation error", said), said


def test_numbers_of_numpy_and_names_of_logs_are_taken(tmp_path: Path) -> None:
    ours = pm.predict(MACHINE, "light", devices=np.int64(2), batch=np.int64(16))  # type: ignore[arg-type]
    assert ours.points == pm.predict(MACHINE, "light", devices=2, batch=16).points
    said = {"devices": np.int64(8), "work_s": np.float32(1e6), "checkpoint_interval_s": 1e3}
    found = pm.goodput(pm.Job(**said), replicas=np.int32(2))  # type: ignore[arg-type]
    assert json.loads(found.model_dump_json())["job"]["devices"] == 8
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {n} | step_time 2.5 s\n" for n in range(9)))
    with pytest.raises(PerfModelError, match=r"train\.log"):
        pm.diagnose("llama2-7b", device="h100-sxm", log=str(log))
