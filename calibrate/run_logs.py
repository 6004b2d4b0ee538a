"""Rows of runs from what trainings leave behind: CSV tables, run records, Kineto traces, MLPerf logs."""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TextIO

from perfmodel.errors import InvalidDocument, why

Row = dict[str, str]


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
_SAMPLES: Final = "samples_count"
_STEP: Final = "ProfilerStep#"


def read_run_rows(path: Path) -> list[FoundRun]:
    """Runs of a file, or of every file of a folder; step times of traces and logs in seconds.

    Raises
    ------
    InvalidDocument
        If a file cannot be read, or says too little.
    """
    if path.is_dir():
        return [run for file in sorted(path.iterdir()) for run in read_run_rows(file)]
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if ".jsonl" in path.suffixes:
                return list(_records(path, file))
            if ".json" in path.suffixes:
                return _kineto(path, json.load(file))
            if path.suffix in {".log", ".txt", ".out"}:
                return _mlperf(path, file.read().splitlines())
            return list(_table(path, file))
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise InvalidDocument(f"{path}: runs cannot be read: {why(error)}") from error


def _table(path: Path, file: TextIO) -> Iterator[FoundRun]:
    """Rows below a heading, between commas, semicolons or tabs."""
    heading = file.readline()
    delimiter = max(",;\t", key=heading.count)
    file.seek(0)
    for line, row in enumerate(csv.DictReader(file, delimiter=delimiter), start=2):
        where = f"{path}: line {line}"
        if None in row:
            raise InvalidDocument(
                f"{where}: must have as many cells as the heading, {len(row) - 1}, got "
                f"{len(row) - 1 + len(row[None])}; numbers are written without separators"
            )
        yield FoundRun(where, row)


def _records(path: Path, lines: Iterable[str]) -> Iterator[FoundRun]:
    """One run a line of JSON: nested names are joined by dots, of lists of numbers the median counts."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidDocument(f"{where}: must be JSON: {error}") from error
        if not isinstance(record, dict):
            raise InvalidDocument(f"{where}: must be a JSON object, got {line.strip()[:40]!r}")
        yield FoundRun(where, dict(_cells("", record)))


def _cells(prefix: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _cells(f"{name}.", value)
        elif isinstance(value, list):
            if value and all(isinstance(each, int | float) for each in value):
                yield name, repr(median(value))
        elif value is not None:
            yield name, str(value)


def _kineto(path: Path, trace: Any) -> list[FoundRun]:
    """One row: the median step that the profiler marked; only rank 0 of a job counts."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise InvalidDocument(f"{path}: must be a Kineto trace with traceEvents, got none")
    spread = trace.get("distributedInfo", {})
    if not isinstance(spread, dict):
        raise InvalidDocument(f"{path}: distributedInfo must be an object, got {spread!r:.40}")
    if _number(f"{path}: distributedInfo.rank", spread.get("rank", 0)) != 0:
        return []
    steps_us = [
        _number(f"{path}: dur of {event['name']}", event.get("dur"))
        for event in events
        if isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") == "user_annotation"
        and str(event.get("name", "")).startswith(_STEP)
    ]
    if not steps_us:
        raise InvalidDocument(
            f"{path}: must hold user annotations {_STEP}N, got none; profile with a schedule"
        )
    cells = {
        "step_time_s": repr(median(steps_us) * 1e-6),
        "dp": f"{_number(f'{path}: distributedInfo.world_size', spread.get('world_size', 1)):g}",
    }
    return [FoundRun(str(path), cells)]


def _mlperf(path: Path, lines: list[str]) -> list[FoundRun]:
    """One row: time in training blocks per step of a global batch; evaluation does not count."""
    events = []
    for number, line in enumerate(lines, start=1):
        _, marked, text = line.partition(_MLLOG)
        if marked:
            events.append(_event(f"{path}: line {number}", text))
    values = {event["key"]: event.get("value") for event in events}
    if "global_batch_size" not in values:
        raise InvalidDocument(f"{path}: must hold a {_MLLOG} line with global_batch_size, got none")
    batch = _number(f"{path}: global_batch_size", values["global_batch_size"])
    if batch <= 0:
        raise InvalidDocument(f"{path}: global_batch_size must be > 0, got {batch:g}")
    steps = _samples(path, events) / batch
    row = {column: str(values[key]) for key, column in _MLLOG_COLUMNS.items() if values.get(key)}
    return [FoundRun(str(path), row | {"step_time_s": repr(_block_s(path, events) / steps)})]


def _event(where: str, text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidDocument(f"{where}: must be JSON behind {_MLLOG}: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("key"), str):
        raise InvalidDocument(f"{where}: must be an object with a key, got {text.strip()[:40]!r}")
    return event


def _number(where: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidDocument(f"{where}: must be a number, got {value!r}") from None


def _block_s(path: Path, events: list[dict[str, Any]]) -> float:
    total_ms, begun_ms = 0.0, None
    for event in events:
        if event["key"] == "block_start":
            begun_ms = _number(f"{path}: time_ms of block_start", event.get("time_ms"))
        elif event["key"] == "block_stop" and begun_ms is not None:
            ended_ms = _number(f"{path}: time_ms of block_stop", event.get("time_ms"))
            total_ms, begun_ms = total_ms + ended_ms - begun_ms, None
    if total_ms <= 0:
        raise InvalidDocument(
            f"{path}: must hold block_start and block_stop, got no finished block"
        )
    return total_ms * 1e-3


def _samples(path: Path, events: list[dict[str, Any]]) -> float:
    """Samples that were trained by the last finished block, less those before the first."""
    counted = [
        (
            event["key"],
            _number(f"{path}: {_SAMPLES} of {event['key']}", event["metadata"][_SAMPLES]),
        )
        for event in events
        if event["key"] in {"block_start", "block_stop"}
        and _SAMPLES in (event.get("metadata") or {})
    ]
    first = next((count for key, count in counted if key == "block_start"), 0.0)
    last = next((count for key, count in reversed(counted) if key == "block_stop"), 0.0)
    if last <= first:
        raise InvalidDocument(
            f"{path}: blocks must say {_SAMPLES} in their metadata, got none that grows; "
            "give the step time in a CSV"
        )
    return last - first
