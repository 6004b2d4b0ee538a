"""Step times from fitted parameters that were inferred from runs: number, interval, parts, disturbed runs."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.jobs import USUAL, Column, Jobs, jobs_from_columns
from perfmodel.cost.layout_memory import InferredMemory
from perfmodel.cost.layout_time import StepParts, step_parts, step_time_s
from perfmodel.cost.parameters import (
    Discrepancy,
    Disturbance,
    Prior,
    Spreads,
    condition,
    stall_time_s,
)
from perfmodel.machine.inferred import (
    DegradedState,
    DeviationSpreads,
    FittedParameter,
    InferredMachine,
    PeakMemory,
)

LOWER, UPPER = 0.05, 0.95
_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInterval:
    """Predicted step times, each shape ``(num_jobs,)``. [s]"""

    number_s: Column
    """The one to name: of all numbers in the interval the one with the least expected relative error.
    Where a run is normal or takes ten times as long, the normal one unless the other is ten times as likely."""
    mean_s: Column
    """Geometric mean over the states that a run may be in: what layouts are ranked by."""
    lower_s: Column
    """5 % of outcomes should be below."""
    upper_s: Column
    """5 % of outcomes should be above."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepUncertainty:
    """What the uncertainty of predicted steps consists of, each shape ``(num_jobs,)``."""

    fitted: Column
    """Standard deviation of the logarithm, by the inferred fitted parameters."""
    formula: Column
    """The same, by what the formula does not explain."""
    stall_probability: Column
    degraded_ratio: Column
    """Degraded step over normal step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferredModel:
    """FittedParameters inferred from end-to-end step times, with their uncertainty."""

    priors: Mapping[str, Prior]
    draws: Mapping[str, Column]
    """Draws of every parameter, shape ``(num_draws,)``; the first is the fit itself."""
    moved: Mapping[str, float]
    """How far the runs narrowed a prior: posterior over prior standard deviation, in (0, 1]."""
    discrepancy: Discrepancy
    disturbance: Disturbance | None
    widening: float
    """Factor on every interval so that 90 % of the left-out runs lay inside."""
    memory: InferredMemory | None = None
    """None if the runs printed no peaks."""

    @property
    def nominal(self) -> dict[str, float]:
        """The fitted parameters."""
        return {name: float(values[0]) for name, values in self.draws.items()}

    def parts(self, jobs: Jobs) -> StepParts:
        """Where the time goes at the fitted parameters, without the unexplained deviation."""
        return step_parts(jobs, self.nominal)

    def predict(self, jobs: Jobs, *, stalls: bool = True) -> StepInterval:
        """Step times with 90 % intervals; without ``stalls`` those of runs that nothing disturbs."""
        centre, disturbed, chance, variance = self._states(jobs)
        chance = chance if stalls else np.zeros(len(jobs))
        spread = np.sqrt(variance + self._parameter_variance(jobs)) * self.uncertainty_factor(jobs)
        lower_s, upper_s = (
            np.exp(_quantile(share, centre, disturbed, chance, spread)) for share in (LOWER, UPPER)
        )
        named_s = _named_s(centre, disturbed, chance, spread)
        return StepInterval(
            number_s=np.clip(named_s, lower_s, upper_s),
            mean_s=np.exp((1 - chance) * centre + chance * disturbed),
            lower_s=lower_s,
            upper_s=upper_s,
        )

    def step_draws(self, jobs: Jobs, *, num_draws: int, seed: int = 0) -> Column:
        """Draws of what ``predict`` gives quantiles of, shape ``(num_jobs, num_draws)``. [s]

        The first is the number to name. All jobs share their random numbers, so that they compare in pairs.
        """
        centre, disturbed, chance, variance = self._states(jobs)
        spread = np.sqrt(variance + self._parameter_variance(jobs)) * self.uncertainty_factor(jobs)
        rng = np.random.default_rng(seed)
        normal, uniform = rng.standard_normal(num_draws), rng.random(num_draws)
        degraded = uniform < chance[:, None]
        logs = np.where(degraded, disturbed[:, None], centre[:, None]) + spread[:, None] * normal
        draws_s: Column = np.exp(logs)
        draws_s[:, 0] = self.predict(jobs).number_s
        return draws_s

    def uncertainty(self, jobs: Jobs) -> StepUncertainty:
        """What the intervals of some jobs consist of."""
        centre, disturbed, chance, variance = self._states(jobs)
        factor = self.uncertainty_factor(jobs)
        return StepUncertainty(
            fitted=np.sqrt(self._parameter_variance(jobs)) * factor,
            formula=np.sqrt(variance) * factor,
            stall_probability=chance,
            degraded_ratio=np.exp(disturbed - centre),
        )

    def uncertainty_factor(self, jobs: Jobs) -> Column:
        """Factor on the uncertainty of jobs, so that 90 % of outcomes lie inside.

        It was found among the runs. Where these say nothing of a layout, it may widen but not narrow.
        """
        unknown = self.discrepancy.unknown_share(jobs)
        far = max(self.widening, 1.0)
        return np.asarray(np.sqrt(self.widening**2 * (1 - unknown) + far**2 * unknown))

    def _parameter_variance(self, jobs: Jobs) -> Column:
        """Variance of the logarithm over the draws of the fitted parameters."""
        drawn = step_time_s(jobs, {name: values[:, None] for name, values in self.draws.items()})
        return np.asarray(np.log(drawn).var(axis=0))

    def looks_disturbed(self, jobs: Jobs, step_s: Column) -> NDArray[np.bool_]:
        """Whether a measured step is nearer to the degraded than to the normal prediction."""
        normal, late, _, _ = self._states(jobs)
        return np.abs(late - np.log(step_s)) < np.abs(normal - np.log(step_s))

    def _states(self, jobs: Jobs) -> tuple[Column, Column, Column, Column]:
        """Logarithms of the normal and of the degraded step, odds of the latter, variance of both."""
        normal_s = step_time_s(jobs, self.nominal)
        shift, variance = self.discrepancy.at(jobs)
        normal = np.log(normal_s) + shift
        if self.disturbance is None:
            return normal, normal, np.zeros(len(jobs)), variance
        degraded = np.log(normal_s + stall_time_s(jobs, self.disturbance.stall_s)) + shift
        return normal, degraded, self.disturbance.probability(jobs), variance


def _named_s(normal: Column, disturbed: Column, chance: Column, spread: Column) -> Column:
    """Number with the least expected relative error, from the logarithms of the two states. [s]

    |f / y - 1| weighs an outcome y by 1 / y: the median, with each state weighted by one over its time.
    """
    weight = chance * np.exp(np.maximum(normal - disturbed, -50.0))
    late = weight / np.maximum(weight + 1 - chance, 1e-12)
    return np.asarray(np.exp(_quantile(0.5, normal, disturbed, late, spread)))


def _quantile(
    share: float, normal: Column, disturbed: Column, chance: Column, spread: Column
) -> Column:
    """Quantile of a mixture of two normal distributions of equal width, by bisection."""
    from scipy.special import ndtr  # noqa: PLC0415 - slow to import

    low = np.minimum(normal, disturbed) - 8 * spread
    high = np.maximum(normal, disturbed) + 8 * spread
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        # norm.cdf without its checks, which take ten times as long for a single job.
        below = (1 - chance) * ndtr((middle - normal) / spread)
        below += chance * ndtr((middle - disturbed) / spread)
        low, high = np.where(below < share, middle, low), np.where(below < share, high, middle)
    return np.asarray((low + high) / 2)


KNOWN_BELOW = 0.7
"""A parameter counts as determined if the runs narrowed its prior at least to this share."""


def machine_of(
    model: InferredModel,
    *,
    device_name: str,
    step_s: Iterable[float],
    printed: NDArray[np.intp] | None = None,
) -> InferredMachine:
    """The machine that a model was inferred of.

    ``device_name``: data sheet of its devices.
    ``step_s``: step time of every run. [s]
    ``printed``: positions of the runs behind its memory; all if not given.
    """
    runs = model.discrepancy.runs
    return InferredMachine(
        device_name=device_name,
        num_runs=len(runs),
        runs=_said(runs),
        step_s=tuple(map(float, step_s)),
        fitted_parameters=tuple(
            _parameter(model, name, prior) for name, prior in model.priors.items()
        ),
        deviations=tuple(map(float, model.discrepancy.deviations)),
        trust=tuple(map(float, model.discrepancy.trust)),
        spreads=DeviationSpreads(**asdict(model.discrepancy.spreads)),
        degraded=_degraded(model),
        interval_widening=model.widening,
        memory=_peaks(model.memory, np.arange(len(runs)) if printed is None else printed),
    )


def model_of(machine: InferredMachine) -> InferredModel:
    """The model behind a machine."""
    runs = jobs_from_columns(machine.runs)
    return InferredModel(
        priors={
            parameter.name: Prior(
                median=parameter.prior,
                log_sigma=parameter.prior_log_sigma,
                meaning=parameter.meaning,
            )
            for parameter in machine.fitted_parameters
        },
        draws={
            parameter.name: np.array(parameter.draws) for parameter in machine.fitted_parameters
        },
        moved={
            parameter.name: parameter.log_sigma / parameter.prior_log_sigma
            for parameter in machine.fitted_parameters
        },
        discrepancy=condition(
            runs,
            np.array(machine.deviations),
            np.array(machine.trust),
            Spreads(**asdict(machine.spreads)),
        ),
        disturbance=_disturbance(machine),
        widening=machine.interval_widening,
        memory=_memory(machine, runs),
    )


def _said(runs: Jobs) -> dict[str, tuple[float, ...]]:
    """Columns of the runs; what is as usual in all of them is left out."""
    columns = {field.name: getattr(runs, field.name) for field in fields(runs)}
    return {
        name: tuple(map(float, values))
        for name, values in columns.items()
        if name not in USUAL or (values != USUAL[name]).any()
    }


def _parameter(model: InferredModel, name: str, prior: Prior) -> FittedParameter:
    return FittedParameter(
        name=name,
        value=model.nominal[name],
        log_sigma=prior.log_sigma * model.moved[name],
        prior=prior.median,
        prior_log_sigma=prior.log_sigma,
        determined=model.moved[name] < KNOWN_BELOW,
        meaning=prior.meaning,
        draws=tuple(map(float, model.draws[name])),
    )


def _degraded(model: InferredModel) -> DegradedState | None:
    if model.disturbance is None:
        return None
    return DegradedState(
        stall_s=model.disturbance.stall_s,
        weights=tuple(map(float, model.disturbance.weights)),
    )


def _peaks(memory: InferredMemory | None, printed: NDArray[np.intp]) -> PeakMemory | None:
    if memory is None:
        return None
    found = memory.discrepancy
    return PeakMemory(
        runs=tuple(map(int, printed)),
        factors=memory.factors,
        deviations=tuple(map(float, found.deviations)),
        trust=tuple(map(float, found.trust)),
        spreads=DeviationSpreads(**asdict(found.spreads)),
        interval_widening=memory.widening,
    )


def _memory(machine: InferredMachine, runs: Jobs) -> InferredMemory | None:
    said = machine.memory
    if said is None:
        return None
    return InferredMemory(
        factors=dict(said.factors),
        discrepancy=condition(
            runs.take(np.array(said.runs)),
            np.array(said.deviations),
            np.array(said.trust),
            Spreads(**asdict(said.spreads)),
        ),
        widening=said.interval_widening,
    )


def _disturbance(machine: InferredMachine) -> Disturbance | None:
    if machine.degraded is None:
        return None
    return Disturbance(stall_s=machine.degraded.stall_s, weights=np.array(machine.degraded.weights))
