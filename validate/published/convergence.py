"""MLPerf's reference convergence points: fit a task's smaller batches, predict its larger ones."""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from perfmodel.documents.convergence import ConvergenceVerdict, PredictedBatch, SplitSummary
from perfmodel.errors import InvalidDocument
from perfmodel.statistics.convergence import BatchPoint, fit_convergence

MAPE_AT_MOST: Final = 0.10
COVERAGE_AT_LEAST: Final = 0.85
_COLUMNS: Final = ("benchmark", "round", "global_batch", "mean", "olympic_mean")
_Series: TypeAlias = tuple[BatchPoint, ...]

#: How many of n batches are fitted, in ascending order; at least two, and one is left to predict.
SPLITS: Final[dict[str, Callable[[int], int]]] = {
    "smaller two thirds": lambda count: math.ceil(2 * count / 3),
    "smaller half": lambda count: math.ceil(count / 2),
    "all but the largest": lambda count: count - 1,
}
#: The split that the gates judge; the others are reported beside it.
JUDGED_SPLIT: Final = "smaller two thirds"


def judge(path: Path) -> ConvergenceVerdict:
    """Predict the larger batches of every benchmark and round in a table.

    Series that later rounds repeat unchanged count once.

    Raises
    ------
    InvalidDocument
        If the table cannot be read, or leaves nothing to predict.
    """
    series = read_series(path)
    predictions = tuple(
        prediction
        for split, size in SPLITS.items()
        for (benchmark, round_name), points in series
        for prediction in _predict(points, size, split, benchmark, round_name)
    )
    if not predictions:
        raise InvalidDocument(f"{path}: must hold a benchmark with three batches, got none")
    return ConvergenceVerdict(
        schema_version=ConvergenceVerdict.current_version,
        judged_split=JUDGED_SPLIT,
        mape_at_most=MAPE_AT_MOST,
        coverage_at_least=COVERAGE_AT_LEAST,
        summaries=tuple(_summary(split, predictions) for split in SPLITS),
        predictions=predictions,
    )


def read_series(path: Path) -> list[tuple[tuple[str, str], _Series]]:
    """Benchmark and round to points in ascending batch; each distinct series once.

    Raises
    ------
    InvalidDocument
        If the file cannot be read, a column is missing, or a number makes no sense.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for line, row in _rows(path):
        try:
            point = BatchPoint(
                batch=float(row["global_batch"]),
                samples=float(row["olympic_mean"] or row["mean"]),
            )
        except ValueError as error:
            raise InvalidDocument(f"{path}: line {line}: {error}") from error
        batches = found.setdefault((row["benchmark"], row["round"]), {})
        batches.setdefault(point.batch, []).append(point.samples)
    distinct: dict[tuple[str, _Series], tuple[str, str]] = {}
    for key, batches in found.items():
        points = tuple(
            BatchPoint(batch=batch, samples=float(np.median(batches[batch])))
            for batch in sorted(batches)
        )
        distinct.setdefault((key[0], points), key)
    return [(key, points) for (_, points), key in distinct.items()]


def _rows(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise InvalidDocument(f"{path}: must have the columns {sorted(missing)}, got none")
            yield from ((reader.line_num, row) for row in reader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(f"{path}: convergence table cannot be read: {error}") from error


def _predict(
    points: _Series, size: Callable[[int], int], split: str, benchmark: str, round_name: str
) -> list[PredictedBatch]:
    if len(points) < 3:
        return []
    count = max(2, size(len(points)))
    fitted, unseen = points[:count], points[count:]
    law = fit_convergence(fitted)
    line = np.polyfit([p.batch for p in fitted], [p.samples for p in fitted], 1)
    return [
        PredictedBatch(
            split=split,
            benchmark=benchmark,
            round=round_name,
            batch=point.batch,
            beyond=point.batch / fitted[-1].batch,
            predicted=law.samples(point.batch).p50,
            p5=law.samples(point.batch).p5,
            p95=law.samples(point.batch).p95,
            measured=point.samples,
            constant=fitted[-1].samples,
            linear=float(np.polyval(line, point.batch)),
        )
        for point in unseen
    ]


def _summary(split: str, predictions: Sequence[PredictedBatch]) -> SplitSummary:
    chosen = [prediction for prediction in predictions if prediction.split == split]
    errors = np.array([prediction.error for prediction in chosen])
    names = np.array([prediction.benchmark for prediction in chosen])
    measured = np.array([prediction.measured for prediction in chosen])
    constant = np.array([prediction.constant for prediction in chosen])
    linear = np.array([prediction.linear for prediction in chosen])
    return SplitSummary(
        split=split,
        num_series=len({(prediction.benchmark, prediction.round) for prediction in chosen}),
        num_predictions=len(chosen),
        mape=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        coverage=sum(prediction.is_covered for prediction in chosen) / len(chosen),
        worst=float(np.abs(errors).max()),
        mape_of_benchmarks=float(
            np.mean([np.abs(errors[names == name]).mean() for name in sorted(set(names))])
        ),
        mape_constant=float(np.abs(constant / measured - 1).mean()),
        mape_linear=float(np.abs(linear / measured - 1).mean()),
    )
