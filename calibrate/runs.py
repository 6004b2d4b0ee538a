"""Use case: fitted parameters of large-model steps from what trainings leave: CSV tables, run records, MLPerf logs."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from calibrate.layout_fit import MINIMUM_RUNS, infer, infer_memory, peaks_of
from perfmodel.cost.jobs import (
    SINGLE_BYTES,
    USUAL,
    Column,
    DeviceSheet,
    Jobs,
    jobs_from_rows,
    model_columns,
    step_time_priors,
)
from perfmodel.cost.memory import tensor_bytes
from perfmodel.cost.rescaling import device_sheet, precision_ratio
from perfmodel.documents import Provenance
from perfmodel.documents.profile import InferredDocument, RunColumns, read_run_columns
from perfmodel.errors import IncomparableRuns, InvalidDocument, did_you_mean, reading
from perfmodel.files import MOST_ROWS, Unreadable, parse_json, read_lines, read_table
from perfmodel.layout import Layout, Limits, Precision, Recompute, impossible
from perfmodel.machine import DEVICES_PER_NODE
from perfmodel.units import decimal, format_bytes, parse_bytes, parse_duration
from perfmodel.workload.transformer import TRANSFORMERS

Row = Mapping[str, str]


class FoundRun(NamedTuple):
    """One run, and where it was found."""

    where: str
    """File, and line where it has several runs."""
    cells: Row


_MLLOG: Final = ":::MLLOG"
#: Keys of an MLPerf log that are columns of runs.
_MLLOG_COLUMNS: Final = {
    "tensor_parallelism": "tp",
    "pipeline_parallelism": "pp",
    "context_parallelism": "cp",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_sequence_length": "sequence",
    "global_batch_size": "global_batch",
}
#: What is read of such a log; the rest, millions of lines, is not even parsed.
_MLLOG_READ: Final = re.compile("|".join(("block_start", "block_stop", *_MLLOG_COLUMNS)))


def read_run_rows(path: Path) -> list[FoundRun]:
    """Runs of a file, or of every file of a folder; step times of logs in seconds.

    ``InvalidDocument`` if a file cannot be read, or says too little.
    """
    if path.is_dir():
        files = sorted(path.iterdir())
        if linked := next((file for file in files if file.is_symlink() and file.is_dir()), None):
            raise InvalidDocument(f"{linked}: must be no link to a folder, which may hold itself")
        return [run for file in files for run in read_run_rows(file)]
    with reading(path, "runs"):
        if ".jsonl" in path.suffixes:
            return list(_records(path, read_lines(path)))
        packed = path.with_suffix("") if path.suffix == ".gz" else path
        if packed.suffix == ".json":
            raise Unreadable(
                "it must be a table (CSV), run records (.jsonl) or a log of MLPerf (.log, .txt, .out), got JSON, "
                "such as a trace of Kineto"
            )
        if path.suffix in {".log", ".txt", ".out"}:
            return [_mlperf(path, read_lines(path))]
        rows = read_table(path, delimiters=",;\t")
        return [FoundRun(f"{path}: line {line}", row) for line, row in rows]


def _records(path: Path, lines: Iterable[str]) -> Iterator[FoundRun]:
    """One run a line of JSON: nested names are joined by dots, of lists of numbers the median counts."""
    for number, line in enumerate(lines, start=1):
        if number > MOST_ROWS:
            raise InvalidDocument(f"{path}: must hold at most {MOST_ROWS:,} runs, got more")
        if line.strip():
            where = f"{path}: line {number}"
            yield FoundRun(where, dict(_cells("", _object(where, line))))


def _cells(prefix: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _cells(f"{name}.", value)
        elif isinstance(value, list):
            if value and all(type(each) in {int, float} for each in value):
                yield name, repr(median(value))
        elif value is not None:
            yield name, str(value)


def _object(where: str, text: str, *, after: str = "", key: str | None = None) -> dict[str, Any]:
    """A line as a JSON object; ``after`` says what it stands behind, ``key`` names what it must hold."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidDocument(f"{where}: must be JSON{after}: {error}") from error
    if not isinstance(found, dict) or (key and not isinstance(found.get(key), str)):
        rule = f"an object with a {key}" if key else "a JSON object"
        raise InvalidDocument(f"{where}: must be {rule}, got {text.strip()[:40]!r}")
    return found


def _float(where: str, value: Any) -> float:
    """A finite number; logs also write numbers as text."""
    try:
        found = decimal(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise InvalidDocument(f"{where}: must be a number, got {value!r:.40}")
    return found


def _mlperf(path: Path, lines: Iterable[str]) -> FoundRun:
    """Time in training blocks per step of a global batch; evaluation does not count."""
    events = []
    for number, line in enumerate(lines, start=1):
        _, marked, text = line.partition(_MLLOG)
        if marked and (_MLLOG_READ.search(text) or '"key"' not in text):
            where = f"{path}: line {number}"
            events.append(_object(where, text, after=f" behind {_MLLOG}", key="key"))
    values = {event["key"]: event.get("value") for event in events}
    if "global_batch_size" not in values:
        raise InvalidDocument(f"{path}: must hold a {_MLLOG} line with global_batch_size, got none")
    batch = _float(f"{path}: global_batch_size", values["global_batch_size"])
    if batch <= 0:
        raise InvalidDocument(f"{path}: global_batch_size must be > 0, got {batch:g}")
    total_ms, num_samples = _trained(path, events)
    row = {column: str(values[key]) for key, column in _MLLOG_COLUMNS.items() if values.get(key)}
    step_s = total_ms * 1e-3 / (num_samples / batch)
    return FoundRun(str(path), row | {"step_time_s": repr(step_s)})


def _trained(path: Path, events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Time in finished blocks [ms], and samples trained by the last of them less those before the first."""
    total_ms, begun_ms = 0.0, None
    counts: dict[str, list[float]] = {"block_start": [], "block_stop": []}
    for event in events:
        key, metadata = event["key"], event.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise InvalidDocument(
                f"{path}: metadata of {key} must be an object, got {metadata!r:.40}"
            )
        if key == "block_start":
            begun_ms = _float(f"{path}: time_ms of {key}", event.get("time_ms"))
        elif key == "block_stop" and begun_ms is not None:
            total_ms += _float(f"{path}: time_ms of {key}", event.get("time_ms")) - begun_ms
            begun_ms = None
        if key in counts and "samples_count" in metadata:
            where = f"{path}: samples_count of {key}"
            counts[key].append(_float(where, metadata["samples_count"]))
    if total_ms <= 0:
        raise InvalidDocument(
            f"{path}: must hold block_start and block_stop, got no finished block"
        )
    num_samples = sum(counts["block_stop"][-1:]) - sum(counts["block_start"][:1])
    if num_samples <= 0:
        raise InvalidDocument(
            f"{path}: blocks must say samples_count in their metadata, got none that grows; "
            "give the step time in a CSV"
        )
    return total_ms, num_samples


STEP: Final = "step_time_s"
PEAK: Final = "peak_memory_bytes"
#: Rates that stand for the step time, with what they count of one step.
_TOKENS, _TOKENS_EACH, _SAMPLES = "tokens_per_s", "tokens_per_s_per_device", "samples_per_s"
_RATES: Final = (_TOKENS, _TOKENS_EACH, _SAMPLES)
#: Words that stand for numbers.
_WORDS: Final = ("model", "recompute", "precision")
#: What few runs have: experts, FSDP's options.
_SELDOM: Final = ("experts", "experts_per_token", "ep", "shard")
#: What describes a run, with its step time.
_NEEDED: Final = (*(each.name for each in fields(Jobs) if each.name not in USUAL), STEP)
_NUMBERS: Final = (*_NEEDED, "global_batch", "devices", *_RATES, *_SELDOM, PEAK)
NAMES: Final = (*_NUMBERS, *_WORDS)
#: What a table need not say.
DEFAULTS: Final[dict[str, float]] = {
    **dict.fromkeys(("dp", "tp", "pp", "cp", "interleave"), 1.0),
    **dict.fromkeys(("zero", "recompute_full", "recompute_attention", "gpipe"), 0.0),
    **dict.fromkeys(("sequence_parallel", "gated"), 0.0),
    **dict.fromkeys(("tied", "fused_attention"), 1.0),
    "devices_per_node": float(DEVICES_PER_NODE),
}
#: Flags that the name of a model says, and those that a word does.
_OF_MODEL: Final = ("gated", "tied", "fused_attention")
_RECOMPUTED: Final = ("recompute_full", "recompute_attention")
_FLAGS: Final = (*_RECOMPUTED, "gpipe", "sequence_parallel", *_OF_MODEL)
_MAY_BE_0: Final = (*_FLAGS, "zero", "shard")
_DECIMAL: Final = (STEP, *_RATES, PEAK)
#: No run has more of anything; products of such numbers stay finite.
_MOST: Final = 1e18
_YES_NO: Final = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def read_run(where: str, row: Row, mapping: RunColumns, *, device: str | None) -> dict[str, float]:
    """All numbers of one run, its step time in seconds; what it need not say has its default.

    ``device``: Of the runs, for the peak of a precision; None: ratios of an H100.
    """
    said = dict(mapping.constants)
    for name in _NUMBERS:
        column = mapping.columns.get(name, name)
        text = (row.get(column) or "").strip()
        if name not in said and text:
            said[name] = _number(f"{where}, column {column}", name, text)
    run = _from_words(where, row, mapping, device=device) | said
    if "devices" in run and "dp" not in run:
        run["dp"] = _replicas(where, run)
    _require_all(where, row, mapping, run)
    batch, devices = run.pop("global_batch", None), run.pop("devices", None)
    run = DEFAULTS | run
    if batch is not None:
        run["accumulation"] = _accumulation(where, run, batch)
    count = run["dp"] * run["tp"] * run["pp"] * run["cp"]
    if devices is not None and devices != count:
        raise InvalidDocument(
            f"{where}: devices must be dp x tp x pp x cp = {count:g}, got {devices:g}"
        )
    run[STEP] = _step_s(run, mapping)
    if PEAK in run:
        run[PEAK] *= parse_bytes(f"1{mapping.units.peak_memory_bytes}")
    return {name: value for name, value in run.items() if name not in _RATES}


def step_column(mapping: RunColumns, headings: Collection[str]) -> str:
    """Heading under which a table says how long a step takes, or how fast it is."""
    names = [mapping.columns.get(name, name) for name in (STEP, *_RATES)]
    return next((name for name in names if name in headings), names[0])


def reading_notes(rows: Sequence[Row], mapping: RunColumns) -> list[str]:
    """Columns that nothing was read from, and what was taken for granted because no column says it."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    used = {mapping.columns.get(name, name) for name in NAMES}
    unread = [str(heading) for heading in headings if heading not in used]
    said = {*mapping.constants, *(n for n in NAMES if mapping.columns.get(n, n) in headings)}
    # Each of these says the others, or makes them follow.
    if mapping.model or "model" in said:
        said |= {*_OF_MODEL}
    if "recompute" in said:
        said |= {*_RECOMPUTED}
    if "devices" in said:
        said.add("dp")
    taken = [f"{name} = {value:g}" for name, value in DEFAULTS.items() if name not in said]
    if not mapping.precision and "precision" not in said:
        taken.append(f"precision = {Precision.BF16}")
    notes = []
    if unread:
        notes.append(
            f"columns not read: {', '.join(unread)} (map them with --columns if they matter)"
        )
    if taken:
        notes.append(f"no column says, taken for granted: {', '.join(taken)}")
    return notes


def require_known(path: Path, mapping: RunColumns) -> None:
    """Refuse names of a mapping that mean nothing here, and constants out of range."""
    for table, names, known in (
        ("columns", mapping.columns, NAMES),
        ("constants", mapping.constants, _NUMBERS),
    ):
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise InvalidDocument(
                f"{path}: {table}: {unknown[0]} is unknown; names are {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
    for name, value in mapping.constants.items():
        _require_in_range(f"{path}: constants.{name}", name, value)


def _from_words(
    where: str, row: Row, mapping: RunColumns, *, device: str | None
) -> dict[str, float]:
    """Numbers that stand behind the words of a run."""
    words = {
        name: (row.get(mapping.columns.get(name, name)) or "").strip().lower() for name in _WORDS
    }
    model = mapping.model or words["model"]
    found: dict[str, float] = {}
    if model:
        _require_one_of(where, "model", model, TRANSFORMERS)
        found |= model_columns(TRANSFORMERS[model].shape)
    if words["recompute"]:
        _require_one_of(where, "recompute", words["recompute"], tuple(Recompute))
        found["recompute_full"] = float(words["recompute"] == Recompute.FULL)
        found["recompute_attention"] = float(words["recompute"] == Recompute.SELECTIVE)
    precision = (mapping.precision or words["precision"]).replace("fp16", Precision.BF16)
    if precision and precision != Precision.BF16:
        _require_one_of(where, "precision", precision, tuple(Precision))
        ratio = precision_ratio(Precision(precision), device or "H100", where=where)
        found["matmul_ratio"] = ratio
        if precision in {Precision.TF32, Precision.FP32}:
            found["element_bytes"] = SINGLE_BYTES
    return found


def _require_one_of(where: str, name: str, text: str, known: Iterable[str]) -> None:
    names = list(known)
    if text not in names:
        raise InvalidDocument(
            f"{where}: {name} must be one of {', '.join(names)}, got {text!r}"
            f"{did_you_mean(text, names)}"
        )


def _replicas(where: str, run: Mapping[str, float]) -> float:
    """Replicas that make up the devices of a run that says these alone."""
    shared = run.get("tp", 1.0) * run.get("pp", 1.0) * run.get("cp", 1.0)
    dp = run["devices"] / shared
    if not dp.is_integer():
        raise InvalidDocument(
            f"{where}: devices must be a multiple of tp x pp x cp = {shared:g}, "
            f"got {run['devices']:g}"
        )
    return dp


def _require_all(where: str, row: Row, mapping: RunColumns, run: Mapping[str, float]) -> None:
    needed = {name for name in _NEEDED if name not in DEFAULTS}
    if "global_batch" in run and "accumulation" not in run:
        # With a default for dp the derived accumulation would be a guess.
        needed = needed - {"accumulation"} | {"dp"}
    if any(name in run for name in _RATES):
        needed -= {STEP}
    missing = [name for name in _NEEDED if name in needed - set(run)]
    if not missing:
        return
    first = mapping.columns.get(missing[0], missing[0])
    if first in row:
        raise InvalidDocument(f"{where}, column {first}: must be a number, got ''")
    listed = ", ".join(mapping.columns.get(name, name) for name in _NEEDED if name in needed)
    raise InvalidDocument(
        f"{where.partition(': line ')[0]}: column {first} is missing; needed: {listed} "
        f"(model may stand for the shape, global_batch and dp or devices for accumulation, "
        f"{_TOKENS} for {STEP}); map with --columns FILE"
    )


def _accumulation(where: str, run: Mapping[str, float], batch: float) -> float:
    each = run["dp"] * run["micro_batch"]
    accumulation = batch / each
    if not accumulation.is_integer():
        raise InvalidDocument(
            f"{where}: global_batch must be a multiple of dp x micro_batch = {each:g}, got {batch:g}"
        )
    if run.get("accumulation", accumulation) != accumulation:
        raise InvalidDocument(
            f"{where}: global_batch must be dp x micro_batch x accumulation = "
            f"{each * run['accumulation']:g} sequences, got {batch:g}"
        )
    return accumulation


def _step_s(run: Mapping[str, float], mapping: RunColumns) -> float:
    """Time of a step: as it is said, or from a rate. [s]"""
    if STEP in run:
        return run[STEP] * parse_duration(f"1{mapping.units.step_time_s}")
    samples = run["dp"] * run["micro_batch"] * run["accumulation"]
    if _SAMPLES in run:
        return samples / run[_SAMPLES]
    devices = run["dp"] * run["tp"] * run["pp"] * run["cp"]
    rate = run[_TOKENS] if _TOKENS in run else run[_TOKENS_EACH] * devices
    return samples * run["sequence"] / rate


def _number(where: str, name: str, text: str) -> float:
    if name in _FLAGS and text.lower() in _YES_NO:
        return _YES_NO[text.lower()]
    value = _float(where, text)
    _require_in_range(where, name, value)
    return value


def _require_in_range(where: str, name: str, value: float) -> None:
    may_be_0 = name in _MAY_BE_0
    if _MOST < value < float("inf"):
        raise InvalidDocument(f"{where}: must be <= {_MOST:g}, got {value:g}")
    if not (0.0 if may_be_0 else 1e-12) <= value < float("inf"):
        rule = ">= 0" if may_be_0 else "> 0"
        raise InvalidDocument(f"{where}: must be finite and {rule}, got {value:g}")
    if name not in _DECIMAL and not value.is_integer():
        raise InvalidDocument(f"{where}: must be a whole number, got {value:g}")
    if name in _FLAGS and value > 1:
        raise InvalidDocument(f"{where}: must be 0, 1, yes or no, got {value:g}")


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

    Raises ``UsageError`` if the device has no data sheet here. ``InvalidDocument``: table or mapping cannot be read,
    or a column is missing or in a wrong unit. ``IncomparableRuns``: two rows of one job differ by more than scatter.
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
