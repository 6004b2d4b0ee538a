"""Protocols for large models: infer from some runs, predict the others."""

from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from perfmodel.cost.inferred import InferredModel, StepInterval
from perfmodel.cost.jobs import Jobs
from perfmodel.cost.layout_fit import MINIMUM_RUNS, infer
from perfmodel.cost.parameters import SHEETS, step_time_priors
from perfmodel.documents.verdicts import PublishedSeries
from validate.published.baselines import usl
from validate.published.errors import compare_predictors
from validate.published.large_rows import (
    Runs,
    foundry_runs,
    mlperf_runs,
    playbook_runs,
    vtrain_runs,
)

Verdict = tuple[list[PublishedSeries], list[str]]
Index = NDArray[np.int64]

VTRAIN_RUNS: Final = 50
VTRAIN_DRAWS: Final = 10
PLAYBOOK_SHARE: Final = 0.1
PLAYBOOK_DRAWS: Final = 5
_PLAYBOOK_SIGMA: Final = 0.1
"""Playbook runs scatter more: single benchmark runs on a shared cluster."""
_FEWEST: Final = 10
_INTERLEAVES: Final = {1: "one stage per device", 12: "one layer per stage"}
"""Stages per device of a pipeline of 8 that holds 96 layers."""
_UNLIKELY: Final = 0.1
"""Odds of a stall that somebody who asks for one number may neglect."""
_CANDIDATES: Final = 3
"""Layouts that somebody would try before a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    known: Runs
    unknown: Runs
    model: InferredModel
    interval: StepInterval
    quiet: StepInterval
    """The same if nothing stalls."""


def judge_vtrain(folder: Path) -> Verdict:
    """50 random runs predict the rest, ten times; two replicas predict eight."""
    runs, bad = vtrain_runs(folder)
    if len(runs) < VTRAIN_RUNS + _FEWEST:
        return [], [*bad, f"vtrain: {len(runs)} runs"]
    splits = [_random_split(len(runs), VTRAIN_RUNS, seed) for seed in range(VTRAIN_DRAWS)]
    judged = [_judge(runs, first, second, device="A100") for first, second in splits]
    series = [
        _series("vtrain", f"{VTRAIN_RUNS} random runs, {VTRAIN_DRAWS} draws together", judged)
    ]
    plain = (runs.jobs.tp == 1) & (runs.jobs.pp == 1)
    first = np.flatnonzero(plain & (runs.jobs.dp == 2))
    second = np.flatnonzero(plain & (runs.jobs.dp == 8))
    if min(len(first), len(second)) < _FEWEST:
        return series, [*bad, "vtrain: data parallelism alone"]
    alone = _judge(runs, first, second, device="A100")
    return [*series, _series("vtrain", "data parallelism alone, dp=2 predicts dp=8", [alone])], bad


def judge_foundry(folder: Path) -> Verdict:
    """One node of eight predicts more nodes, for every device with a data sheet, 8 and 16 bit apart."""
    series, skipped = [], []
    for device, eight_bit in product(SHEETS, (False, True)):
        runs, bad = foundry_runs(folder, device, eight_bit=eight_bit)
        name = f"{device}, 8 bit" if eight_bit else device
        first = np.flatnonzero(runs.jobs.devices <= 8)
        second = np.flatnonzero(runs.jobs.devices > 8)
        skipped += bad
        if min(len(first), len(second)) >= _FEWEST:
            judged = _judge(runs, first, second, device=device)
            series.append(
                _series("llm_foundry", f"FSDP on {name}, 8 devices predict more", [judged])
            )
        elif len(runs):
            skipped.append(
                f"llm-foundry on {name}: {len(first)} runs on one node, {len(second)} on several"
            )
    return series, skipped


def judge_mlperf(folder: Path) -> Verdict:
    """The smaller half of the device counts of GPT-3 predicts the larger, by layout.

    How stages interleave is not told: once as if they did not, once layer by layer, which brackets it.
    """
    series, skipped = [], []
    for interleave, meaning in _INTERLEAVES.items():
        runs, bad = mlperf_runs(folder, interleave=interleave)
        counts = np.unique(runs.jobs.devices)
        smaller = np.isin(runs.jobs.devices, counts[: len(counts) // 2])
        first, second = np.flatnonzero(smaller), np.flatnonzero(~smaller)
        if len(first) < MINIMUM_RUNS or not len(second):
            return [], [*bad, f"mlperf layouts: {len(runs)} submissions with a layout"]
        skipped = bad
        judged = _judge(runs, first, second, device="H100")
        many = f"{counts[len(counts) // 2 - 1]:.0f} devices and fewer predict {counts[-1]:.0f}"
        series.append(_series("mlperf_layouts", f"GPT-3 175B, {many}, {meaning}", [judged]))
    return series, skipped


def judge_playbook(folder: Path) -> Verdict:
    """A tenth of the layouts predicts the others: all, those unlikely to stall, those not disturbed.

    How likely a stall is follows from the layout alone, before anything of it is measured. A run counts as
    disturbed if it is nearer to the stalled than to the quiet prediction; the stall is that of the
    calibration, but which run is left out depends on its measured step.
    """
    runs, bad = playbook_runs(folder)
    count = round(PLAYBOOK_SHARE * len(runs))
    if count < _FEWEST:
        return [], [*bad, f"playbook: {len(runs)} runs"]
    splits = [_random_split(len(runs), count, seed) for seed in range(PLAYBOOK_DRAWS)]
    judged = [
        _judge(runs, first, second, device="H100", sigma=_PLAYBOOK_SIGMA)
        for first, second in splits
    ]
    quiet, safe = [_undisturbed(one) for one in judged], [_unlikely(one) for one in judged]
    total = sum(len(one.unknown) for one in judged)
    disturbed = 1 - sum(len(one.unknown) for one in quiet) / total
    likely = 1 - sum(len(one.unknown) for one in safe) / total
    return [
        _series(
            "playbook", f"random 10 % of layouts, {PLAYBOOK_DRAWS} draws; {_told(judged)}", judged
        ),
        _series(
            "playbook",
            f"the same without the {likely:.0%} whose odds of a stall are {_UNLIKELY:.0%} and more",
            safe,
        ),
        _series(
            "playbook", f"the same without the {disturbed:.0%} disturbed; {_told(quiet)}", quiet
        ),
        *filter(None, [judge_twins(runs)]),
    ], bad


def _told(judged: list[_Judged]) -> str:
    rank, first, three = _ranking(judged)
    return (
        f"rank correlation {rank:.3f}; above the fastest, median (mean): layout ranked first "
        f"{np.median(first):.1%} ({np.mean(first):.1%}), best of the first {_CANDIDATES} "
        f"{np.median(three):.1%} ({np.mean(three):.1%})"
    )


def judge_twins(runs: Runs) -> PublishedSeries | None:
    """How far runs of nearly one layout are apart: the same but for ZeRO 0 or 1, or in nothing.

    What one of them measured predicts the other. No law of layouts alone comes much nearer.
    """
    first, second = twins(runs.jobs)
    if len(first) < _FEWEST:
        return None
    measured = runs.step_s[np.concatenate([first, second])]
    other = runs.step_s[np.concatenate([second, first])]
    return PublishedSeries(
        source="playbook",
        name=f"scatter: {len(first)} pairs of runs of one layout but for ZeRO 0 or 1",
        fitted="one run of a pair",
        predicted="the other",
        num_fitted=len(first),
        num_predicted=len(measured),
        errors=compare_predictors(measured, {"its measured twin": other}, covered=None),
    )


def twins(jobs: Jobs) -> tuple[Index, Index]:
    """Positions of the runs of pairs that agree in everything but how the optimizer is sharded."""
    names = [field.name for field in fields(Jobs) if field.name != "zero"]
    rows = np.stack([getattr(jobs, name) for name in names], axis=1)
    _, group = np.unique(rows, axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    same = group[order[:-1]] == group[order[1:]]
    return order[:-1][same], order[1:][same]


def _random_split(total: int, count: int, seed: int) -> tuple[Index, Index]:
    order = np.random.default_rng(seed).permutation(total)
    return order[:count], order[count:]


def _judge(runs: Runs, first: Index, second: Index, *, device: str, sigma: float = 0.05) -> _Judged:
    known, unknown = runs.take(first), runs.take(second)
    model = infer(known.jobs, known.step_s, step_time_priors(SHEETS[device]), sigma=sigma)
    return _Judged(
        known=known,
        unknown=unknown,
        model=model,
        interval=model.predict(unknown.jobs),
        quiet=model.predict(unknown.jobs, stalls=False),
    )


def _undisturbed(judged: _Judged) -> _Judged:
    unknown = judged.unknown
    mask = ~judged.model.looks_disturbed(unknown.jobs, unknown.step_s)
    kept = unknown.take(mask)
    quiet = judged.model.predict(kept.jobs, stalls=False)
    return replace(judged, unknown=kept, interval=quiet, quiet=quiet)


def _unlikely(judged: _Judged) -> _Judged:
    chance = judged.model.uncertainty(judged.unknown.jobs).stall_probability
    kept = judged.unknown.take(chance < _UNLIKELY)
    return replace(
        judged,
        unknown=kept,
        interval=judged.model.predict(kept.jobs),
        quiet=judged.model.predict(kept.jobs, stalls=False),
    )


def _series(source: str, name: str, judged: list[_Judged]) -> PublishedSeries:
    measured = np.concatenate([one.unknown.step_s for one in judged])
    covered = np.concatenate(
        [
            (one.interval.lower_s <= one.unknown.step_s)
            & (one.unknown.step_s <= one.interval.upper_s)
            for one in judged
        ]
    )
    predicted = {
        "perfmodel": np.concatenate([one.interval.number_s for one in judged]),
        "one efficiency per device": np.concatenate([_one_efficiency(one) for one in judged]),
        "linear scaling": np.concatenate([_linear(one) for one in judged]),
        "USL": np.concatenate([_usl(one) for one in judged]),
    }
    quiet = np.concatenate([one.quiet.number_s for one in judged])
    if (quiet != predicted["perfmodel"]).any():
        predicted["perfmodel, if nothing stalls"] = quiet
    return PublishedSeries(
        source=source,
        name=name,
        fitted="runs of the calibration",
        predicted="all other runs",
        num_fitted=len(judged[0].known),
        num_predicted=len(measured),
        errors=compare_predictors(measured, predicted, covered=covered.astype(float)),
    )


def _work(runs: Runs) -> NDArray[np.float64]:
    """FLOP per device and step."""
    return np.asarray(runs.jobs.model_flop / runs.jobs.devices)


def _one_efficiency(judged: _Judged) -> NDArray[np.float64]:
    """Every device does the same FLOP per second: the median of the calibration."""
    speed = float(np.median(_work(judged.known) / judged.known.step_s))
    return _work(judged.unknown) / speed


def _linear(judged: _Judged) -> NDArray[np.float64]:
    """As many FLOP per second and device as the calibrated run with the nearest work per device."""
    known = _work(judged.known) / judged.known.step_s
    distance = np.abs(np.subtract.outer(np.log(_work(judged.unknown)), np.log(_work(judged.known))))
    return np.asarray(_work(judged.unknown) / known[np.argmin(distance, axis=1)])


def _usl(judged: _Judged) -> NDArray[np.float64]:
    """Scalability law over devices, on the time per FLOP of one device."""
    known, unknown = judged.known, judged.unknown
    ones = np.ones(len(known))
    slow = usl(
        ones,
        known.jobs.devices,
        known.step_s / _work(known),
        (np.ones(len(unknown)), unknown.jobs.devices),
    )
    return np.asarray(slow * _work(unknown))


def _ranking(judged: list[_Judged]) -> tuple[float, list[float], list[float]]:
    """Rank correlation of step times; how much slower the layouts predicted best really are.

    For each model and size of each draw: the layout ranked first, and the best of those that a user tries.
    """
    ranks, first, tried = [], [], []
    for one in judged:
        measured, predicted = one.unknown.step_s, one.interval.mean_s
        ranks.append(float(spearmanr(predicted, measured).statistic))
        jobs = one.unknown.jobs
        groups = {(h, d) for h, d in zip(jobs.hidden, jobs.devices, strict=True)}
        for hidden, devices in groups:
            same = np.flatnonzero((jobs.hidden == hidden) & (jobs.devices == devices))
            best = measured[same[np.argsort(predicted[same])]][:_CANDIDATES]
            fastest = measured[same].min()
            first.append(float(best[0] / fastest - 1))
            tried.append(float(best.min() / fastest - 1))
    return float(np.mean(ranks)), first, tried
