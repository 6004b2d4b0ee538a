"""Fitted parameters of large-model steps, inferred from the end-to-end step times of runs.

Penalised least squares in log step time: every parameter is drawn to its prior as strongly as the prior
is sure, every run pulls with a heavy-tailed loss so that single odd runs do not bend the fit. Uncertainty:
the curvature at the fit gives draws of the fitted parameters, what remains is a Gaussian process over layouts,
and leaving runs out tells how wide 90 % is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from scipy.optimize import least_squares, minimize
from scipy.special import expit

from perfmodel.cost.jobs import (
    USUAL,
    Column,
    Discrepancy,
    Jobs,
    Prior,
    condition,
    covariance,
    priors_of,
    stall_features,
    stall_probability,
    stall_time_s,
)
from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.memory import LayoutMemory, rank_parts
from perfmodel.errors import NotFeasible
from perfmodel.machine import (
    UNKNOWN_NETWORK,
    DegradedState,
    DeviationSpreads,
    FittedParameter,
    InferredMachine,
    PeakMemory,
)
from perfmodel.statistics import DEVIATE_90
from perfmodel.units import GIB

MINIMUM_RUNS: Final = 3
NUM_DRAWS: Final = 64
_LOG_SIGMA: Final = 0.05
"""Scatter of runs around the formula, log; beyond it a run counts less and less."""
_ROUNDS: Final = 4
_FOLDS: Final = 5
_STALL: Final = "stall_s"
_STALL_PRIOR: Final = Prior(
    median=0.1, log_sigma=1.5, meaning="disturbed runs: stall per P2P send between nodes and batch"
)
KNOWN_BELOW: Final = 0.7
"""A parameter counts as determined if the runs narrowed its prior at least to this share."""
#: Standard deviations that the deviations may have, in log step time: (lowest, first guess, highest).
_SPREAD_BOUNDS: Final = ((1e-3, 0.03, 0.3), (1e-3, 0.03, 0.5), (3e-3, 0.02, 0.5))
_LENGTH_BOUNDS: Final = (0.7, 1.5, 4.0)
_WEIGHT_SIGMA: Final = 0.7
"""Prior width of the logistic weights: one doubling hardly decides alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    fitted: dict[str, float]
    covariance: NDArray[np.float64]
    """Of the standardised logarithms of the fitted parameters."""
    disturbed: Column
    """Probability of each run to have been disturbed."""


def infer(
    jobs: Jobs,
    step_s: Column,
    priors: Mapping[str, Prior],
    *,
    device_name: str = "",
    seed: int = 0,
    sigma: float = _LOG_SIGMA,
) -> InferredMachine:
    """Machine behind measured step times of shape ``(num_jobs,)`` in seconds.

        least of  sum over runs of 4 log(1 + r_i^2 / 4) + sum over parameters of z_k^2
        r_i = (log T_i(p) - log t_i) / sigma,  log p_k = log prior_k + width_k z_k

    ``priors`` are those of ``step_time_priors``; ``sigma`` is the expected scatter around the formula
    in log. Raises ``NotFeasible`` if there are too few runs, or a step time is not positive.
    """
    if len(jobs) < MINIMUM_RUNS:
        raise NotFeasible(f"runs: at least {MINIMUM_RUNS} are needed to calibrate, got {len(jobs)}")
    bad = np.flatnonzero(~(np.isfinite(step_s) & (step_s > 0)))
    if bad.size:
        raise NotFeasible(
            f"runs: row {bad[0] + 1}: step time must be finite and > 0, got {step_s[bad[0]]}"
        )
    node = priors.get("node_bytes_per_s")
    if node is not None and not jobs.several_nodes.any():
        # Runs inside nodes say nothing of what joins them.
        priors = {**priors, "node_bytes_per_s": replace(node, log_sigma=UNKNOWN_NETWORK)}
    fit = _normal_or_disturbed(jobs, step_s, priors, sigma)
    deviation = _deviation(jobs, step_s, fit)
    trust = trust_in(deviation, sigma)
    spreads = fit_spreads(jobs, deviation, trust)
    draws = _draws(list(priors), priors, fit, seed)
    moved = np.sqrt(np.minimum(np.diag(fit.covariance), 1.0))
    return InferredMachine(
        device_name=device_name,
        num_runs=len(jobs),
        runs=run_columns(jobs),
        step_s=tuple(map(float, step_s)),
        fitted_parameters=tuple(
            FittedParameter(
                name=name,
                value=float(draws[name][0]),
                log_sigma=prior.log_sigma * float(moved[index]),
                prior=prior.median,
                prior_log_sigma=prior.log_sigma,
                determined=bool(moved[index] < KNOWN_BELOW),
                meaning=prior.meaning,
                draws=tuple(map(float, draws[name])),
            )
            for index, (name, prior) in enumerate(priors.items())
        ),
        deviations=tuple(map(float, deviation)),
        trust=tuple(map(float, trust)),
        spreads=spreads,
        degraded=_degraded(jobs, fit) if _STALL in fit.fitted else None,
        interval_widening=_widening(jobs, step_s, priors, (fit, spreads), sigma=sigma, seed=seed),
    )


def run_columns(runs: Jobs) -> dict[str, tuple[float, ...]]:
    """Columns of runs for a file; what is as usual in all of them is left out."""
    columns = {field.name: getattr(runs, field.name) for field in fields(runs)}
    return {
        name: tuple(map(float, values))
        for name, values in columns.items()
        if name not in USUAL or (values != USUAL[name]).any()
    }


def _normal_or_disturbed(
    jobs: Jobs, step_s: Column, priors: Mapping[str, Prior], sigma: float
) -> _Fit:
    """Fit with and without a disturbed state; the state stays only if several runs show it."""
    nobody = np.zeros(len(jobs))
    candidates = jobs.several_nodes
    normal = _penalised(jobs, step_s, priors, nobody, sigma)
    if candidates.sum() < MINIMUM_RUNS:
        return normal
    both = {**priors, _STALL: _STALL_PRIOR}
    excess = np.log(step_s) - np.log(step_time_s(jobs, normal.fitted))
    chance = np.where(candidates & (excess > np.log(1.5)), 0.9, 0.0)
    fit = normal
    for _ in range(_ROUNDS):
        if chance.sum() < MINIMUM_RUNS:
            return normal
        fit = _penalised(jobs, step_s, both, chance, sigma)
        chance = _responsibility(jobs, step_s, fit, sigma)
    return fit


def _responsibility(jobs: Jobs, step_s: Column, fit: _Fit, sigma: float) -> Column:
    """Probability of every run to have been disturbed, given the fit (Cauchy scatter)."""
    normal = step_time_s(jobs, fit.fitted)
    stall = stall_time_s(jobs, fit.fitted[_STALL])
    share = np.clip(stall_probability(np.array(_degraded(jobs, fit).weights), jobs), 0.02, 0.98)
    # Runs scatter more around a guess of the state than around a known one.
    width = 2 * sigma
    likely = [
        1 / (1 + ((np.log(step_s) - np.log(time)) / width) ** 2)
        for time in (normal, normal + stall)
    ]
    weight = share * likely[1] / (share * likely[1] + (1 - share) * likely[0])
    # A stall that hardly lengthens the step cannot be told from scatter.
    visible = np.log1p(stall / normal) > 2 * sigma
    return np.where(jobs.several_nodes & visible, weight, 0.0)


def _penalised(
    jobs: Jobs, step_s: Column, priors: Mapping[str, Prior], disturbed: Column, sigma: float
) -> _Fit:
    names = list(priors)
    centre = np.log([prior.median for prior in priors.values()])
    width = np.array([prior.log_sigma for prior in priors.values()])
    log_step = np.log(step_s)

    def fitted(z: Column) -> dict[str, float]:
        values = np.exp(centre + np.clip(z, -6, 6) * width)
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def residuals(z: Column) -> Column:
        now = fitted(z)
        normal = step_time_s(jobs, now)
        late = normal + stall_time_s(jobs, now.get(_STALL, 0.0))
        scatter = [
            np.sqrt(share) * heavy_tailed((np.log(time) - log_step) / sigma)
            for share, time in ((1 - disturbed, normal), (disturbed, late))
        ]
        return np.concatenate([*scatter, z])

    found = least_squares(residuals, np.zeros(len(names)), max_nfev=60)
    jacobian = np.asarray(found.jac, dtype=float)
    return _Fit(
        fitted=fitted(found.x),
        covariance=np.asarray(linalg.inv(jacobian.T @ jacobian), dtype=float),
        disturbed=disturbed,
    )


def heavy_tailed(z: Column) -> Column:
    """Signed root of the Student-like loss 4 log(1 + z^2 / 4): a square near 0, flat far away."""
    return np.asarray(np.sign(z) * np.sqrt(4 * np.log1p(z**2 / 4)))


def _draws(
    names: list[str], priors: Mapping[str, Prior], fit: _Fit, seed: int
) -> dict[str, Column]:
    """Draws of the fitted parameters from the curvature at the fit; the first is the fit."""
    generator = np.random.default_rng(seed)
    count = len(names)
    cov = fit.covariance[:count, :count]
    normal = generator.multivariate_normal(np.zeros(count), cov, size=NUM_DRAWS, method="eigh")
    normal[0] = 0
    return {
        name: fit.fitted[name] * np.exp(normal[:, index] * priors[name].log_sigma)
        for index, name in enumerate(names)
    }


def fit_odds(jobs: Jobs, disturbed: Column) -> Column:
    """Logistic weights that explain how likely each job was disturbed, drawn towards 0."""
    features = stall_features(jobs)

    def loss(weights: Column) -> tuple[float, Column]:
        score = features @ weights
        pull = np.concatenate([[0.0], weights[1:] / _WEIGHT_SIGMA**2])
        total = np.logaddexp(0, score).sum() - disturbed @ score + pull @ weights / 2
        return float(total), features.T @ (expit(score) - disturbed) + pull

    return np.asarray(minimize(loss, np.zeros(features.shape[1]), jac=True, method="BFGS").x)


def _degraded(jobs: Jobs, fit: _Fit) -> DegradedState:
    candidates = jobs.several_nodes
    weights = fit_odds(jobs.take(candidates), fit.disturbed[candidates])
    return DegradedState(stall_s=fit.fitted[_STALL], weights=tuple(map(float, weights)))


def _deviation(jobs: Jobs, step_s: Column, fit: _Fit) -> Column:
    """Log of measured over computed step time, in the state that each run most probably was in."""
    normal = step_time_s(jobs, fit.fitted)
    late = normal + stall_time_s(jobs, fit.fitted.get(_STALL, 0.0))
    return np.asarray(np.log(step_s) - np.log(np.where(fit.disturbed > 0.5, late, normal)))


def trust_in(deviation: Column, sigma: float) -> Column:
    """How far a run is believed, in (0, 1]: odd runs tell little about their neighbours."""
    scale = max(1.4826 * float(np.median(np.abs(deviation))), 0.2 * sigma)
    return 1 / (1 + (deviation / (3 * scale)) ** 2)


def _widening(
    jobs: Jobs,
    step_s: Column,
    priors: Mapping[str, Prior],
    found: tuple[_Fit, DeviationSpreads],
    *,
    sigma: float,
    seed: int,
) -> float:
    """Factor that makes 90 % intervals hold 90 % of runs that the fit has not seen.

    Every fold is predicted by a fit of the others (conformal prediction).
    """
    fit, spreads = found
    folds = np.random.default_rng(seed).permutation(len(jobs)) % min(_FOLDS, len(jobs))
    known = {**priors, _STALL: _STALL_PRIOR} if _STALL in fit.fitted else priors
    scores: list[float] = []
    for fold in range(int(folds.max()) + 1):
        rest, left = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        seen, unseen = jobs.take(rest), jobs.take(left)
        part = _penalised(seen, step_s[rest], known, fit.disturbed[rest], sigma)
        deviation = _deviation(seen, step_s[rest], part)
        shift, variance = condition(seen, deviation, trust_in(deviation, sigma), spreads).at(unseen)
        drawn = _draws(list(priors), priors, part, seed)
        logs = np.log(step_time_s(unseen, {name: v[:, None] for name, v in drawn.items()}))
        state = replace(part, disturbed=fit.disturbed[left])
        error = _deviation(unseen, step_s[left], state) - shift
        scores.extend(np.abs(error) / np.sqrt(variance + logs.var(axis=0)))
    return widening_of(scores, least=0.3)


def widening_of(scores: Sequence[float] | Column, *, least: float) -> float:
    """Finite-sample 90 % quantile of left-out errors over that of a normal distribution.

    ``scores`` are absolute errors in units of their predicted spread; ``least`` is the smallest factor
    that is believed, at most 1.
    """
    rank = 0.9 * (1 + 1 / len(scores))
    # Of fewer than nine runs no 90 % quantile can be told: they may widen, but not narrow.
    lowest = 1.0 if rank > 1 else least
    return float(np.clip(np.quantile(scores, min(1.0, rank)) / DEVIATE_90, lowest, 5.0))


def fit_spreads(jobs: Jobs, deviation: Column, trust: Column) -> DeviationSpreads:
    """Most probable spreads of deviations in log, each with a trust in (0, 1]."""
    bounds = [*_SPREAD_BOUNDS, _LENGTH_BOUNDS]

    def spreads(x: Column) -> DeviationSpreads:
        shape, layout, noise, length = np.exp(x)
        return DeviationSpreads(
            shape=float(shape), layout=float(layout), noise=float(noise), length=float(length)
        )

    def loss(x: Column) -> float:
        now = spreads(x)
        own = covariance(jobs, jobs, now) + np.diag(now.noise**2 / trust)
        factor = linalg.cho_factor(own, lower=True)
        fit = deviation @ linalg.cho_solve(factor, deviation)
        # A weak pull to the first guesses decides what few runs cannot.
        pull = sum(
            ((value - np.log(bound[1])) / 1.5) ** 2 for value, bound in zip(x, bounds, strict=True)
        )
        return float(fit / 2 + np.log(np.diag(factor[0])).sum() + pull / 2)

    found = minimize(
        loss,
        np.log([bound[1] for bound in bounds]),
        method="L-BFGS-B",
        bounds=[(np.log(low), np.log(high)) for low, _, high in bounds],
        options={"maxiter": 40},
    )
    return spreads(found.x)


#: Factor on every part, and the bytes of the framework itself.
MEMORY_PRIORS: Final[Mapping[str, Prior]] = MappingProxyType(
    priors_of(
        ("parameters", 1.0, 0.3, "16-bit parameters"),
        ("gradients", 1.0, 0.3, "32-bit gradients"),
        ("optimizer", 1.0, 0.3, "optimizer states"),
        ("activations", 1.0, 0.5, "what layers keep for backward"),
        ("logits", 1.0, 0.5, "output head and loss"),
        ("undivided", 2.0, 1.0, "whole tensors per micro-batch in flight"),
        ("head", 10.0, 1.0, "whole tensors around the output head"),
        ("context", 0.5 * GIB, 1.0, "framework and libraries [B]"),
    )
)


def infer_memory(jobs: Jobs, peak_bytes: Column) -> LayoutMemory:
    """Factors behind printed peaks of rank 0, shape ``(num_jobs,)`` in bytes.

    Raises ``NotFeasible`` if there are too few runs, or a peak is not positive.
    """
    if len(jobs) < MINIMUM_RUNS or not (np.isfinite(peak_bytes) & (peak_bytes > 0)).all():
        raise NotFeasible(
            f"memory: at least {MINIMUM_RUNS} runs with a peak > 0 are needed, got {len(jobs)}"
        )
    centre = np.log([prior.median for prior in MEMORY_PRIORS.values()])
    width = np.array([prior.log_sigma for prior in MEMORY_PRIORS.values()])
    parts = np.stack([rank_parts(jobs)[name] for name in MEMORY_PRIORS])

    def residuals(z: Column) -> Column:
        peak = np.exp(centre + z * width) @ parts
        return np.concatenate([heavy_tailed(np.log(peak / peak_bytes) / _LOG_SIGMA), z])

    found = np.exp(centre + least_squares(residuals, np.zeros(len(centre))).x * width)
    factors = dict(zip(MEMORY_PRIORS, map(float, found), strict=True))
    deviation = np.log(peak_bytes / (found @ parts))
    trust = trust_in(deviation, _LOG_SIGMA)
    spreads = fit_spreads(jobs, deviation, trust)
    discrepancy = condition(jobs, deviation, trust, spreads)
    return LayoutMemory(
        factors=factors,
        discrepancy=discrepancy,
        widening=_widening_memory_fit(discrepancy, trust),
    )


def peaks_of(memory: LayoutMemory, printed: NDArray[np.intp]) -> PeakMemory:
    """The record of a fitted memory; ``printed`` are the positions of its runs among all."""
    assert memory.discrepancy is not None
    return PeakMemory(
        runs=tuple(map(int, printed)),
        factors=dict(memory.factors),
        deviations=tuple(map(float, memory.discrepancy.deviations)),
        trust=tuple(map(float, memory.discrepancy.trust)),
        spreads=memory.discrepancy.spreads,
        interval_widening=memory.widening,
    )


def _widening_memory_fit(discrepancy: Discrepancy, trust: Column) -> float:
    """Factor that makes 90 % intervals hold 90 % of runs that were left out.

    Leaving one run out of a Gaussian process has a closed form (Rasmussen and Williams 2006, eq. 5.12).
    """
    precision = np.diag(discrepancy.inverse)
    noise = discrepancy.spreads.noise**2
    variance = np.maximum(1 / precision - noise / trust + noise, noise)
    return widening_of(np.abs(discrepancy.weights / precision) / np.sqrt(variance), least=0.5)
