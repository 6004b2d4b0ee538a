"""MLPerf's reference convergence points: fit a task's smaller batches, predict its larger ones."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from perfmodel.cost.batch import BatchPoint, fit_convergence
from perfmodel.documents.verdicts import PublishedSeries
from validate.published.errors import compare_predictors
from validate.published.rows import number, read_rows

SOURCE: Final = "convergence"
_COLUMNS: Final = ("benchmark", "round", "global_batch", "mean", "olympic_mean")
_FEWEST_BATCHES: Final = 3
_Points: TypeAlias = tuple[BatchPoint, ...]

#: How many of n batches are fitted, in ascending order. The first is shown by task too.
SPLITS: Final[dict[str, Callable[[int], int]]] = {
    "smaller two thirds": lambda count: math.ceil(2 * count / 3),
    "smaller half": lambda count: math.ceil(count / 2),
    "all but the largest": lambda count: count - 1,
}
_SHOWN_BY_TASK: Final = "smaller two thirds"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    """One batch that the fit has not seen; samples in the unit of the source."""

    measured: float
    ours: float
    p5: float
    p95: float
    constant: float
    """As many samples as the largest fitted batch."""
    linear: float
    """A straight line through samples over batch."""


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict on all tasks for each split, and by task for the first; rounds are fitted apart.

    Series whose points all stand in a longer one, of another round or under another name, count once.
    """
    tasks, skipped = _read(folder)
    verdicts: list[PublishedSeries] = []
    for split, size in SPLITS.items():
        by_task = {
            task: [p for points in rounds for p in _predict(points, size)]
            for task, rounds in tasks.items()
        }
        fitted = {task: _fitted(rounds, size) for task, rounds in tasks.items()}
        everything = [p for found in by_task.values() for p in found]
        if everything:
            verdicts.append(_verdict("all tasks", split, sum(fitted.values()), everything))
        if split == _SHOWN_BY_TASK:
            verdicts += [
                _verdict(task, split, fitted[task], found) for task, found in by_task.items()
            ]
    return verdicts, skipped


def read_points(folder: Path) -> dict[tuple[str, str], _Points]:
    """Samples to the target by task and round, batches ascending.

    Raises
    ------
    InvalidDocument
        If the table is missing, or lacks a column.
    """
    rounds: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(folder / f"{SOURCE}.csv", columns=_COLUMNS):
        batch = number(row, "global_batch")
        samples = number(row, "olympic_mean") or number(row, "mean")
        if batch and samples:
            rounds[row["benchmark"], row["round"]][batch].append(samples)
    return {key: _points(batches) for key, batches in rounds.items()}


def _read(folder: Path) -> tuple[dict[str, list[_Points]], list[str]]:
    tasks: dict[str, list[_Points]] = defaultdict(list)
    skipped = []
    for (task, round_name), points in read_points(folder).items():
        if len(points) < _FEWEST_BATCHES:
            skipped.append(f"{task}, {round_name}")
        else:
            tasks[task].append(points)
    return _without_repeats(tasks), skipped


def _without_repeats(tasks: Mapping[str, Sequence[_Points]]) -> dict[str, list[_Points]]:
    """Series that no other one contains; of equal ones the first."""
    kept: list[tuple[str, _Points]] = []
    everything = [(task, points) for task, rounds in tasks.items() for points in rounds]
    for task, points in sorted(everything, key=lambda entry: -len(entry[1])):
        if not any(set(points) <= set(longer) for _, longer in kept):
            kept.append((task, points))
    found = {
        task: [points for points in rounds if (task, points) in kept]
        for task, rounds in tasks.items()
    }
    # equal series of one task stand in the list as often as they were read
    return {task: list(dict.fromkeys(rounds)) for task, rounds in found.items() if rounds}


def _points(batches: Mapping[float, Sequence[float]]) -> _Points:
    return tuple(
        BatchPoint(batch=batch, samples=float(np.median(batches[batch])))
        for batch in sorted(batches)
    )


def _fitted(rounds: Sequence[_Points], size: Callable[[int], int]) -> int:
    return sum(max(2, size(len(points))) for points in rounds)


def _predict(points: _Points, size: Callable[[int], int]) -> list[_Predicted]:
    count = max(2, size(len(points)))
    fitted = points[:count]
    law = fit_convergence(fitted)
    line = np.polyfit([p.batch for p in fitted], [p.samples for p in fitted], 1)
    found = []
    for point in points[count:]:
        samples = law.samples(point.batch)
        found.append(
            _Predicted(
                measured=point.samples,
                ours=samples.p50,
                p5=samples.p5,
                p95=samples.p95,
                constant=fitted[-1].samples,
                linear=float(np.polyval(line, point.batch)),
            )
        )
    return found


def _verdict(
    task: str, split: str, num_fitted: int, predicted: Sequence[_Predicted]
) -> PublishedSeries:
    covered = [p.p5 <= p.measured <= p.p95 for p in predicted]
    return PublishedSeries(
        source=SOURCE,
        name=f"samples to target of {task}",
        fitted=split,
        predicted=f"beyond the {split}",
        num_fitted=num_fitted,
        num_predicted=len(predicted),
        errors=compare_predictors(
            np.array([p.measured for p in predicted]),
            {
                "perfmodel": np.array([p.ours for p in predicted]),
                "constant samples": np.array([p.constant for p in predicted]),
                "straight line": np.array([p.linear for p in predicted]),
            },
            covered=np.array(covered, dtype=float),
        ),
    )
