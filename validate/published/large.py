"""Protocols for large models: infer from some runs, predict the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from perfmodel.cost.inferred import InferredModel, StepInterval
from perfmodel.cost.latents import SHEETS, step_time_priors
from perfmodel.cost.layout_fit import infer
from perfmodel.documents.published import PublishedSeries
from validate.published.baselines import usl
from validate.published.errors import compare_predictors
from validate.published.large_rows import Runs, foundry_runs, playbook_runs, vtrain_runs

Verdict = tuple[list[PublishedSeries], list[str]]
Index = NDArray[np.int64]

VTRAIN_RUNS: Final = 50
VTRAIN_DRAWS: Final = 10
PLAYBOOK_SHARE: Final = 0.1
PLAYBOOK_DRAWS: Final = 3
_PLAYBOOK_SIGMA: Final = 0.1
"""Playbook runs scatter more: single benchmark runs on a shared cluster."""
_FEWEST: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    known: Runs
    unknown: Runs
    model: InferredModel
    interval: StepInterval


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
    """One node of eight predicts more nodes."""
    runs, bad = foundry_runs(folder)
    first = np.flatnonzero(runs.jobs.devices <= 8)
    second = np.flatnonzero(runs.jobs.devices > 8)
    if min(len(first), len(second)) < _FEWEST:
        return [], [*bad, "llm-foundry: too few runs on one node or on several"]
    judged = _judge(runs, first, second, device="A100")
    return [_series("llm_foundry", "FSDP on A100, 8 devices predict more", [judged])], bad


def judge_playbook(folder: Path) -> Verdict:
    """A tenth of the layouts predicts the others."""
    runs, bad = playbook_runs(folder)
    count = round(PLAYBOOK_SHARE * len(runs))
    if count < _FEWEST:
        return [], [*bad, f"playbook: {len(runs)} runs"]
    splits = [_random_split(len(runs), count, seed) for seed in range(PLAYBOOK_DRAWS)]
    judged = [
        _judge(runs, first, second, device="H100", sigma=_PLAYBOOK_SIGMA)
        for first, second in splits
    ]
    rank, regret = _ranking(judged)
    told = f"rank correlation {rank:.3f}, best layout {regret:.1%} (median) above the fastest"
    series = [
        _series("playbook", f"random 10 % of layouts, {PLAYBOOK_DRAWS} draws; {told}", judged)
    ]
    outside = [_keep(one, ~(_handing_over(one.unknown))) for one in judged]
    series.append(_series("playbook", "the same, no pipeline between nodes", outside))
    return series, bad


def _handing_over(runs: Runs) -> NDArray[np.bool_]:
    return np.asarray(runs.jobs.several_nodes & (runs.jobs.pp > 1))


def _random_split(total: int, count: int, seed: int) -> tuple[Index, Index]:
    order = np.random.default_rng(seed).permutation(total)
    return order[:count], order[count:]


def _judge(runs: Runs, first: Index, second: Index, *, device: str, sigma: float = 0.05) -> _Judged:
    known, unknown = runs.take(first), runs.take(second)
    model = infer(known.jobs, known.step_s, step_time_priors(SHEETS[device]), sigma=sigma)
    return _Judged(known=known, unknown=unknown, model=model, interval=model.predict(unknown.jobs))


def _keep(judged: _Judged, mask: NDArray[np.bool_]) -> _Judged:
    interval = judged.interval
    return _Judged(
        known=judged.known,
        unknown=judged.unknown.take(mask),
        model=judged.model,
        interval=StepInterval(
            median_s=interval.median_s[mask],
            lower_s=interval.lower_s[mask],
            upper_s=interval.upper_s[mask],
        ),
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
        "perfmodel": np.concatenate([one.interval.median_s for one in judged]),
        "one efficiency per device": np.concatenate([_one_efficiency(one) for one in judged]),
        "linear scaling": np.concatenate([_linear(one) for one in judged]),
        "USL": np.concatenate([_usl(one) for one in judged]),
    }
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


def _ranking(judged: list[_Judged]) -> tuple[float, float]:
    """Rank correlation of step times, and how much slower the layout predicted best really is."""
    ranks, regrets = [], []
    for one in judged:
        measured, predicted = one.unknown.step_s, one.interval.median_s
        ranks.append(float(spearmanr(predicted, measured).statistic))
        jobs = one.unknown.jobs
        groups = {(h, d) for h, d in zip(jobs.hidden, jobs.devices, strict=True)}
        for hidden, devices in groups:
            same = np.flatnonzero((jobs.hidden == hidden) & (jobs.devices == devices))
            best = same[np.argmin(predicted[same])]
            regrets.append(float(measured[best] / measured[same].min() - 1))
    return float(np.mean(ranks)), float(np.median(regrets))
