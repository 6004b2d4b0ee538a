"""MLPerf: reference convergence points, and submissions whose smaller sizes predict the larger.

Submissions choose their batch: that of each device shrinks as devices are added, and larger batches need
more samples. Device-seconds per sample follow a law of devices and batch (``scaling``); samples to the
target follow that of the reference points.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.convergence import TUNING_SPREAD, BatchPoint, Convergence, fit_convergence
from perfmodel.cost import UNCERTAINTY_AT_ONE_EFOLD
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.statistics import DEVIATE_90, FloatArray
from validate.published.harness import Part, Row, Table, number, numbers, read_rows, verdict
from validate.published.scaling import (
    NOISE,
    TWO_COUNTS,
    Growth,
    Series,
    conditioned,
    grow_linearly,
    growth_terms,
    judge_grown,
    split_of,
)

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

_SYSTEM: Final = (
    *("round", "division", "submitter", "benchmark", "hardware", "gpus_per_node", "framework"),
)
_TRAINED, _WHOLE, _SAMPLES, _RATE = (
    *("train_only_median_s", "ttt_median_s", "stop_epoch_median", "throughput_median"),
)
COLUMNS: Final = (*_SYSTEM, "system", "gpus", "global_batch", _TRAINED, _WHOLE, _SAMPLES, _RATE)
#: Counts in a system's name say how much of it was used: ``2xR750xa``, ``dgxa100_n8_...``, ``tpu-v4-128-TF``.
_COUNTS: Final = re.compile(r"^\d+x|[-_][nN]\d+(?=[-_])|(?<=[-_])\d+(?=[-_])")
#: Coefficients of ``growth_terms`` before any row is read: what a ring loses, what a doubling of the
#: nodes costs, what a step costs without its samples; and their standard deviations. The first two are those
#: of ``scaling``; the third, and the form, were chosen on rounds up to 1.1.
_COEFFICIENTS: Final = np.array([0.04, 0.01, 0.1])
_SPREADS: Final = np.array([0.04, 0.05, 0.1])
#: How much systems may differ, as a multiple of these deviations.
_DIFFERENCES: Final = np.geomspace(0.03, 3.0, 21)
_FEWEST: Final = 5
#: Latest round that the form was chosen on, and what is judged apart: those behind it, among themselves.
_CHOSEN_ON: Final = 1.1
_LATER: Final = "rounds from 2.0 alone"
Prior: TypeAlias = tuple[FloatArray, FloatArray]
"""Mean and covariance of the coefficients of ``growth_terms`` before a system is seen."""


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


class _System(NamedTuple):
    """All submissions of one system to one benchmark."""

    benchmark: str
    round: str
    per_sample: Series
    """Device-seconds of training per sample."""
    whole: Series | None
    """Device-seconds from start to target per sample; none if samples are not told."""
    samples: FloatArray
    """Trained until the target, any constant unit."""
    global_batch: FloatArray


def judge(table: Table) -> Iterator[PublishedSeries]:
    """Verdict on device-seconds per sample and on the time to train, for all benchmarks and by benchmark."""
    systems = _systems(table)
    laws = _laws(table.path.with_name("convergence.csv"))
    told = [one for one in systems if one.whole is not None and one.benchmark in laws]
    untold = sorted({one.benchmark for one in systems} - {one.benchmark for one in told})
    if untold:
        words = f"time to train of {', '.join(untold)}: samples or reference points are missing"
        table.skipped.append(f"mlperf_scaling: {words}")
    growth = _grown({one.per_sample: one.benchmark for one in systems})
    parts = {"device-seconds per sample, all benchmarks": growth}
    for benchmark in sorted({one.benchmark for one in systems}):
        same = [one.per_sample for one in systems if one.benchmark == benchmark]
        long = {one: growth[one] for one in same if split_of(one) is TWO_COUNTS}
        parts[f"device-seconds per sample, {benchmark}"] = long
    parts["time to train"] = _whole_growth(told, laws)
    later, later_told = (
        [one for one in some if _version(one.round) > _CHOSEN_ON] for some in (systems, told)
    )
    parts[f"device-seconds per sample, {_LATER}"] = _grown(
        {one.per_sample: one.benchmark for one in later}
    )
    parts[f"time to train, {_LATER}"] = _whole_growth(later_told, laws)
    for name, grown in parts.items():
        yield from judge_grown(table.source, name, grown)


def _whole_growth(
    systems: Sequence[_System], laws: Mapping[str, Mapping[float, Convergence]]
) -> dict[Series, Growth]:
    """Of device-seconds until the target: those per sample, evaluation included, times the samples."""
    whole = {one.whole: one for one in systems if one.whole is not None}
    steps = _grown({series: one.benchmark for series, one in whole.items()})
    found = {}
    for series, one in whole.items():
        of_task = laws[one.benchmark]
        nearest = min(of_task, key=lambda version: abs(version - _version(one.round)))
        law, first = of_task[nearest], one.global_batch[0]
        ratios = [law.samples_ratio(batch, reference=first) for batch in one.global_batch]
        more = np.array([ratio.nominal for ratio in ratios])
        wide = np.array([np.log(ratio.p95 / ratio.p5) / 2 for ratio in ratios])
        tuned = DEVIATE_90 * TUNING_SPREAD * np.sqrt(2)
        low, middle, high = _widened(steps[series], np.hypot(wide, tuned))
        until = replace(series, step=series.step * one.samples)
        found[until] = (low * more, middle * more, high * more)
    return found


def _grown(benchmarks: Mapping[Series, str]) -> dict[Series, Growth]:
    """Growth of every series; all benchmarks are the prior of one, its systems that of a system."""
    everything = pool([*benchmarks], (_COEFFICIENTS, np.diag(_SPREADS**2)))
    priors = {
        name: pool([one for one in benchmarks if benchmarks[one] == name], everything)
        for name in set(benchmarks.values())
    }
    found = {}
    for one, name in benchmarks.items():
        mean, covariance = _not_negative(*conditioned(one, *priors[name]))
        found[one] = _widened(grow_linearly(one, mean, covariance), beyond(one))
    return found


def beyond(one: Series) -> FloatArray:
    """Uncertainty of batches per device outside of the known ones, as curves have it; log, 90 %."""
    if one.batch is None:
        return np.zeros_like(one.gpus)
    logs = np.log(one.batch)
    known = logs[: split_of(one).known]
    distance = np.maximum(np.maximum(known.min() - logs, logs - known.max()), 0.0)
    return np.asarray(DEVIATE_90 * UNCERTAINTY_AT_ONE_EFOLD * np.sqrt(distance))


def _widened(growth: Growth, more: FloatArray) -> Growth:
    """The interval with another, independent uncertainty; log, 90 %."""
    low, middle, high = growth
    half = np.hypot((high - low) / (2 * middle), more)
    return middle * np.exp(-half), middle, middle * np.exp(half)


def _not_negative(mean: FloatArray, covariance: FloatArray) -> Prior:
    """Coefficients without those that would speed a step up, the others told so."""
    for _ in mean:
        index = int(np.argmin(mean))
        if mean[index] >= 0:
            break
        gain = covariance[:, index] / covariance[index, index]
        mean = mean - gain * mean[index]
        mean[index] = 0.0
    return np.maximum(mean, 0.0), covariance


def pool(series: Sequence[Series], before: Prior) -> Prior:
    """Coefficients of systems of one kind, from the two smallest counts of those that have more.

    Every system has coefficients of its own around common ones. How far they differ is the multiple of the
    deviations known before that makes the steps at the second counts most probable.

        step_1 / step_0 - 1 = terms (common + own) + scatter
    """
    known = [one for one in series if split_of(one) is TWO_COUNTS]
    if len(known) < _FEWEST:
        return before
    mean, common = before
    terms = np.stack([growth_terms(one)[1] for one in known])
    grown = np.array([one.step[1] / one.step[0] - 1 for one in known])
    rest = grown - terms @ mean

    def covariance(scale: float) -> FloatArray:
        own = ((terms * _SPREADS * scale) ** 2).sum(axis=1) + NOISE**2
        return np.asarray(terms @ common @ terms.T + np.diag(own))

    def log_likelihood(scale: float) -> float:
        _, log_determinant = np.linalg.slogdet(covariance(scale))
        return float(-0.5 * (rest @ np.linalg.solve(covariance(scale), rest) + log_determinant))

    best = float(max(_DIFFERENCES, key=log_likelihood))
    gain = common @ terms.T @ np.linalg.inv(covariance(best))
    return mean + gain @ rest, common - gain @ terms @ common + best**2 * np.diag(_SPREADS**2)


def _laws(path: Path) -> dict[str, dict[float, Convergence]]:
    """Samples over the batch by benchmark and round, from the reference points where there are any."""
    found: dict[str, dict[float, Convergence]] = defaultdict(dict)
    rows = filter(_is_point, read_rows(path, columns=POINTS)) if path.is_file() else ()
    for (task, round_name), points in _points(rows).items():
        kind, _, version = round_name.partition("_")
        if kind == "training" and len(points) > 1:
            found[task][_version(version)] = fit_convergence(points)
    return dict(found)


def _version(text: str) -> float:
    major, minor, *_ = text.split(".")
    return int(major) + int(minor) / 10


def _systems(table: Table) -> list[_System]:
    """Systems with several counts."""
    groups: dict[tuple[str, ...], dict[float, Row]] = defaultdict(dict)
    timed = {"no devices or no time": lambda row: numbers(row, "gpus", _WHOLE) is not None}
    for row in table.keep(timed):
        gpus = number(row, "gpus") or 0.0
        key = (*(row[name] for name in _SYSTEM), _COUNTS.sub("", row["system"]))
        # Of one system's entries with the same count the first stands for all.
        again = "another entry of a system with as many devices"
        table.left_out[again] += gpus in groups[key]
        groups[key].setdefault(gpus, row)
    systems = []
    for key, rows in groups.items():
        if len(rows) == 1:
            table.leave_out("systems with one count of devices", 1)
        elif one := _system(key[-1], [rows[count] for count in sorted(rows)]):
            systems.append(one)
        else:
            table.leave_out("systems that tell neither samples nor a rate", len(rows))
    return systems


def _system(name: str, rows: Sequence[Row]) -> _System | None:
    """None if nothing says how many samples were trained."""
    first = rows[0]
    gpus, batch, samples = (_column(rows, n) for n in ("gpus", "global_batch", _SAMPLES))
    trained_s, whole_s, rate = (_column(rows, n) for n in (_TRAINED, _WHOLE, _RATE))
    # Some benchmarks count their only epoch instead of samples.
    is_told = bool(np.isfinite(samples).all() and (samples != 1).all())
    if not np.isfinite(trained_s).all():
        trained_s = whole_s
    per_sample = gpus * trained_s / samples if is_told else gpus / rate
    if not np.isfinite(per_sample).all():
        return None
    has_batch = bool(np.isfinite(batch).all())
    shown = ("submitter", "benchmark", "round", "division", "hardware", "framework")
    series = Series(
        name=", ".join([name, *(first[each] for each in shown)]),
        gpus=gpus,
        per_node=number(first, "gpus_per_node") or gpus[0],
        step=per_sample,
        batch=batch / gpus if has_batch else None,
    )
    whole = replace(series, step=gpus * whole_s / samples) if is_told and has_batch else None
    return _System(first["benchmark"], first["round"], series, whole, samples, batch)


def _column(rows: Iterable[Row], name: str) -> FloatArray:
    """Numbers of all rows; NaN where a cell says nothing."""
    values = [number(row, name) for row in rows]
    return np.array([np.nan if value is None else value for value in values])
