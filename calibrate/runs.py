"""Use case: latents of large-model steps from a table of runs that somebody made."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.environment import describe_environment
from calibrate.placement import provenance
from calibrate.run_logs import read_run_rows
from perfmodel.cost.inferred_profile import inferred_fields
from perfmodel.cost.jobs import USUAL, Column, Jobs, jobs_from_rows
from perfmodel.cost.latents import SHEETS, step_time_priors
from perfmodel.cost.layout_fit import infer
from perfmodel.cost.plausible import contradictions, slow_for_device, wrong_unit
from perfmodel.documents.inferred import InferredDocument
from perfmodel.documents.run_columns import RunColumns, read_run_columns
from perfmodel.errors import IncomparableRuns, InvalidDocument, refuse_unknown
from perfmodel.topology.cluster import DEVICES_PER_NODE
from perfmodel.units import parse_duration

STEP: Final = "step_time_s"
_GLOBAL_BATCH: Final = "global_batch"
_ACCUMULATION: Final = "accumulation"
#: What describes a run, with its step time.
_NEEDED: Final = (*(each.name for each in fields(Jobs) if each.name not in USUAL), STEP)
_NAMES: Final = (*_NEEDED, _GLOBAL_BATCH)
#: What a table need not say.
_DEFAULTS: Final[dict[str, float]] = {
    **dict.fromkeys(("dp", "tp", "pp", "cp", "interleave"), 1.0),
    **dict.fromkeys(("zero", "recompute_full", "recompute_attention", "gpipe"), 0.0),
    **dict.fromkeys(("zero_bubble", "sequence_parallel", "gated"), 0.0),
    **dict.fromkeys(("tied", "fused_attention"), 1.0),
    "devices_per_node": float(DEVICES_PER_NODE),
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
    refuse_unknown("--device-type", device, SHEETS)
    mapping = RunColumns() if columns is None else _mapping(columns)
    jobs, step_s = read_runs(table, mapping)
    problem = slow_for_device(jobs, step_s, SHEETS[device].matmul_flop_per_s)
    if problem is not None:
        raise InvalidDocument(f"{table}: column {mapping.columns.get(STEP, STEP)}: {problem}")
    model = infer(jobs, step_s, step_time_priors(SHEETS[device]), seed=seed)
    return InferredDocument(
        schema_version=InferredDocument.current_version,
        provenance=provenance(describe_environment(), seed=seed),
        evidence="inferred",
        device=device,
        step_s=tuple(map(float, step_s)),
        **inferred_fields(model),
    )


def read_runs(table: Path, mapping: RunColumns) -> tuple[Jobs, Column]:
    """Jobs and step times of a CSV file, a Kineto trace, an MLPerf log, or a folder of them.

    See ``calibrate_from_runs`` for errors. What traces and logs do not say, the mapping's constants do.
    """
    rows = read_run_rows(table)
    if not rows:
        raise InvalidDocument(f"{table}: must hold at least one run, got none")
    values = [_run(table, line, row, mapping) for line, row in enumerate(rows, start=2)]
    jobs = jobs_from_rows(values)
    step_s = parse_duration(f"1{mapping.units.step_time_s}") * np.array(
        [row[STEP] for row in values]
    )
    _require_consistent(table, jobs, step_s, mapping.columns.get(STEP, STEP))
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


def _run(table: Path, line: int, row: Mapping[str, str], mapping: RunColumns) -> dict[str, float]:
    """All numbers of one run; what it need not say has its default."""
    where = f"{table}: line {line}"
    said = dict(mapping.constants)
    for name in _NAMES:
        column = mapping.columns.get(name, name)
        text = row.get(column)
        if name not in said and text:
            said[name] = _number(f"{where}, column {column}", name, text)
    batch = said.pop(_GLOBAL_BATCH, None)
    needed = {name for name in _NEEDED if name not in _DEFAULTS}
    if batch is not None and _ACCUMULATION not in said:
        # With a default for dp the derived accumulation would be a guess.
        needed = needed - {_ACCUMULATION} | {"dp"}
    missing = [mapping.columns.get(name, name) for name in _NEEDED if name in needed - set(said)]
    if missing and missing[0] in row:
        raise InvalidDocument(f"{where}, column {missing[0]}: must be a number, got ''")
    if missing:
        listed = (mapping.columns.get(name, name) for name in _NEEDED if name in needed)
        raise InvalidDocument(
            f"{table}: column {missing[0]} is missing; needed: {', '.join(listed)} "
            f"({_GLOBAL_BATCH} and dp may stand for {_ACCUMULATION}); map with --columns FILE"
        )
    run = _DEFAULTS | said
    return run if batch is None else run | {_ACCUMULATION: _accumulation(where, run, batch)}


def _accumulation(where: str, run: Mapping[str, float], batch: float) -> float:
    each = run["dp"] * run["micro_batch"]
    accumulation = batch / each
    if not accumulation.is_integer():
        raise InvalidDocument(
            f"{where}: {_GLOBAL_BATCH} must be a multiple of dp x micro_batch = {each:g}, got {batch:g}"
        )
    if run.get(_ACCUMULATION, accumulation) != accumulation:
        raise InvalidDocument(
            f"{where}: {_GLOBAL_BATCH} must be dp x micro_batch x {_ACCUMULATION} = "
            f"{each * run[_ACCUMULATION]:g} sequences, got {batch:g}"
        )
    return accumulation


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidDocument(f"{where}: must be a number, got {text!r}") from None
    _require_in_range(where, name, value)
    return value


def _require_in_range(where: str, name: str, value: float) -> None:
    may_be_0 = _DEFAULTS.get(name) == 0 or name in {"tied", "fused_attention"}
    if not (0.0 if may_be_0 else 1e-12) <= value < float("inf"):
        rule = ">= 0" if may_be_0 else "> 0"
        raise InvalidDocument(f"{where}: must be finite and {rule}, got {value:g}")
    if name != STEP and not value.is_integer():
        raise InvalidDocument(f"{where}: must be a whole number, got {value:g}")


def _mapping(path: Path) -> RunColumns:
    mapping = read_run_columns(path)
    for table, names in (("columns", mapping.columns), ("constants", mapping.constants)):
        unknown = sorted(set(names) - set(_NAMES))
        if unknown:
            raise InvalidDocument(
                f"{path}: {table}: {unknown[0]} is unknown; names are {', '.join(_NAMES)}"
            )
    for name, value in mapping.constants.items():
        _require_in_range(f"{path}: constants.{name}", name, value)
    return mapping
