"""Published steps of one GPU: model families left out of a device predict from its other families.

The law, its fit and what a family that was left out says are those of ``calibrate --from-steps``; here are
the table, the split and the plain rule beside it. Models are traced, which takes minutes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.step_fit import (
    DeviceFit,
    StepRow,
    family_of,
    fit_device,
    left_out_errors,
    left_out_logs,
    prior_over,
)
from calibrate.step_table import (
    Setting,
    TableRow,
    Trace,
    by_version,
    sheet_of,
    trace_setting,
    traced_rows,
)
from perfmodel.cost.rescaling import find_device, shipped_catalogue
from perfmodel.cost.step_law import ConstantPrior, Sheet, first_priors
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.statistics import FloatArray
from perfmodel.workload.step import TracedStep
from validate.published.tables import Judged, Part, Row, counted, number, read_rows, sieved, verdict

TABLE: Final = "single_device_steps.csv.gz"
_SOURCE: Final = "single_device_steps"
_COLUMNS: Final = (
    *("device", "library", "model", "framework", "precision", "memory_format"),
    *("image", "batch_per_gpu", "gpus", "step_ms"),
)
#: The device that most models ran on: prior of the others.
ANCHOR: Final = "rtx-3090"
_NAMES: Final = {
    "RTX 3090": ANCHOR,
    "GeForce RTX 2080 Ti": "rtx-2080ti",
    "TITAN RTX": "titan-rtx",
    "GeForce GTX 1080 Ti": "gtx-1080ti",
    "TITAN Xp": "titan-xp",
}


def device_of(row: Mapping[str, str]) -> str:
    """Name of a row's device in the catalogue."""
    return _NAMES[row["device"]]


def public_rows(folder: Path) -> tuple[dict[str, list[TableRow]], int, Counter[str]]:
    """Steps of one GPU by device; how many rows the table has; the others by reason."""
    table = read_rows(folder / TABLE, columns=_COLUMNS)
    rows, out = sieved(
        table,
        {
            "devices without a data sheet": lambda row: row["device"] in _NAMES,
            "several GPUs under nn.DataParallel": lambda row: row["gpus"] == "1",
            "no image size, batch or step": lambda row: all(
                number(row, name) for name in ("image", "batch_per_gpu", "step_ms")
            ),
        },
    )
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        setting = setting_of(row)
        found.setdefault(device_of(row), []).append(
            TableRow(
                where=f"{TABLE}: {row['device']}",
                setting=setting,
                family=family_of(setting.model),
                step_s=(number(row, "step_ms") or 0.0) / 1e3,
            )
        )
    return found, len(table), out


def setting_of(row: Row) -> Setting:
    """What a row measured. The benchmark of torchvision models updates no parameters."""
    is_timm = row["library"] == "timm"
    is_last = row["memory_format"] == "channels_last"
    return Setting(
        model=f"{row['library']}:{row['model']}",
        batch=int(row["batch_per_gpu"]),
        image=int(row["image"]),
        sequence=None,
        precision=row["precision"],
        memory_format="channels_last" if is_last else "contiguous",
        optimizer="sgd" if is_timm else "none",
        torch=row["framework"].removeprefix("PyTorch ") if is_timm else "1",
    )


def sheets_of(names: Sequence[str]) -> dict[str, Sheet]:
    """Peaks of devices by their data sheets."""
    return {name: sheet_of(find_device(name, shipped_catalogue())) for name in names}


def fits_of(
    rows: Mapping[str, Sequence[StepRow]], sheets: Mapping[str, Sheet]
) -> dict[str, DeviceFit]:
    """Constants of every device: the one with most models first, which is the prior of the others."""
    fits: dict[str, DeviceFit] = {}
    before = first_priors()
    if ANCHOR in rows:
        fits[ANCHOR] = fit_device(rows[ANCHOR], sheets[ANCHOR], before)
        before = prior_over([fits[ANCHOR]], before)
    others = {name: of_one for name, of_one in rows.items() if name != ANCHOR}
    return fits | {name: fit_device(each, sheets[name], before) for name, each in others.items()}


def priors_of(name: str, fits: Mapping[str, DeviceFit]) -> dict[str, ConstantPrior]:
    """What is known of a device before its rows: every other device; of the anchor nothing."""
    others = [] if name == ANCHOR else [fit for each, fit in fits.items() if each != name]
    return prior_over(others, first_priors()) if others else first_priors()


def judge(folder: Path, trace: Trace = trace_setting) -> Judged:
    """Verdict by device, precision and memory format."""
    tables, num_rows, out = public_rows(folder)

    def traced(setting: Setting) -> TracedStep:
        try:
            return trace(setting)
        except UsageError as error:
            raise UntraceableModel(str(error)) from error

    rows: dict[str, list[StepRow]] = {}
    for name, table in tables.items():
        newest, older = by_version(table)
        rows[name], notes = traced_rows(newest, traced)
        out["older versions of PyTorch on the same device"] += len(older)
        out["models that cannot be traced"] += len(notes)
    sheets = sheets_of(list(rows))
    fits = fits_of(rows, sheets)
    series = [
        found
        for name, of_one in rows.items()
        for found in judge_families(name, of_one, sheets[name], priors_of(name, fits))
    ]
    return Judged(series, [], counted(_SOURCE, num_rows, out))


def judge_families(
    name: str, rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior]
) -> list[PublishedSeries]:
    """Families left out one after another; the interval of one is of the errors of the others."""
    if len({row.family for row in rows}) < 2:
        return []
    logs = left_out_logs(rows, sheet, priors)
    modes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        words = "fp32" if row.work.precision == "fp32" else "16 bit"
        modes.setdefault(f"{words}, {row.work.memory_format}", []).append(index)
    found = []
    for mode, chosen in modes.items():
        families = sorted({rows[i].family for i in chosen})
        parts = [
            _part(rows, logs, [i for i in chosen if rows[i].family == family], chosen)
            for family in families
            if len(families) > 1
        ]
        if parts:
            told = {
                "fitted": "all other families on the device",
                "predicted": f"families left out, {len(families)} in all",
            }
            of_mode = f"{name}, {mode}"
            found.append(verdict(_SOURCE, of_mode, parts, **told, num_fitted=len(rows)))
    return found


def _part(
    rows: Sequence[StepRow], logs: FloatArray, left: Sequence[int], chosen: Sequence[int]
) -> Part:
    """One family beside one rate of arithmetic for the device: the median over the other families."""
    family = rows[left[0]].family
    rest = [index for index in chosen if rows[index].family != family]
    [error] = left_out_errors([rows[index] for index in rest], logs[rest])
    step_s, flop = (np.array([value(rows[index]) for index in left]) for value in (_step_s, _flop))
    rate = float(np.median([_flop(rows[index]) / _step_s(rows[index]) for index in rest]))
    ours = step_s * np.exp(-logs[list(left)])
    width = np.exp(error.log_error)
    return Part(
        measured=step_s,
        predicted={"perfmodel": ours, "one rate of arithmetic": flop / rate},
        interval=(ours / width, ours * width),
    )


def _step_s(row: StepRow) -> float:
    return row.step_s


def _flop(row: StepRow) -> float:
    return float((row.work.count * row.work.flop).sum())
