"""Use case: fitted parameters of large-model steps from a table of runs that somebody made."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate.layout_fit import MINIMUM_RUNS, infer, infer_memory, peaks_of
from calibrate.run_logs import (
    PEAK,
    STEP,
    read_run,
    read_run_rows,
    reading_notes,
    require_known,
    step_column,
)
from perfmodel.cost.jobs import Column, Jobs, jobs_from_rows
from perfmodel.cost.layout_memory import tensor_bytes
from perfmodel.cost.parameters import DeviceSheet, step_time_priors
from perfmodel.cost.rescaling import device_sheet
from perfmodel.documents import Provenance
from perfmodel.documents.profile import InferredDocument, RunColumns, read_run_columns
from perfmodel.errors import IncomparableRuns, InvalidDocument
from perfmodel.layout import Layout, Limits, impossible
from perfmodel.units import format_bytes

FASTEST_FLOP_PER_S: Final = 2.5e15
"""Above the dense bf16 peak of every device sold by 2026 (B200: 2.25e15, its data sheet)."""
SLOWEST_FLOP_PER_S: Final = 1e10
"""One core of a CPU is faster; slower steps are waiting, or not in the unit that is claimed."""
LEAST_SHARE_OF_PEAK: Final = 1e-3
"""Half of all runs of a table are above: normal published ones reach 3 to 60 % of the peak, degraded 0.1 %."""
OUT_OF_PROPORTION: Final = 30.0
"""Published peaks are within a factor of 6 of the formula."""
FAR_BEHIND: Final = 100.0
"""Normal published runs of one table are within a factor of 20 of each other; one in milliseconds is not."""
CONTRADICTION: Final = 1.5
"""Ratio of two step times of the same job from which on they contradict each other."""


def _speed(jobs: Jobs, step_s: Column) -> Column:
    return np.asarray(jobs.model_flop / jobs.devices / step_s)


def wrong_unit(jobs: Jobs, step_s: Column) -> dict[int, str]:
    """Rows (from 0) whose step time cannot be in seconds, and why."""
    speed = _speed(jobs, step_s)
    found = {}
    for i in np.flatnonzero((speed > FASTEST_FLOP_PER_S) | (speed < SLOWEST_FLOP_PER_S)).tolist():
        rate = f"{speed[i]:.3g} FLOP/s per device"
        why = f"only {rate}; the column looks 1000x too large (give its unit)"
        if speed[i] > FASTEST_FLOP_PER_S:
            why = f"{rate}, more than any has; the column looks 1000x too small (give its unit)"
        found[i] = f"step time {step_s[i]:g} s means {why}"
    return found


#: Columns of a run that a layout has under the same name.
_LAYOUT: Final = (
    *("dp", "tp", "pp", "cp", "ep", "zero", "shard"),
    *("micro_batch", "accumulation", "interleave"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunTable:
    """Runs as they were read."""

    jobs: Jobs
    step_s: Column
    """Shape ``(num_runs,)``. [s]"""
    peak_bytes: Column
    """Printed peak of rank 0; NaN where none is printed. [B]"""
    places: tuple[str, ...]
    """File, and line where it has several runs."""
    step_column: str
    """Heading that the step times come from."""
    peak_column: str
    notes: tuple[str, ...]
    """What was not read, and what was taken for granted."""


def calibrate_from_runs(
    table: Path, *, columns: Path | None, device: str, seed: int = 0
) -> tuple[InferredDocument, tuple[str, ...]]:
    """Parameters inferred from runs: a CSV, run records or logs; and what to know of their reading.

    Raises
    ------
    UsageError
        If the device has no data sheet here.
    InvalidDocument
        If the table or the mapping cannot be read, a column is missing, or its unit is wrong.
    IncomparableRuns
        If two rows are the same job and differ by more than scatter.
    """
    sheet = device_sheet(device)
    mapping = RunColumns() if columns is None else read_run_columns(columns)
    if columns is not None:
        require_known(columns, mapping)
    runs = read_runs(table, mapping, device=sheet.name)
    _require_possible(table, runs, sheet)
    machine = infer(
        runs.jobs, runs.step_s, step_time_priors(sheet), device_name=sheet.name, seed=seed
    )
    printed = np.flatnonzero(np.isfinite(runs.peak_bytes))
    if len(printed) >= MINIMUM_RUNS:
        memory = infer_memory(runs.jobs.take(printed), runs.peak_bytes[printed])
        machine = replace(machine, memory=peaks_of(memory, printed))
    document = InferredDocument(
        provenance=Provenance.of_answer(
            host_fingerprint="none: runs of others depend on no host", seed=seed
        ),
        machine=machine,
    )
    return document, runs.notes


#: The fit solves for all runs together: memory with their square, time with their cube.
MOST_RUNS: Final = 1000


def read_runs(table: Path, mapping: RunColumns, *, device: str | None = None) -> RunTable:
    """Jobs and step times of a CSV file, run records, an MLPerf log, or a folder of them.

    See ``calibrate_from_runs`` for errors. What logs do not say, the mapping's constants do.
    """
    found = read_run_rows(table)
    if not found:
        raise InvalidDocument(f"{table}: must hold at least one run, got none")
    if len(found) > MOST_RUNS:
        raise InvalidDocument(
            f"{table}: must hold at most {MOST_RUNS:,} runs, got {len(found):,}; keep those like yours"
        )
    values = [read_run(run.where, run.cells, mapping, device=device) for run in found]
    rows = [run.cells for run in found]
    for run, row in zip(found, values, strict=True):
        _require_layout(run.where, row)
    jobs, step_s = jobs_from_rows(values), np.array([row[STEP] for row in values])
    behind = np.median(_speed(jobs, step_s)) / _speed(jobs, step_s)
    odd = [
        f"{found[row].where}: step time {step_s[row]:g} s is {behind[row]:,.0f} times that of the other runs for its "
        "work; another unit, or a stall?"
        for row in np.flatnonzero(behind > FAR_BEHIND).tolist()
    ]
    runs = RunTable(
        jobs=jobs,
        step_s=step_s,
        peak_bytes=np.array([row.get(PEAK, np.nan) for row in values]),
        places=tuple(run.where for run in found),
        step_column=step_column(mapping, rows[0]),
        peak_column=mapping.columns.get(PEAK, PEAK),
        notes=(*reading_notes(rows, mapping), *odd),
    )
    _require_consistent(runs)
    return runs


def _require_layout(where: str, row: Mapping[str, float]) -> None:
    """Refuse runs that no program could have made."""
    chosen: dict[str, Any] = {name: int(row[name]) for name in _LAYOUT if name in row}
    try:
        layout = Layout(**chosen)
    except ValueError as error:
        raise InvalidDocument(f"{where}: {error}") from error
    limits = Limits(
        layers=int(row["layers"]),
        heads=int(row["heads"]),
        devices=layout.world_size,
        sequence=int(row["sequence"]),
        experts=int(row.get("experts", 1)),
    )
    reason = impossible(layout, limits)
    if reason is not None:
        raise InvalidDocument(f"{where}: {reason}")


def _require_possible(table: Path, runs: RunTable, sheet: DeviceSheet) -> None:
    """Refuse times that this device cannot have; none is faster than its 16-bit peak."""
    speed = _speed(runs.jobs, runs.step_s)
    share = float(np.median(speed)) / sheet.matmul_flop_per_s
    if share < LEAST_SHARE_OF_PEAK:
        raise InvalidDocument(
            f"{table}: column {runs.step_column}: half of the step times mean less than {share:.2g} of the device's "
            "peak; the column looks 1000x too large (seconds are not milliseconds: give its unit), or sequences "
            "1000x too short"
        )
    shares = speed / (sheet.matmul_flop_per_s * runs.jobs.matmul_ratio)
    for row in np.flatnonzero(shares > 1).tolist():
        raise InvalidDocument(
            f"{runs.places[row]}, column {runs.step_column}: step time {runs.step_s[row]:.4g} s means "
            f"{shares[row]:.3g} times the peak of {sheet.name}; say the device (--device), the precision, or the unit"
        )


def _require_consistent(runs: RunTable) -> None:
    """Refuse columns in a wrong unit, and two runs of one job that contradict each other."""
    jobs, step_s, peak_bytes = runs.jobs, runs.step_s, runs.peak_bytes
    wrong = wrong_unit(jobs, step_s)
    for row, problem in wrong.items():
        raise InvalidDocument(
            f"{runs.places[row]}, column {runs.step_column}: {problem}; so are {len(wrong)} of "
            f"{len(jobs)} runs"
        )
    share = peak_bytes / tensor_bytes(jobs)
    odd = (share > OUT_OF_PROPORTION) | (share < 1 / OUT_OF_PROPORTION)
    for row in np.flatnonzero(odd).tolist():
        raise InvalidDocument(
            f"{runs.places[row]}, column {runs.peak_column}: a peak of {format_bytes(peak_bytes[row])} is "
            f"{share[row]:.2g} times what the tensors of rank 0 take; the column looks 1000x too "
            f"{'large' if share[row] > 1 else 'small'} (give its unit)"
        )
    suspect = np.abs(np.subtract.outer(np.log(step_s), np.log(step_s))) > np.log(CONTRADICTION)
    for field in fields(Jobs):
        column = getattr(jobs, field.name)
        suspect &= np.equal.outer(column, column)
    for one, other in np.argwhere(np.triu(suspect, 1)).tolist():
        file = f"{runs.places[one].rpartition(': line ')[0]}: "
        raise IncomparableRuns(
            f"{runs.places[one]} and {runs.places[other].removeprefix(file)} are the same job "
            f"but take {step_s[one]:g} s and {step_s[other]:g} s; remove the wrong one"
        )
