"""Costs of a device from a table of steps: recovery of a known device, and tables that are wrong."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.step_fit import family_of
from calibrate.step_table import Setting, calibrate_from_steps, read_steps
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import answer
from perfmodel.cost.rescaling import sheet_of
from perfmodel.cost.step_curves import shipped_priors
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


def true_s(setting: Setting, truth: Mapping[str, float] = TRUTH) -> float:
    step = trace_named(setting)
    logs = log_constants(truth, shipped_priors())
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


Rows = list[dict[str, Any]]


def some_rows() -> Rows:
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
    older = [row | {"torch": "1.9", "step_time_s": 1.2 * row["step_time_s"]} for row in rows]
    table = table_of(tmp_path / "steps.csv", *rows, *older)
    document, notes = calibrate_from_steps(table, device=DEVICE, trace=trace_named)
    costs = existing(document.machine.device_costs)
    assert costs.version_drift == pytest.approx(math.log(1.2), rel=0.01)
    assert any("older versions" in note for note in notes)


def slower(rows: Rows, *, first: int = 0) -> Rows:
    """Milliseconds in place of seconds, from a row on."""
    return [*rows[:first], *(r | {"step_time_s": 1e3 * r["step_time_s"]} for r in rows[first:])]


def as_expected(rows: Rows) -> Rows:
    """As long as the prior of the device says."""
    return [r | {"step_time_s": true_s(setting(r["model"], r["batch"]), {})} for r in rows]


BAD: Sequence[tuple[Mapping[str, str] | Callable[[Rows], Rows], type[PerfModelError], str]] = (
    *(
        ({name: text}, InvalidDocument, f"line 3: {name}")
        for name, text in (
            *(("step_time_s", text) for text in ("0", "fast", "1e-9", "900")),
            *(("batch", "0"), ("precision", "int4"), ("precision", ""), ("model", "")),
        )
    ),
    ({"model": "unknown"}, UsageError, "line 3: model: must be a model"),
    (slower, InvalidDocument, "too large .* must be in seconds"),
    (
        lambda rows: slower(rows[:3], first=1),
        InvalidDocument,
        "line [34]: step_time_s: .* s is .* times too large",
    ),
    # As the device expects the other, their mean does not count.
    (
        lambda rows: slower(as_expected(rows[:2]), first=1),
        InvalidDocument,
        "line 3: step_time_s: .* times what the other rows",
    ),
    (
        lambda rows: [*rows, rows[0] | {"step_time_s": 2 * rows[0]["step_time_s"]}],
        IncomparableRuns,
        "line 2 and line 14 are the same setting",
    ),
)


@pytest.mark.parametrize(("change", "kind", "said"), BAD)
def test_a_bad_table_is_refused_with_its_row(
    tmp_path: Path,
    change: Mapping[str, str] | Callable[[Rows], Rows],
    kind: type[PerfModelError],
    said: str,
) -> None:
    rows = some_rows()
    rows = change(rows) if callable(change) else [rows[0], {**rows[1], **change}, *rows[2:]]
    table = table_of(tmp_path / "steps.csv", *rows)
    with pytest.raises(kind, match=said):
        calibrate_from_steps(table, device=DEVICE, trace=trace_named)


@pytest.mark.parametrize(
    ("more", "said"),
    [(1, "lines 2, 14 are one setting"), (90, ", 32 and 71 more are one setting")],
)
def test_rows_of_one_setting_count_once_and_are_said(tmp_path: Path, more: int, said: str) -> None:
    rows = some_rows()
    found, notes = read_steps(table_of(tmp_path / "steps.csv", *rows, *[rows[0]] * more))
    assert len(found) == len(rows)
    assert said in notes[0]


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
