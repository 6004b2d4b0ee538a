"""Book notebooks that were built again and again: one GPU predicts two, from half of the builds.

LeNet keeps its global batch (strong scaling), ResNet-18 its batch per device (weak); both run under
DataParallel or a loop by hand. Builds that print the same numbers count once.
"""

from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.verdicts import PublishedSeries
from validate.published.errors import compare_predictors, judge_alike
from validate.published.rows import number, read_rows

SOURCE: Final = "notebooks"
DRAWS: Final = 10
_COLUMNS: Final = ("source", "path", "commit", "date", "model", "gpus", "step_time_s")
_FEWEST: Final = 10


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Verdict per model on the builds that were left out."""
    series: list[PublishedSeries] = []
    skipped = []
    for model, pairs in _read(folder).items():
        if len(pairs) < _FEWEST:
            skipped.append(f"{model}: {len(pairs)} builds with one and two GPUs")
        else:
            steps = np.array(sorted(pairs))
            series += filter(None, [_judge_one(model, steps), judge_repeats(model, steps)])
    return series, skipped


def predict_second(known: FloatArray, single_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Steps on two GPUs [s] from those on one, and the half-width of the 90 % interval of their log.

    Parameters
    ----------
    known
        Steps on one and on two GPUs of the same build, shape ``(num_builds, 2)``. [s]
    single_s
        Steps on one GPU of other builds. [s]
    """
    ratio = np.log(known[:, 1] / known[:, 0])
    middle = np.median(ratio)
    rank = min(1.0, 0.9 * (1 + 1 / len(ratio)))
    half = np.quantile(np.abs(ratio - middle), rank)
    return single_s * np.exp(middle), np.full(len(single_s), half)


def _read(folder: Path) -> dict[str, set[tuple[float, float]]]:
    builds: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
    for row in read_rows(folder / "throughput.csv", columns=_COLUMNS):
        gpus, step_s = number(row, "gpus"), number(row, "step_time_s")
        if "d2l-ai" in row["source"] and gpus and step_s:
            key = (row["model"], *(row[n] for n in ("source", "path", "commit", "date")))
            builds[key][gpus] = step_s
    pairs: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for (model, *_), steps in builds.items():
        if 1.0 in steps and 2.0 in steps:
            pairs[model].add((steps[1.0], steps[2.0]))
    return pairs


def _judge_one(model: str, pairs: FloatArray) -> PublishedSeries:
    measured, ours, single, covered = [], [], [], []
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(len(pairs))
        known, unknown = pairs[order[: len(pairs) // 2]], pairs[order[len(pairs) // 2 :]]
        predicted, half = predict_second(known, unknown[:, 0])
        measured.append(unknown[:, 1])
        ours.append(predicted)
        single.append(unknown[:, 0])
        covered.append(np.abs(np.log(unknown[:, 1] / predicted)) <= half)
    return PublishedSeries(
        source=SOURCE,
        name=f"D2L {model}, 2 GPUs, {DRAWS} draws together",
        fitted="both counts of half of the builds, one GPU of the others",
        predicted="two GPUs of the others",
        num_fitted=len(pairs) // 2,
        num_predicted=sum(len(one) for one in measured),
        errors=compare_predictors(
            np.concatenate(measured),
            {
                "perfmodel": np.concatenate(ours),
                "as long as on one": np.concatenate(single),
            },
            covered=np.concatenate(covered).astype(float),
        ),
    )


def judge_repeats(model: str, pairs: FloatArray) -> PublishedSeries | None:
    """How far builds are apart on two GPUs that print the same step on one: the others predict each."""
    groups = [pairs[pairs[:, 0] == single, 1] for single in np.unique(pairs[:, 0])]
    alike = [group for group in groups if len(group) > 1]
    if sum(map(len, alike)) < _FEWEST:
        return None
    return judge_alike(
        alike,
        source=SOURCE,
        name=f"scatter: builds of D2L {model} that print the same step on one GPU",
        fitted="the other builds with that step",
        predicted="two GPUs of each",
        method="builds of the same step",
    )
