"""Published steps of one GPU: families and models left out of a device.

The law, its fit and what a family that was left out says are those of ``calibrate --from-steps``; here are
the table, the splits and the plain rule beside them. Models are traced, which takes minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from calibrate.step_fit import (
    UNSEEN_DEVICE_ERROR,
    DeviceFit,
    StepRow,
    family_of,
    fit_device,
    left_out_errors,
    left_out_logs,
    predicted_s,
    prior_over,
)
from calibrate.step_table import Setting, TableRow, Trace, by_version, trace_setting, traced_tables
from perfmodel.cost.rescaling import sheet_of
from perfmodel.cost.step_law import ConstantPrior, Sheet
from perfmodel.documents.hardware import find_device, shipped_catalogue
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.statistics import FloatArray
from validate.published.harness import Part, Row, Table, number, numbers, verdict

COLUMNS: Final = (
    *("device", "library", "model", "framework", "precision", "memory_format"),
    *("image", "batch_per_gpu", "gpus", "step_ms"),
)
#: The device that most models ran on: prior of the others.
ANCHOR: Final = "rtx-3090"
#: Models that somebody has timed on a new device, and random choices of them.
_KNOWN_MODELS: Final = (0, 1, 2, 4, 9)
_CHOICES: Final = 4
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


def public_rows(table: Table) -> dict[str, list[TableRow]]:
    """Steps of one GPU by device."""
    rules = {
        "devices without a data sheet": lambda row: row["device"] in _NAMES,
        "several GPUs under nn.DataParallel": lambda row: row["gpus"] == "1",
        "names that timm gives another model": lambda row: row["model"] != "ig_resnext101_32x16d",
        "no image size, batch or step": lambda row: (
            numbers(row, "image", "batch_per_gpu", "step_ms") is not None
        ),
    }
    found: dict[str, list[TableRow]] = {}
    for row in table.keep(rules):
        setting = setting_of(row)
        found.setdefault(device_of(row), []).append(
            TableRow(
                where=f"{table.path.name}: {row['device']}",
                setting=setting,
                family=family_of(setting.model),
                step_s=(number(row, "step_ms") or 0.0) / 1e3,
            )
        )
    return found


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
    before = prior_over(())
    if ANCHOR in rows:
        fits[ANCHOR] = fit_device(rows[ANCHOR], sheets[ANCHOR], before)
    anchor = list(fits.values())
    for name, of_one in rows.items():
        if name != ANCHOR:
            before = prior_over(anchor, sheets[name].generation)
            fits[name] = fit_device(of_one, sheets[name], before)
    return fits


def priors_of(
    name: str, rows: Mapping[str, Sequence[StepRow]], fits: Mapping[str, DeviceFit]
) -> dict[str, ConstantPrior]:
    """What all other devices say of one; where they had it as their prior, they are fitted without it."""
    others = {each: fit for each, fit in fits.items() if each != name}
    if name == ANCHOR:
        others = fits_of({each: rows[each] for each in others}, sheets_of([*others]))
    return prior_over([*others.values()], fits[name].generation)


def judge(table: Table, trace: Trace = trace_setting) -> Iterator[PublishedSeries]:
    """Verdict by device, precision and memory format."""
    newest = {}
    for name, of_one in public_rows(table).items():
        newest[name], older = by_version(of_one)
        table.leave_out("older versions of PyTorch on the same device", len(older))
    traced = traced_tables(newest, trace)
    for note in (note for of_one in traced.values() for note in of_one.notes):
        table.leave_out("models that cannot be traced", 1, note)
    rows = {name: of_one.steps for name, of_one in traced.items()}
    sheets = sheets_of(list(rows))
    fits = fits_of(rows, sheets)
    for name, steps in rows.items():
        priors = priors_of(name, rows, fits)
        yield from judge_families(table.source, name, steps, sheets[name], priors)
    later = {name: steps for name, steps in rows.items() if name != ANCHOR}
    for count in _KNOWN_MODELS if later else ():
        parts = [
            _few_part(steps, sheets[name], priors_of(name, rows, fits), count, seed)
            for name, steps in later.items()
            if len({row.model for row in steps}) > count
            for seed in range(_CHOICES if count else 1)
        ]
        if parts:
            yield verdict(
                table.source,
                f"{len(later)} devices, {count} models of each known",
                parts,
                fitted=f"rows of these models, over {_CHOICES} random choices; other devices",
                predicted="all other models",
                num_fitted=sum(map(len, rows.values())),
            )


def _few_part(
    rows: Sequence[StepRow],
    sheet: Sheet,
    priors: Mapping[str, ConstantPrior],
    count: int,
    seed: int,
) -> Part:
    """Some models of a device known, chosen at random, the others predicted."""
    models = sorted({row.model for row in rows})
    known = set(np.random.default_rng(seed).permutation(models)[:count])
    seen = [row for row in rows if row.model in known]
    unseen = [row for row in rows if row.model not in known]
    errors = {
        (each.precision, each.memory_format): each.log_error
        for each in (left_out_errors(seen, left_out_logs(seen, sheet, priors)) if seen else ())
    }
    modes = [(row.work.precision, row.work.memory_format) for row in unseen]
    width = np.exp([errors.get(mode, UNSEEN_DEVICE_ERROR) for mode in modes])
    ours = predicted_s(unseen, fit_device(seen, sheet, priors), sheet)
    return Part(
        measured=np.array([row.step_s for row in unseen]),
        predicted={"perfmodel": ours},
        interval=(ours / width, ours * width),
    )


def judge_families(
    source: str,
    name: str,
    rows: Sequence[StepRow],
    sheet: Sheet,
    priors: Mapping[str, ConstantPrior],
) -> Iterator[PublishedSeries]:
    """Families left out one after another; the interval of one is of the errors of the others."""
    if len({row.family for row in rows}) < 2:
        return
    logs = left_out_logs(rows, sheet, priors)
    modes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        words = "fp32" if row.work.precision == "fp32" else "16 bit"
        modes.setdefault(f"{words}, {row.work.memory_format}", []).append(index)
    for mode, chosen in modes.items():
        families = sorted({rows[i].family for i in chosen})
        if len(families) > 1:
            yield verdict(
                source,
                f"{name}, {mode}",
                [
                    _part(rows, logs, [i for i in chosen if rows[i].family == f], chosen)
                    for f in families
                ],
                fitted="all other families on the device",
                predicted=f"families left out, {len(families)} in all",
                num_fitted=len(rows),
            )


def _part(
    rows: Sequence[StepRow], logs: FloatArray, left: Sequence[int], chosen: Sequence[int]
) -> Part:
    """One family beside one rate of arithmetic for the device: the median over the other families."""
    family = rows[left[0]].family
    rest = [index for index in chosen if rows[index].family != family]
    [error] = left_out_errors([rows[index] for index in rest], logs[rest])
    step_s = np.array([rows[index].step_s for index in left])
    flop = np.array([_flop(rows[index]) for index in left])
    rate = float(np.median([_flop(rows[index]) / rows[index].step_s for index in rest]))
    ours = step_s * np.exp(-logs[list(left)])
    width = np.exp(error.log_error)
    return Part(
        measured=step_s,
        predicted={"perfmodel": ours, "one rate of arithmetic": flop / rate},
        interval=(ours / width, ours * width),
    )


def _flop(row: StepRow) -> float:
    return float((row.work.count * row.work.flop).sum())
