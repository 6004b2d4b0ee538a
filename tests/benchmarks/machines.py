"""Machines that come with perfmodel, made from public tables of steps; and how wrong they are on what they never saw.

    python -m tests.benchmarks.machines FOLDER              judge: families, models and devices left out
    python -m tests.benchmarks.machines FOLDER --write      make perfmodel/documents/machines and the prior

``FOLDER`` holds single_device_steps.csv.gz. Tracing 550 models takes some 15 minutes; traces are kept in --traces.
"""

import argparse
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import typer

from calibrate.step_fit import (
    DeviceFit,
    StepRow,
    family_of,
    fit_device,
    left_out_errors,
    left_out_logs,
    predicted_s,
    prior_over,
)
from calibrate.step_table import (
    Setting,
    TableRow,
    by_version,
    machine_from_steps,
    sheet_of,
    trace_setting,
    traced_rows,
)
from perfmodel.arrays import FloatArray
from perfmodel.cost.rescaling import find_device, shipped_catalogue
from perfmodel.cost.step_law import CONSTANTS, ConstantPrior, Sheet, first_priors
from perfmodel.documents.base import Provenance, file_sha256, write_atomically
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import UntraceableModel
from perfmodel.files import read_table
from perfmodel.workload.step import TracedStep

_TABLE: Final = "single_device_steps.csv.gz"
_ROOT: Final = Path(__file__).parents[2] / "perfmodel"
_ANCHOR: Final = "rtx-3090"
_NAMES: Final = {
    "RTX 3090": _ANCHOR,
    "GeForce RTX 2080 Ti": "rtx-2080ti",
    "TITAN RTX": "titan-rtx",
    "GeForce GTX 1080 Ti": "gtx-1080ti",
    "TITAN Xp": "titan-xp",
}
_SOURCES: Final = {
    "huggingface/pytorch-image-models": "huggingface/pytorch-image-models @aa4b5850",
    "ryujaehun/pytorch-gpu-benchmark": "ryujaehun/pytorch-gpu-benchmark @3f47a9e2",
}


def public_rows(folder: Path) -> dict[str, list[TableRow]]:
    """Steps of one GPU by machine. The benchmark of torchvision models updates no parameters."""
    found: dict[str, list[TableRow]] = {}
    for line, cells in read_table(folder / _TABLE):
        if cells["gpus"] != "1" or not cells["image"]:
            continue
        is_timm = cells["library"] == "timm"
        release = cells["framework"].removeprefix("PyTorch ") if is_timm else "1"
        setting = Setting(
            model=f"{cells['library']}:{cells['model']}",
            batch=int(cells["batch_per_gpu"]),
            image=int(cells["image"]),
            sequence=None,
            precision=cells["precision"],
            memory_format="channels_last"
            if cells["memory_format"] == "channels_last"
            else "contiguous",
            optimizer="sgd" if is_timm else "none",
            torch=release,
        )
        row = TableRow(
            where=f"{_TABLE}: line {line}",
            setting=setting,
            family=family_of(setting.model),
            step_s=float(cells["step_ms"]) / 1e3,
        )
        found.setdefault(_NAMES[cells["device"]], []).append(row)
    return found


class Traces:
    """Traced steps, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, setting: Setting) -> TracedStep:
        """The step of a setting."""
        key = hashlib.sha256(repr(setting.traced).encode()).hexdigest()[:16]
        path = self._folder / f"{key}.pickle"
        if not path.exists():
            try:
                found: TracedStep | str = trace_setting(setting)
            except UntraceableModel as error:
                found = str(error)
            path.write_bytes(pickle.dumps(found))
        kept = pickle.loads(path.read_bytes())  # noqa: S301 - written above
        if isinstance(kept, str):
            raise UntraceableModel(kept)
        assert isinstance(kept, TracedStep)
        return kept


def _scores(logs: FloatArray) -> str:
    errors = np.abs(np.expm1(-logs))
    return (
        f"{len(logs):5d} rows   MAPE {errors.mean():6.1%}   p95 {np.quantile(errors, 0.95):6.1%}   "
        f"bias {np.expm1(np.mean(-logs)):+6.1%}"
    )


def _modes(rows: Sequence[StepRow]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(f"{row.work.precision} {row.work.memory_format}", []).append(index)
    return found


def judge_families(
    name: str, rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior]
) -> None:
    """Families left out one after another; the interval of a family is of errors of the others."""
    logs = left_out_logs(rows, sheet, priors)
    for mode, chosen in _modes(rows).items():
        own = logs[chosen]
        inside = []
        for family in sorted({rows[i].family for i in chosen}):
            rest = [i for i in chosen if rows[i].family != family]
            [error] = left_out_errors([rows[i] for i in rest], logs[rest])
            inside += [abs(logs[i]) <= error.log_error for i in chosen if rows[i].family == family]
        typer.echo(f"{name:12} {mode:20} {_scores(own)}   coverage {np.mean(inside):4.0%}")


def judge_few(
    name: str,
    rows: Sequence[StepRow],
    sheet: Sheet,
    priors: Mapping[str, ConstantPrior],
    count: int,
) -> FloatArray:
    """Some models known, the others predicted, over four random choices."""
    models = sorted({row.model for row in rows})
    found: list[FloatArray] = []
    inside: list[bool] = []
    for seed in range(4):
        known = set(np.random.default_rng(seed).permutation(models)[:count])
        seen = [row for row in rows if row.model in known]
        unseen = [row for row in rows if row.model not in known]
        fit = fit_device(seen, sheet, priors)
        logs = np.log([row.step_s for row in unseen]) - np.log(predicted_s(unseen, fit, sheet))
        found.append(logs)
        if seen:
            errors = {
                (e.precision, e.memory_format): e.log_error
                for e in left_out_errors(seen, left_out_logs(seen, sheet, priors))
            }
        else:
            errors = {}
        inside += [
            abs(log) <= errors.get((row.work.precision, row.work.memory_format), 0.45)
            for log, row in zip(logs, unseen, strict=True)
        ]
        if not count:
            break
    logs = np.concatenate(found)
    typer.echo(
        f"{name:12} {count} models known     {_scores(logs)}   coverage {np.mean(inside):4.0%}"
    )
    return logs


def main() -> None:
    """Judge, or write what ships."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", type=Path, default=Path("runs/machine-traces"))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    traces = Traces(asked.traces)
    tables = public_rows(asked.folder)
    sheets = {name: find_device(name, shipped_catalogue()) for name in tables}
    rows: dict[str, list[StepRow]] = {}
    for name, table in tables.items():
        rows[name], notes = traced_rows(by_version(table)[0], traces)
        typer.echo(f"{name}: {len(rows[name])} rows, {len(notes)} not traced", err=True)
    bare = {name: sheet_of(sheet) for name, sheet in sheets.items()}
    fits = {_ANCHOR: fit_device(rows[_ANCHOR], bare[_ANCHOR], first_priors())}
    from_anchor = prior_over([fits[_ANCHOR]], first_priors())
    others = [name for name in rows if name != _ANCHOR]
    fits |= {name: fit_device(rows[name], bare[name], from_anchor) for name in others}
    if asked.write:
        _write(asked.folder, tables, traces, fits)
        return
    judge_families(_ANCHOR, rows[_ANCHOR], bare[_ANCHOR], first_priors())
    by_count: dict[int, list[FloatArray]] = {}
    for name in others:
        # What another device is told by: every device but itself.
        priors = prior_over([fit for other, fit in fits.items() if other != name], first_priors())
        judge_families(name, rows[name], bare[name], priors)
        for count in (0, 1, 2, 4, 9):
            by_count.setdefault(count, []).append(
                judge_few(name, rows[name], bare[name], priors, count)
            )
    for count, logs in by_count.items():
        typer.echo(f"four devices {count} models known     {_scores(np.concatenate(logs))}")


def _write(
    folder: Path,
    tables: Mapping[str, list[TableRow]],
    traces: Traces,
    fits: Mapping[str, DeviceFit],
) -> None:
    """Files of the machines, and the prior of the next device; no device is its own prior."""
    priors = prior_over(list(fits.values()), first_priors())
    lines = [
        "# Prior of the constants of perfmodel/cost/step_law.py on a device without steps: median and standard",
        "# deviation of the logarithm. Made by python -m tests.benchmarks.machines FOLDER --write.",
        "[constants]",
    ]
    lines += [f'"{n}" = [{priors[n].median:.5g}, {priors[n].log_sigma:.4g}]' for n in CONSTANTS]
    write_atomically(_ROOT / "cost" / "device_priors.toml", "\n".join(lines) + "\n")
    digest = file_sha256(folder / _TABLE)
    for name, table in tables.items():
        sheet = find_device(name, shipped_catalogue())
        source = _SOURCES[_source(folder, name)]
        told = prior_over([fit for other, fit in fits.items() if other != name], first_priors())
        machine, notes = machine_from_steps(table, sheet, priors=told, source=source, trace=traces)
        document = ProfileDocument(
            provenance=Provenance.of_answer(
                ["python", "-m", "tests.benchmarks.machines"],
                host_fingerprint="none: steps of others depend on no host",
            ),
            observations_sha256=digest,
            machine=machine,
        )
        document.write(_ROOT / "documents" / "machines" / f"{name}.json")
        typer.echo("\n  ".join((name, *notes[-2:])))


def _source(folder: Path, name: str) -> str:
    return next(
        cells["source"]
        for _, cells in read_table(folder / _TABLE)
        if _NAMES[cells["device"]] == name
    )


if __name__ == "__main__":
    main()
