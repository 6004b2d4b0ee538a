"""Steps of one GPU: families that were left out of a device whose costs are known."""

import os
import signal
from pathlib import Path

import pytest

from calibrate.step_fit import StepRow
from calibrate.step_table import Setting, TableRow, traced_tables
from perfmodel.errors import UsageError
from perfmodel.workload.step import TracedStep
from tests.calibrate.test_step_table import FAMILIES, setting, trace_named, true_s
from tests.validate.published.judged import opened
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
    if setting.model == "timm:crash_1":
        os.kill(os.getpid(), signal.SIGTERM)
    return trace_named(setting)


def row(model: str, batch: int, **other: str) -> dict[str, str]:
    """As long as the true device takes."""
    cells = USUAL | {"model": model, "batch_per_gpu": str(batch), "step_ms": "1"} | other
    if model not in ("nobody_1", "crash_1") and cells["gpus"] == "1":
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
        row("crash_1", 8),
        row("alpha_10", 8, gpus="2"),
        row("alpha_10", 8, framework="PyTorch 1.10"),
        row("alpha_10", 8, device="Voodoo 2", gpus="2"),
    ]
    table = opened(tmp_path, "single_device_steps", [*rows, *out])
    [series] = devices.judge(table, trace)
    assert series.name == "rtx-3090, fp32, contiguous"
    assert (series.num_fitted, series.num_predicted) == (16, 16)
    ours, plain = series.errors
    assert ours.mape < 0.03
    assert ours.coverage == pytest.approx(1.0)
    # Small steps are the host's: no rate of arithmetic holds for both.
    assert plain.mape > 0.3
    counted = table.counted()
    assert counted.num_judged == 16
    assert counted.left_out.pop("models that cannot be traced") == 2
    assert set(counted.left_out.values()) == {1}
    assert len(counted.left_out) == 3
    unknown, crashed = table.skipped
    assert "timm:nobody_1 cannot be traced: model: must be known" in unknown
    assert "timm:crash_1 cannot be traced: " in crashed
    assert "SIGTERM" in crashed


def test_few_models_of_another_device_predict_its_others_as_long_as_there_are_others(
    tmp_path: Path,
) -> None:
    """Three models: two known leave one, four known leave none, which is no question."""
    rows = [
        row(f"{family}_{count}", batch, device=device)
        for device in ("RTX 3090", "TITAN RTX")
        for family in FAMILIES[:3]
        for count in ((10,) if device == "TITAN RTX" else (10, 1000))
        for batch in (8, 4096)
    ]
    series = list(devices.judge(opened(tmp_path, "single_device_steps", rows), trace))
    few = [one for one in series if "models of each known" in one.name]
    assert [one.name.split()[2] for one in few] == ["0", "1", "2"]
    # One choice of nothing; four choices that leave two models, then one, at two batches each.
    assert [one.num_predicted for one in few] == [6, 16, 8]


def test_devices_are_fitted_in_the_order_of_their_rows() -> None:
    """Sums over devices, and so last digits of machines that ship, depend on it."""
    names = ["titan-xp", "rtx-2080ti", "h200-sxm", devices.ANCHOR, "gtx-1080ti", "titan-rtx", "a10"]
    fits = devices.fits_of(dict.fromkeys(names, ()), devices.sheets_of(names))
    assert list(fits) == [devices.ANCHOR, *(name for name in names if name != devices.ANCHOR)]


def test_no_device_is_in_its_own_prior_not_even_by_way_of_the_others() -> None:
    known = traced_steps(devices.ANCHOR, slower=1.0), traced_steps(devices.ANCHOR, slower=3.0)
    priors = []
    for of_anchor in known:
        rows = {devices.ANCHOR: of_anchor, "titan-rtx": traced_steps("titan-rtx", slower=2.0)}
        fits = devices.fits_of(rows, devices.sheets_of(list(rows)))
        priors.append(devices.priors_of(devices.ANCHOR, rows, fits))
    one, other = priors
    assert one == other


def traced_steps(name: str, *, slower: float) -> list[StepRow]:
    """Rows of a device that takes some times as long as the true one."""
    settings = [setting(f"{family}_10", batch) for family in FAMILIES for batch in (8, 4096)]
    rows = [
        TableRow(where=name, setting=each, family=each.model, step_s=slower * true_s(each))
        for each in settings
    ]
    return traced_tables({"": rows}, trace)[""].steps
