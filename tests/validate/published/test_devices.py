"""Steps of one GPU: families that were left out of a device whose costs are known."""

import csv
import gzip
from pathlib import Path

import pytest

from calibrate.step_table import Setting
from perfmodel.errors import UsageError
from perfmodel.workload.step import TracedStep
from tests.calibrate.test_step_table import FAMILIES, trace_named, true_s
from validate.published import devices

USUAL = {
    "device": "RTX 3090",
    "library": "timm",
    "framework": "PyTorch 1.12",
    "precision": "fp32",
    "memory_format": "contiguous",
    "image": "224",
    "gpus": "1",
}


def trace(setting: Setting) -> TracedStep:
    if setting.model == "timm:nobody_1":
        raise UsageError("model: must be known, got 'timm:nobody_1'")
    return trace_named(setting)


def row(model: str, batch: int, **other: str) -> dict[str, str]:
    """As long as the true device takes."""
    cells = USUAL | {"model": model, "batch_per_gpu": str(batch), "step_ms": "1"} | other
    if model != "nobody_1" and cells["gpus"] == "1":
        cells["step_ms"] = repr(1e3 * true_s(devices.setting_of(cells)))
    return cells


def test_families_left_out_are_predicted_from_the_others(tmp_path: Path) -> None:
    rows = [
        row(f"{family}_{count}", batch)
        for family in FAMILIES
        for count in (10, 1000)
        for batch in (8, 4096)
    ]
    out = [
        row("nobody_1", 8),
        row("alpha_10", 8, gpus="2"),
        row("alpha_10", 8, framework="PyTorch 1.10"),
        row("alpha_10", 8, device="Voodoo 2", gpus="2"),
    ]
    with gzip.open(tmp_path / devices.TABLE, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*rows, *out])
    found = devices.judge(tmp_path, trace)
    [series] = found.series
    assert series.name == "rtx-3090, fp32, contiguous"
    assert (series.num_fitted, series.num_predicted) == (16, 16)
    ours, plain = series.errors
    assert ours.mape < 0.03
    assert ours.coverage == pytest.approx(1.0)
    # Small steps are the host's: no rate of arithmetic holds for both.
    assert plain.mape > 0.3
    assert found.rows.num_judged == 16
    assert set(found.rows.left_out.values()) == {1}
    assert len(found.rows.left_out) == 4
