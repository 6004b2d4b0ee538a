"""Costs of a device from a table of steps: recovery of a known device, and tables that are wrong."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate.step_fit import family_of
from calibrate.step_table import Setting, calibrate_from_steps, read_steps
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import answer
from perfmodel.cost.rescaling import sheet_of
from perfmodel.cost.step_curves import for_version, shipped_priors
from perfmodel.cost.step_law import StepBatch, log_constants, step_seconds
from perfmodel.cost.step_work import step_work
from perfmodel.documents.hardware import find_device, shipped_catalogue
from perfmodel.documents.profile import ProfileDocument, shipped_machines
from perfmodel.errors import (
    CalibrationUnavailable,
    IncomparableRuns,
    InvalidDocument,
    PerfModelError,
    UsageError,
)
from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.workload.step import SymbolicStep, TracedStep
from tests.calibrate.samples import table_of
from tests.existing import existing
from tests.perfmodel.traces import WORKLOAD, traced

DEVICE = "rtx-3090"
#: A device that the prior does not expect.
TRUTH = {"peak fp32": 0.6, "memory": 0.6, "host_s": 20e-6, "launch_s": 5e-6}
FAMILIES = ("alpha", "beta", "gamma", "delta")


def symbolic(setting: Setting) -> SymbolicStep:
    """Models of one linear layer that runs a number of times; the name says how often."""
    if setting.model == "unknown":
        raise UsageError("model: must be a model, got 'unknown'")
    step = traced()
    [segment] = step.segments
    count = int(setting.model.rpartition("_")[2])
    method = replace(step.method, precision="fp16" if "amp" in setting.precision else "fp32")
    return replace(step, segments=(replace(segment, count=count),), method=method)


def trace_named(setting: Setting) -> TracedStep:
    return symbolic(setting).at(micro_batch=setting.batch)


def true_s(setting: Setting) -> float:
    step = trace_named(setting)
    logs = log_constants({**TRUTH}, shipped_priors())
    sheet = sheet_of(find_device(DEVICE, shipped_catalogue()))
    return float(step_seconds(StepBatch.of([step_work(step)], sheet), logs).step_s[0])


def setting(model: str, batch: int, precision: str = "fp32") -> Setting:
    return Setting(
        model=model,
        batch=batch,
        image=None,
        sequence=None,
        precision=precision,
        memory_format="contiguous",
        optimizer="sgd",
        torch="2.4",
    )


def some_rows() -> list[dict[str, object]]:
    chosen = [
        (f"{family}_{count}", batch)
        for family in FAMILIES
        for count, batch in ((3, 4), (20, 64), (8, 512))
    ]
    rng = np.random.default_rng(0)
    return [
        {
            "model": model,
            "batch": batch,
            "precision": "fp32",
            "torch": "2.4",
            "step_time_s": true_s(setting(model, batch)) * math.exp(0.01 * rng.standard_normal()),
        }
        for model, batch in chosen
    ]


@pytest.mark.parametrize(("device", "is_refused"), [("gtx-1080ti", True), ("rtx-3090", False)])
def test_an_older_fit_of_a_device_without_tensor_cores_is_refused(
    tmp_path: Path, device: str, *, is_refused: bool
) -> None:
    """Its constants of 16 bit had the name of tensor cores; the priors would be taken in their place."""
    document = ProfileDocument.read(shipped_machines()[device])
    costs = existing(document.machine.device_costs)
    older = {name.removeprefix("vector "): value for name, value in costs.constants.items()}
    machine = replace(document.machine, device_costs=replace(costs, constants=older))
    path = tmp_path / "older.json"
    document.model_copy(update={"machine": machine}).write(path)
    says = "tensor cores; perfmodel calibrate --from-steps makes it new"
    with pytest.raises(CalibrationUnavailable, match=says) if is_refused else nullcontext():
        ProfileDocument.read(path)


def test_steps_of_unseen_sizes_are_recovered(tmp_path: Path) -> None:
    table = table_of(tmp_path / "steps.csv", *some_rows())
    document, _ = calibrate_from_steps(table, device=DEVICE, trace=trace_named)
    document.write(tmp_path / "device.json")
    machine = ProfileDocument.read(tmp_path / "device.json").machine
    costs = existing(machine.device_costs)
    assert costs.versions == {"torch": "2.4"}
    [error] = costs.left_out
    assert (error.num_rows, error.num_families) == (12, 4)
    assert error.mape < 0.05
    workload = timed_workload(machine, WORKLOAD, trace=symbolic(setting("new_12", 1)))
    layout = Layout(micro_batch=128)
    found = answer(Question(machine=machine, workload=workload, layout=layout))
    assert found.evidence["compute"] is Evidence.INFERRED
    assert found.step.nominal == pytest.approx(true_s(setting("new_12", 128)), rel=0.05)
    assert found.step.p95 / found.step.nominal == pytest.approx(math.exp(error.log_error), rel=0.1)


def test_another_version_widens_and_says_so(tmp_path: Path) -> None:
    rows = some_rows()
    older = [
        row | {"torch": "1.9", "step_time_s": 1.2 * float(str(row["step_time_s"]))} for row in rows
    ]
    table = table_of(tmp_path / "steps.csv", *rows, *older)
    document, notes = calibrate_from_steps(table, device=DEVICE, trace=trace_named)
    costs = existing(document.machine.device_costs)
    assert costs.version_drift == pytest.approx(math.log(1.2), rel=0.01)
    assert any("older versions" in note for note in notes)
    other = for_version(document.machine, "2.9")
    assert existing(other.device_costs).left_out[0].log_error > costs.left_out[0].log_error
    assert "2.4" in other.undetermined[-1]
    assert for_version(document.machine, "2.4.1") is document.machine


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"step_time_s": "0"}, InvalidDocument, "line 3: step_time_s"),
        ({"step_time_s": "fast"}, InvalidDocument, "line 3: step_time_s"),
        ({"batch": "0"}, InvalidDocument, "line 3: batch"),
        ({"precision": "int4"}, InvalidDocument, "line 3: precision"),
        ({"precision": ""}, InvalidDocument, "line 3: precision"),
        ({"model": ""}, InvalidDocument, "line 3: model"),
        ({"model": "unknown"}, UsageError, "line 3: model: must be a model"),
        ({"step_time_s": "1e-9"}, InvalidDocument, "line 3: step_time_s"),
        ({"step_time_s": "900"}, InvalidDocument, "line 3: step_time_s"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, change: Mapping[str, str], kind: type[PerfModelError], said: str
) -> None:
    rows = some_rows()
    rows[1] |= change
    table = table_of(tmp_path / "steps.csv", *rows)
    with pytest.raises(kind, match=said):
        calibrate_from_steps(table, device=DEVICE, trace=trace_named)


def test_a_column_in_milliseconds_is_refused(tmp_path: Path) -> None:
    rows = [row | {"step_time_s": 1e3 * float(str(row["step_time_s"]))} for row in some_rows()]
    with pytest.raises(InvalidDocument, match=r"too large .* must be in seconds"):
        calibrate_from_steps(
            table_of(tmp_path / "steps.csv", *rows), device=DEVICE, trace=trace_named
        )


def test_rows_in_milliseconds_beside_one_that_is_not_are_named(tmp_path: Path) -> None:
    first, *others = some_rows()[:3]
    for row in others:
        row["step_time_s"] = 1e3 * float(str(row["step_time_s"]))
    table = table_of(tmp_path / "steps.csv", first, *others)
    said = r"line [34]: step_time_s: .* s is .* times too large"
    with pytest.raises(InvalidDocument, match=said):
        calibrate_from_steps(table, device=DEVICE, trace=trace_named)


def test_one_of_two_rows_that_is_a_thousand_times_too_long_is_named(tmp_path: Path) -> None:
    """As the device expects the other, their mean does not count."""
    first, second, *_ = some_rows()
    for row in (first, second):
        step = trace_named(setting(str(row["model"]), int(str(row["batch"]))))
        logs = log_constants({}, shipped_priors())
        sheet = sheet_of(find_device(DEVICE, shipped_catalogue()))
        expected = step_seconds(StepBatch.of([step_work(step)], sheet), logs).step_s
        row["step_time_s"] = float(expected[0])
    second["step_time_s"] = 1e3 * float(str(second["step_time_s"]))
    table = table_of(tmp_path / "steps.csv", first, second)
    with pytest.raises(InvalidDocument, match=r"line 3: step_time_s: .* times what the other rows"):
        calibrate_from_steps(table, device=DEVICE, trace=trace_named)


def test_rows_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    rows = some_rows()
    rows.append(rows[0] | {"step_time_s": 2 * float(str(rows[0]["step_time_s"]))})
    with pytest.raises(IncomparableRuns, match=r"line 2 and line 14 are the same setting"):
        read_steps(table_of(tmp_path / "steps.csv", *rows))


def test_a_row_written_twice_counts_once_and_is_said(tmp_path: Path) -> None:
    rows = some_rows()
    found, notes = read_steps(table_of(tmp_path / "steps.csv", *rows, rows[0]))
    assert len(found) == len(rows)
    assert "lines 2, 14 are one setting" in notes[0]


def test_few_rows_keep_the_prior_and_a_wide_interval(tmp_path: Path) -> None:
    table = table_of(tmp_path / "steps.csv", *some_rows()[:2])
    document, notes = calibrate_from_steps(table, device=DEVICE, trace=trace_named)
    costs = existing(document.machine.device_costs)
    assert costs.left_out[0].log_error > 0.3
    assert any("as other devices say" in note for note in notes)


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path / "steps.csv", *some_rows())
    with pytest.raises(UsageError, match="--device"):
        calibrate_from_steps(table, device="abacus", trace=trace_named)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("timm:tf_efficientnet_b0_ns", "efficientnet"),
        ("torchvision:resnet50", "resnet"),
        ("timm:ssl_resnext50_32x4d", "resnext"),
        ("nets/small.py:wide_net", "small"),
    ],
)
def test_families_by_name(model: str, family: str) -> None:
    assert family_of(model) == family


@pytest.mark.parametrize(
    ("torch", "is_fused"),
    [("1.13", False), ("2.0", True), ("nightly", True), ("\u00b2", True), ("9" * 5000, True)],
    ids=lambda value: str(value)[:9],
)
def test_what_fuses_operators_by_version(torch: str, *, is_fused: bool) -> None:
    assert replace(setting("light_3", 4), torch=torch).is_fused is is_fused
