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
    trace_setting,
    traced_rows,
)
from perfmodel.cost.rescaling import find_device, shipped_catalogue
from perfmodel.cost.step_law import CONSTANTS, ConstantPrior, Sheet, first_priors
from perfmodel.documents import Provenance, file_sha256, write_atomically
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.files import read_table
from perfmodel.statistics import FloatArray
from perfmodel.workload.step import TracedStep
from validate.published import devices

_ROOT: Final = Path(__file__).parents[2] / "perfmodel"
_SOURCES: Final = {
    "huggingface/pytorch-image-models": "huggingface/pytorch-image-models @aa4b5850",
    "ryujaehun/pytorch-gpu-benchmark": "ryujaehun/pytorch-gpu-benchmark @3f47a9e2",
}


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
            except (UntraceableModel, UsageError) as error:
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


def judge_families(
    name: str, rows: Sequence[StepRow], sheet: Sheet, priors: Mapping[str, ConstantPrior]
) -> None:
    """Families left out one after another."""
    for series in devices.judge_families(name, rows, sheet, priors):
        ours = series.errors[0]
        typer.echo(
            f"{series.name:30} {series.num_predicted:5d} rows   MAPE {ours.mape:6.1%}   "
            f"worst {ours.worst_absolute:6.1%}   coverage {ours.coverage:4.0%}"
        )


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
    tables, _, _ = devices.public_rows(asked.folder)
    rows: dict[str, list[StepRow]] = {}
    for name, table in tables.items():
        rows[name], notes = traced_rows(by_version(table)[0], traces)
        typer.echo(f"{name}: {len(rows[name])} rows, {len(notes)} not traced", err=True)
    bare = devices.sheets_of(list(rows))
    fits = devices.fits_of(rows, bare)
    if asked.write:
        _write(asked.folder, tables, traces, fits)
        return
    by_count: dict[int, list[FloatArray]] = {}
    for name, of_one in rows.items():
        priors = devices.priors_of(name, fits)
        judge_families(name, of_one, bare[name], priors)
        for count in (0, 1, 2, 4, 9) if name != devices.ANCHOR else ():
            by_count.setdefault(count, []).append(
                judge_few(name, of_one, bare[name], priors, count)
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
    digest = file_sha256(folder / devices.TABLE)
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
        for _, cells in read_table(folder / devices.TABLE)
        if devices.device_of(cells) == name
    )


if __name__ == "__main__":
    main()
