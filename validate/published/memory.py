"""Protocol for memory: infer the factors on half of a source, predict the other half."""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from perfmodel.arrays import BoolArray, FloatArray
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.layout_fit import infer_memory
from perfmodel.cost.layout_memory import InferredMemory
from perfmodel.documents.verdicts import PublishedSeries
from validate.published.errors import compare_predictors, judge_alike
from validate.published.large_rows import Runs, memory_runs, playbook_runs, starves_a_stage

SOURCE: Final = "memory"
DRAWS: Final = 3
_FEWEST: Final = 20
_BYTES_PER_PARAMETER: Final = 18.0
"""Of the plain baseline: 16-bit weights, 32-bit gradients, Adam; nothing else, nothing sharded."""


def judge(folder: Path) -> tuple[list[PublishedSeries], list[str]]:
    """Half of the playbook's peaks predicts the other half, and ranks what failed above what ran."""
    runs, bad = memory_runs(folder)
    if len(runs) < _FEWEST:
        return [], [*bad, f"memory: {len(runs)} rows"]
    failed = playbook_runs(folder, failed=True)[0].jobs if _has_failures(folder) else None
    peaks, predicted, plain, covered, areas = [], [], [], [], []
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(len(runs))
        known, unknown = runs.take(order[: len(runs) // 2]), runs.take(order[len(runs) // 2 :])
        model = infer_memory(known.jobs, known.memory_bytes)
        peak, half = model.predict(unknown.jobs)
        peaks.append(unknown.memory_bytes)
        predicted.append(peak)
        plain.append(_BYTES_PER_PARAMETER * unknown.jobs.stage_parameters)
        covered.append(np.abs(np.log(unknown.memory_bytes / peak)) <= half)
        if failed is not None:
            ran, scores = (_demand(model, jobs) for jobs in (unknown.jobs, failed))
            certain = ~_smaller_than_one_that_ran(failed, runs.jobs)
            areas.append((area_under_curve(ran, scores), area_under_curve(ran, scores[certain])))
    scatter = judge_repeats(runs)
    told = ""
    if areas:
        every, some = np.mean(areas, axis=0)
        told = f"; failed rows: AUC {every:.3f}, {some:.3f} without those smaller than one that ran"
    return [
        PublishedSeries(
            source=SOURCE,
            name=f"playbook, random half, {DRAWS} draws together{told}",
            fitted="half of the rows",
            predicted="the other half",
            num_fitted=len(runs) // 2,
            num_predicted=sum(len(one) for one in peaks),
            errors=compare_predictors(
                np.concatenate(peaks),
                {
                    "perfmodel": np.concatenate(predicted),
                    "18 bytes per parameter": np.concatenate(plain),
                },
                covered=np.concatenate(covered).astype(float),
            ),
        ),
        *filter(None, [scatter]),
    ], bad


def judge_repeats(runs: Runs) -> PublishedSeries | None:
    """How far peaks are apart that must be the same: all others of a group predict each of its runs."""
    groups = same_tensors(runs.jobs)
    if len(groups) < _FEWEST:
        return None
    return judge_alike(
        [runs.memory_bytes[group] for group in groups],
        source=SOURCE,
        name=f"scatter: {len(groups)} groups of runs that hold the same tensors",
        fitted="the other runs of a group",
        predicted="each run",
        method="runs of the same tensors",
    )


def same_tensors(jobs: Jobs) -> list[NDArray[np.int64]]:
    """Positions of runs whose ranks hold the same tensors, where there are several.

    Nothing is sharded over replicas, and enough micro-batches fill the pipeline and sum gradients.
    """
    full = (jobs.zero == 0) & (jobs.accumulation >= np.maximum(jobs.pp, 2))
    names = ("layers", "hidden", "tp", "pp", "micro_batch")
    rows = np.stack([getattr(jobs, name) for name in names], axis=1)
    found = np.flatnonzero(full)
    _, group = np.unique(rows[found], axis=0, return_inverse=True)
    members = [found[group == one] for one in range(int(group.max(initial=-1)) + 1)]
    return [each for each in members if len(each) > 1]


def _demand(model: InferredMemory, jobs: Jobs) -> FloatArray:
    """What ranks jobs by their chance to fail: the fullest rank, or a stage left without work. [B]"""
    return np.where(starves_a_stage(jobs), np.inf, model.fullest_bytes(jobs))


def area_under_curve(fit: FloatArray, failed: FloatArray) -> float:
    """Probability that a failed row scores above one that ran (Mann-Whitney)."""
    ranks = rankdata(np.concatenate([fit, failed]))[len(fit) :]
    count = len(failed)
    return float((ranks.sum() - count * (count + 1) / 2) / (len(fit) * count))


def _has_failures(folder: Path) -> bool:
    return (folder / "throughput.csv").is_file()


def _smaller_than_one_that_ran(failed: Jobs, ran: Jobs) -> BoolArray:
    """Failures that memory cannot explain: the same stages with as much or more of everything ran."""

    def pairs(name: str) -> tuple[FloatArray, FloatArray]:
        return getattr(failed, name)[:, None], getattr(ran, name)[None, :]

    result = np.ones((len(failed), len(ran)), dtype=bool)
    for name in ("hidden", "tp", "pp"):
        here, there = pairs(name)
        result &= here == there
    here, there = pairs("micro_batch")
    result &= there >= here
    zero_here, zero_there = pairs("zero")
    dp_here, dp_there = pairs("dp")
    # Without sharding the replicas do not matter; with it more replicas hold less each.
    result &= (zero_there == 0) | ((zero_here >= zero_there) & (dp_here >= dp_there))
    here, there = pairs("accumulation")
    stages = failed.pp[:, None]
    result &= np.minimum(there, stages) >= np.minimum(here, stages)
    return np.asarray(result.any(axis=1))
