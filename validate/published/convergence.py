"""MLPerf's reference convergence points: smaller batches predict larger ones."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.plan.batch import BatchPoint, fit_convergence
from validate.published.harness import Part, Row, Table, number, verdict

POINTS: Final = ("benchmark", "round", "global_batch", "mean", "olympic_mean")
_FEWEST_BATCHES: Final = 3
Points: TypeAlias = tuple[BatchPoint, ...]
#: How many of n batches are fitted, in ascending order. The first is shown by task too.
SPLITS: Final[dict[str, Callable[[int], int]]] = {
    "smaller two thirds": lambda count: math.ceil(2 * count / 3),
    "smaller half": lambda count: math.ceil(count / 2),
    "all but the largest": lambda count: count - 1,
}
_SHOWN_BY_TASK: Final = "smaller two thirds"


def judge_convergence(table: Table) -> Iterator[PublishedSeries]:
    """Smaller batches predict larger ones: all tasks for each split, and each task for the first.

    Rounds are fitted apart. Series whose points all stand in a longer one count once.
    """
    tasks: dict[str, list[Points]] = defaultdict(list)
    good = table.keep({"no batch, or no samples to the target": _is_point})
    for (task, round_name), points in _points(good).items():
        if len(points) < _FEWEST_BATCHES:
            own = [r for r in good if (r["benchmark"], r["round"]) == (task, round_name)]
            few = f"rounds with fewer than {_FEWEST_BATCHES} batches"
            table.leave_out(few, len(own), f"{task}, {round_name}")
        else:
            tasks[task].append(points)
    kept = _without_repeats(tasks)
    for split, size in SPLITS.items():
        found = {"all tasks": [points for rounds in kept.values() for points in rounds]}
        if split == _SHOWN_BY_TASK:
            found |= kept
        for task, rounds in found.items():
            counts = [max(2, size(len(points))) for points in rounds]
            if rounds:
                yield verdict(
                    table.source,
                    f"samples to target of {task}",
                    list(map(_larger_batches, rounds, counts)),
                    fitted=split,
                    predicted=f"beyond the {split}",
                    num_fitted=sum(counts),
                )


def _is_point(row: Row) -> bool:
    return bool(number(row, "global_batch") and _samples(row))


def _samples(row: Row) -> float:
    return number(row, "olympic_mean") or number(row, "mean") or 0.0


def _points(rows: Iterable[Row]) -> dict[tuple[str, str], Points]:
    rounds: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        batch = number(row, "global_batch") or 0.0
        rounds[row["benchmark"], row["round"]][batch].append(_samples(row))
    return {
        key: tuple(
            BatchPoint(batch=b, samples=float(np.median(batches[b]))) for b in sorted(batches)
        )
        for key, batches in rounds.items()
    }


def _without_repeats(tasks: Mapping[str, Sequence[Points]]) -> dict[str, list[Points]]:
    """Series that no other one contains; of equal ones the first."""
    kept: list[tuple[str, Points]] = []
    everything = [(task, points) for task, rounds in tasks.items() for points in rounds]
    for task, points in sorted(everything, key=lambda entry: -len(entry[1])):
        if not any(set(points) <= set(longer) for _, longer in kept):
            kept.append((task, points))
    found = {task: [p for p in rounds if (task, p) in kept] for task, rounds in tasks.items()}
    # Equal series of one task stand in the list as often as they were read.
    return {task: list(dict.fromkeys(rounds)) for task, rounds in found.items() if rounds}


def _larger_batches(points: Points, count: int) -> Part:
    fitted, unknown = points[:count], points[count:]
    law = fit_convergence(fitted)
    line = np.polyfit([p.batch for p in fitted], [p.samples for p in fitted], 1)
    samples = [law.samples(point.batch) for point in unknown]
    return Part(
        measured=np.array([point.samples for point in unknown]),
        predicted={
            "perfmodel": np.array([found.nominal for found in samples]),
            "constant samples": np.array([fitted[-1].samples] * len(unknown)),
            "straight line": np.array([float(np.polyval(line, p.batch)) for p in unknown]),
        },
        interval=(np.array([s.p5 for s in samples]), np.array([s.p95 for s in samples])),
    )
