"""Use case: latents of large-model steps from a table of runs that somebody made."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate.environment import describe_environment
from calibrate.placement import provenance
from calibrate.run_logs import read_run_rows
from perfmodel.cost.inferred_profile import inferred_fields
from perfmodel.cost.jobs import Column, Jobs, jobs_from_rows
from perfmodel.cost.latents import SHEETS, step_time_priors
from perfmodel.cost.layout_fit import infer
from perfmodel.cost.plausible import contradictions, wrong_unit
from perfmodel.documents.inferred import InferredDocument
from perfmodel.errors import IncomparableRuns, InvalidDocument, UsageError
from perfmodel.units import parse_duration

STEP: Final = "step_time_s"
_NAMES: Final = tuple(field.name for field in fields(Jobs))
#: What a table need not say.
_DEFAULTS: Final[dict[str, float]] = {
    **dict.fromkeys(("dp", "tp", "pp", "cp", "accumulation", "interleave"), 1.0),
    **dict.fromkeys(("zero", "recompute_full", "recompute_attention", "gpipe"), 0.0),
    **dict.fromkeys(("zero_bubble", "sequence_parallel", "gated"), 0.0),
    **dict.fromkeys(("tied", "fused_attention"), 1.0),
    "devices_per_node": 8.0,
}


def calibrate_from_runs(
    table: Path, *, columns: Path | None, device: str, seed: int = 0
) -> InferredDocument:
    """Latents inferred from runs: a CSV, traces or logs.

    Raises
    ------
    UsageError
        If the device has no data sheet here.
    InvalidDocument
        If the table or the mapping cannot be read, a column is missing, or its unit is wrong.
    IncomparableRuns
        If two rows are the same job and differ by more than scatter.
    """
    if device not in SHEETS:
        raise UsageError(f"--device-type: must be one of {', '.join(SHEETS)}, got {device!r}")
    jobs, step_s = read_runs(table, {} if columns is None else _mapping(columns))
    model = infer(jobs, step_s, step_time_priors(SHEETS[device]), seed=seed)
    return InferredDocument(
        schema_version=InferredDocument.current_version,
        provenance=provenance(describe_environment(), seed=seed),
        evidence="inferred",
        device=device,
        step_s=tuple(map(float, step_s)),
        **inferred_fields(model),
    )


def read_runs(table: Path, mapping: Mapping[str, Any]) -> tuple[Jobs, Column]:
    """Jobs and step times of a CSV file, a Kineto trace, an MLPerf log, or a folder of them.

    See ``calibrate_from_runs`` for errors. What traces and logs do not say, the mapping's constants do.
    """
    rows = read_run_rows(table)
    if not rows:
        raise InvalidDocument(f"{table}: must hold at least one run, got none")
    names = mapping.get("columns", {})
    constants = mapping.get("constants", {})
    scale = parse_duration(f"1{mapping.get('units', {}).get(STEP, 's')}")
    values = [
        {
            name: _value(table, number, row, (name, names.get(name, name)), constants)
            for name in (*_NAMES, STEP)
        }
        for number, row in enumerate(rows, start=2)
    ]
    jobs = jobs_from_rows(values)
    step_s = scale * np.array([row[STEP] for row in values])
    _require_consistent(table, jobs, step_s, str(names.get(STEP, STEP)))
    return jobs, step_s


def _require_consistent(table: Path, jobs: Jobs, step_s: Column, column: str) -> None:
    wrong = wrong_unit(jobs, step_s)
    if wrong:
        row, problem = next(iter(wrong.items()))
        raise InvalidDocument(f"{table}: line {row + 2}, column {column}: {problem}")
    pairs = contradictions(jobs, step_s)
    if pairs:
        first, second = pairs[0]
        raise IncomparableRuns(
            f"{table}: lines {first + 2} and {second + 2} are the same job but take "
            f"{step_s[first]:g} s and {step_s[second]:g} s; remove the wrong one"
        )


def _value(
    table: Path,
    line: int,
    row: Mapping[str, str],
    name: tuple[str, str],
    constants: Mapping[str, float],
) -> float:
    field, column = name
    where = f"{table}: line {line}, column {column}"
    if field in constants:
        return float(constants[field])
    text = row.get(column) or ""
    if not text and field in _DEFAULTS:
        return _DEFAULTS[field]
    try:
        value = float(text)
    except ValueError:
        raise InvalidDocument(f"{where}: must be a number, got {text!r}") from None
    lowest = 0.0 if _DEFAULTS.get(field) == 0 or field in {"tied", "fused_attention"} else 1e-12
    if not lowest <= value < float("inf"):
        raise InvalidDocument(f"{where}: must be finite and > 0, got {value}")
    return value


def _mapping(path: Path) -> dict[str, Any]:
    try:
        mapping = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidDocument(f"{path}: column mapping cannot be read: {error}") from error
    unknown = set(mapping) - {"columns", "constants", "units"}
    unknown |= {name for part in mapping.values() for name in part if name not in (*_NAMES, STEP)}
    if unknown:
        raise InvalidDocument(
            f"{path}: {min(unknown)} is unknown; tables are columns, constants, units, "
            f"names are {STEP} and {', '.join(_NAMES)}"
        )
    return mapping
