"""MLPerf submissions: the smaller ones of a system predict its larger ones.

Submissions choose their batch: that of each device shrinks as devices are added, and larger batches need
more samples. Both are told here: device-seconds per sample follow a law of devices and batch, samples to
the target that of MLPerf's reference points (table ``convergence``).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.cost.batch import TUNING_SPREAD, Convergence, fit_convergence
from perfmodel.cost.terms import UNCERTAINTY_AT_ONE_EFOLD
from perfmodel.documents.verdicts import PublishedSeries
from perfmodel.statistics.normal import DEVIATE_90
from validate.published import convergence
from validate.published.rows import number, read_rows
from validate.published.scaling import (
    NOISE,
    ONE_COUNT,
    TWO_COUNTS,
    Growth,
    Split,
    conditioned,
    grow_linearly,
    growth_terms,
    judge_series,
)
from validate.published.series import Series

SOURCE: Final = "mlperf"
TABLE: Final = "mlperf_scaling"
Row = dict[str, str]
_SYSTEM: Final = (
    *("round", "division", "submitter", "benchmark", "hardware", "gpus_per_node", "framework"),
)
_TRAINED, _WHOLE, _SAMPLES, _RATE = (
    *("train_only_median_s", "ttt_median_s", "stop_epoch_median", "throughput_median"),
)
_COLUMNS: Final = (*_SYSTEM, "system", "gpus", "global_batch", _TRAINED, _WHOLE, _SAMPLES, _RATE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What the coefficients of ``growth_terms`` are before a system is seen."""

    mean: FloatArray
    uncertainty: FloatArray
    """Covariance, the differences between systems included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
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


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict on device-seconds per sample and on the time to train, for all benchmarks and by benchmark."""
    systems, skipped = _read(folder)
    laws = _laws(folder)
    told = [one for one in systems if one.whole is not None and one.benchmark in laws]
    untold = sorted({one.benchmark for one in systems} - {one.benchmark for one in told})
    if untold:
        skipped.append(
            f"{TABLE}: time to train of {', '.join(untold)}: samples or reference points are missing"
        )
    later, later_told = (
        [one for one in some if _version(one.round) > _CHOSEN_ON] for some in (systems, told)
    )
    return [
        *_judge_samples(systems, "all benchmarks"),
        *_judge_benchmarks(systems),
        *_judge_whole(told, laws, "time to train"),
        *_judge_samples(later, _LATER),
        *_judge_whole(later_told, laws, f"time to train, {_LATER}"),
    ], skipped


def _growth_of(systems: Sequence[_System]) -> dict[str, Growth]:
    """Of device-seconds per sample, by name of the series."""
    return _grown(
        {one.per_sample.name: one.per_sample for one in systems},
        {one.per_sample.name: one.benchmark for one in systems},
    )


def _judge_samples(systems: Sequence[_System], words: str) -> list[PublishedSeries]:
    name = f"device-seconds per sample, {words}"
    return _verdicts(name, [one.per_sample for one in systems], _growth_of(systems))


def _judge_benchmarks(systems: Sequence[_System]) -> list[PublishedSeries]:
    growth = _growth_of(systems)
    found = []
    for benchmark in sorted({one.benchmark for one in systems}):
        same = [one.per_sample for one in systems if one.benchmark == benchmark]
        long = [one for one in same if len(one.gpus) > TWO_COUNTS.known]
        found += _verdicts(f"device-seconds per sample, {benchmark}", long, growth)
    return found


def _judge_whole(
    systems: Sequence[_System], laws: Mapping[str, Mapping[float, Convergence]], words: str
) -> list[PublishedSeries]:
    """Device-seconds until the target: those per sample, evaluation included, times the samples."""
    told = {one.whole.name: one for one in systems if one.whole is not None}
    steps = _grown(
        {name: one.whole for name, one in told.items() if one.whole is not None},
        {name: one.benchmark for name, one in told.items()},
    )
    growth = {
        name: _with_samples(steps[name], one, _law(laws[one.benchmark], one.round))
        for name, one in told.items()
    }
    series = [
        replace(one.whole, step=one.whole.step * one.samples)
        for one in told.values()
        if one.whole is not None
    ]
    return _verdicts(words, series, growth)


def _grown(series: Mapping[str, Series], benchmarks: Mapping[str, str]) -> dict[str, Growth]:
    """Growth of every series; all benchmarks are the prior of one, its systems that of a system."""
    everything = pool([*series.values()], _first_prior())
    priors = {
        benchmark: pool(
            [one for name, one in series.items() if benchmarks[name] == benchmark], everything
        )
        for benchmark in set(benchmarks.values())
    }
    found = {}
    for name, one in series.items():
        prior = priors[benchmarks[name]]
        mean, uncertainty = conditioned(one, prior.mean, prior.uncertainty)
        found[name] = _widened(grow_linearly(one, *_not_negative(mean, uncertainty)), _beyond(one))
    return found


def _beyond(one: Series) -> FloatArray:
    """Uncertainty of batches per device outside of the known ones, as curves have it; log, 90 %."""
    if one.batch is None:
        return np.zeros_like(one.gpus)
    logs = np.log(one.batch)
    known = logs[: TWO_COUNTS.known if len(logs) > TWO_COUNTS.known else ONE_COUNT.known]
    distance = np.maximum(np.maximum(known.min() - logs, logs - known.max()), 0.0)
    return np.asarray(DEVIATE_90 * UNCERTAINTY_AT_ONE_EFOLD * np.sqrt(distance))


def _widened(growth: Growth, more: FloatArray) -> Growth:
    """The interval with another, independent uncertainty; log, 90 %."""
    low, middle, high = growth
    half = np.hypot((high - low) / (2 * middle), more)
    return middle * np.exp(-half), middle, middle * np.exp(half)


def _not_negative(mean: FloatArray, uncertainty: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Coefficients without those that would speed a step up, the others told so."""
    for _ in mean:
        index = int(np.argmin(mean))
        if mean[index] >= 0:
            break
        gain = uncertainty[:, index] / uncertainty[index, index]
        mean = mean - gain * mean[index]
        mean[index] = 0.0
    return np.maximum(mean, 0.0), uncertainty


def _verdicts(
    name: str, series: Iterable[Series], growth: Mapping[str, Growth]
) -> list[PublishedSeries]:
    """By what is known of a system: two counts first, where there are any."""
    chosen: dict[Split, list[Series]] = {TWO_COUNTS: [], ONE_COUNT: []}
    for one in series:
        chosen[TWO_COUNTS if len(one.gpus) > TWO_COUNTS.known else ONE_COUNT].append(one)
    return [
        judge_series(SOURCE, name, split, members, lambda one: growth[one.name])
        for split, members in chosen.items()
        if members
    ]


def pool(series: Sequence[Series], before: Prior) -> Prior:
    """Coefficients of systems of one kind, from the two smallest counts of those that have more.

    Every system has coefficients of its own around common ones. How far they differ is the multiple of the
    deviations known before that makes the steps at the second counts most probable.
    """
    known = [one for one in series if len(one.gpus) > TWO_COUNTS.known]
    if len(known) < _FEWEST:
        return before
    terms = np.stack([growth_terms(one)[1] for one in known])
    grown = np.array([one.step[1] / one.step[0] - 1 for one in known])
    rest = grown - terms @ before.mean
    own = np.diag(_SPREADS**2)
    best = max(
        _DIFFERENCES, key=lambda scale: _log_likelihood(terms, rest, before.uncertainty, scale)
    )
    inverse = np.linalg.inv(_covariance(terms, before.uncertainty, float(best)))
    gain = before.uncertainty @ terms.T @ inverse
    return Prior(
        mean=before.mean + gain @ rest,
        uncertainty=before.uncertainty - gain @ terms @ before.uncertainty + float(best) ** 2 * own,
    )


def _covariance(terms: FloatArray, common: FloatArray, scale: float) -> FloatArray:
    """Of the growth at the second counts: common uncertainty, differences between systems, scatter."""
    own = ((terms * _SPREADS * scale) ** 2).sum(axis=1) + NOISE**2
    return np.asarray(terms @ common @ terms.T + np.diag(own))


def _log_likelihood(terms: FloatArray, rest: FloatArray, common: FloatArray, scale: float) -> float:
    covariance = _covariance(terms, common, scale)
    _, log_determinant = np.linalg.slogdet(covariance)
    return float(-0.5 * (rest @ np.linalg.solve(covariance, rest) + log_determinant))


def _first_prior() -> Prior:
    return Prior(mean=_COEFFICIENTS, uncertainty=np.diag(_SPREADS**2))


def _with_samples(steps: Growth, one: _System, law: Convergence) -> Growth:
    """Growth of the step times that of the samples; their uncertainties are independent, in log."""
    first = one.global_batch[0]
    ratios = [law.samples_ratio(batch, reference=first) for batch in one.global_batch]
    more = np.array([ratio.p50 for ratio in ratios])
    wide = np.array([np.log(ratio.p95 / ratio.p5) / 2 for ratio in ratios])
    tuned = DEVIATE_90 * TUNING_SPREAD * np.sqrt(2)
    low, middle, high = _widened(steps, np.hypot(wide, tuned))
    return low * more, middle * more, high * more


def _laws(folder: Path) -> dict[str, dict[float, Convergence]]:
    """Samples over the batch by benchmark and round, from the reference points where there are any."""
    path = folder / f"{convergence.SOURCE}.csv"
    if not path.is_file():
        return {}
    found: dict[str, dict[float, Convergence]] = defaultdict(dict)
    for (task, round_name), points in convergence.read_points(folder).items():
        kind, _, version = round_name.partition("_")
        if kind == "training" and len(points) > 1:
            found[task][_version(version)] = fit_convergence(points)
    return dict(found)


def _law(laws: Mapping[float, Convergence], round_name: str) -> Convergence:
    """That of the same round, or of the nearest."""
    return laws[min(laws, key=lambda each: abs(each - _version(round_name)))]


def _version(text: str) -> float:
    major, minor, *_ = text.split(".")
    return int(major) + int(minor) / 10


def _read(folder: Path) -> tuple[list[_System], list[str]]:
    """Systems with several counts, and what was left out."""
    groups: dict[tuple[str, ...], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    uncounted = 0
    for row in read_rows(folder / f"{TABLE}.csv", columns=_COLUMNS):
        gpus = number(row, "gpus")
        if gpus is None or number(row, _WHOLE) is None:
            uncounted += 1
            continue
        key = (*(row[name] for name in _SYSTEM), _COUNTS.sub("", row["system"]))
        groups[key][gpus].append(row)
    skipped = [f"{TABLE}: rows that tell no devices or no time: {uncounted}"] if uncounted else []
    found, silent = [], 0
    for key, counts in groups.items():
        if len(counts) < 2:
            continue
        # Of one system's entries with the same count the first stands for all.
        one = _system(key, [counts[count][0] for count in sorted(counts)])
        if one is None:
            silent += 1
        else:
            found.append(one)
    if silent:
        skipped.append(f"{TABLE}: systems that tell neither samples nor a rate: {silent}")
    return found, skipped


def _system(key: tuple[str, ...], rows: Sequence[Row]) -> _System | None:
    """None if nothing says how many samples were trained."""
    named = dict(zip(_SYSTEM, key, strict=False))
    gpus = _column(rows, "gpus")
    batch, samples = _column(rows, "global_batch"), _column(rows, _SAMPLES)
    # Some benchmarks count their only epoch instead of samples.
    is_told = bool(np.isfinite(samples).all() and (samples != 1).all())
    trained_s, whole_s, rate = (_column(rows, name) for name in (_TRAINED, _WHOLE, _RATE))
    if not np.isfinite(trained_s).all():
        trained_s = whole_s
    per_sample = gpus * trained_s / samples if is_told else gpus / rate
    if not np.isfinite(per_sample).all():
        return None
    shown = ("submitter", "benchmark", "round", "division", "hardware", "framework")
    name = ", ".join([key[-1], *(named[each] for each in shown)])

    def series(step: FloatArray) -> Series:
        return Series(
            name=name,
            gpus=gpus,
            per_node=number(named, "gpus_per_node") or gpus[0],
            step=step,
            batch=batch / gpus if np.isfinite(batch).all() else None,
        )

    has_both = is_told and bool(np.isfinite(batch).all())
    return _System(
        benchmark=named["benchmark"],
        round=named["round"],
        per_sample=series(per_sample),
        whole=series(gpus * whole_s / samples) if has_both else None,
        samples=samples,
        global_batch=batch,
    )


def _column(rows: Sequence[Row], name: str) -> FloatArray:
    """Numbers of all rows; NaN where a cell says nothing."""
    values = [number(row, name) for row in rows]
    return np.array([np.nan if value is None else value for value in values])
