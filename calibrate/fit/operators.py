"""Durations of single operators from their timings: curves by family, steps timed in place."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize, nnls

from calibrate.replays import measured_steps, of_newest_traces, replayed_s
from calibrate.summary import typical
from perfmodel.arrays import FloatArray
from perfmodel.cost.families import (
    TYPICAL_LENGTH,
    TYPICAL_NOISE,
    TYPICAL_SPREAD,
    GaussianProcess,
    family,
    features,
    optimizer_family,
    optimizer_features,
    optimizer_work,
    wider_family,
    work,
)
from perfmodel.cost.operators import OperatorPrices, work_s
from perfmodel.cost.terms import CurveDraws
from perfmodel.documents.observation import (
    Observation,
    OperatorsObservation,
    OptimizerPoint,
    ReplayObservation,
)
from perfmodel.machine.measured import (
    ComputeRate,
    MeasuredWorkload,
    OperatorCosts,
    OperatorFamily,
)
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase
from perfmodel.workload.optimizers import OPTIMIZERS

_PRIOR_WIDTH = (0.7, 0.7, 0.7)


def fit_gaussian_process(inputs: FloatArray, targets: FloatArray) -> GaussianProcess:
    """The process of highest posterior density: marginal likelihood times broad priors."""
    num_features = inputs.shape[1]
    typical = np.log([*(TYPICAL_LENGTH,) * num_features, TYPICAL_SPREAD, TYPICAL_NOISE])
    width = np.array([*(_PRIOR_WIDTH[0],) * num_features, *_PRIOR_WIDTH[1:]])

    def loss(logs: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = _negative_log_likelihood(inputs, targets, np.exp(logs))
        deviation = (logs - typical) / width
        return value + 0.5 * float(deviation @ deviation), gradient + deviation / width

    bounds = [(low - 3, low + 3) for low in typical]
    found = minimize(
        loss, typical, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}
    )
    best = np.exp(found.x)
    return GaussianProcess(
        inputs=inputs,
        targets=targets,
        lengths=best[:num_features],
        spread=float(best[-2]),
        noise=float(best[-1]),
    )


def _negative_log_likelihood(
    inputs: FloatArray, targets: FloatArray, parameters: FloatArray
) -> tuple[float, FloatArray]:
    """Value and gradient in the logarithms of lengths, spread and noise."""
    lengths, spread, noise = parameters[:-2], parameters[-2], parameters[-1]
    scaled = (inputs[:, None, :] - inputs[None, :, :]) / lengths
    squares = scaled**2
    distance = math.sqrt(3) * np.sqrt(np.sum(squares, axis=2))
    decay = np.exp(-distance)
    kernel = spread**2 * (1 + distance) * decay
    count = len(targets)
    factor = cho_factor(kernel + (noise**2 + 1e-9) * np.eye(count), lower=True)
    residual = targets - targets.mean()
    weights = cho_solve(factor, residual)
    value = 0.5 * float(residual @ weights) + float(np.sum(np.log(np.diag(factor[0]))))
    inner = cho_solve(factor, np.eye(count)) - np.outer(weights, weights)
    # d kernel / d log length = 3 spread^2 exp(-distance) * squared scaled difference.
    slopes = np.einsum("ij,ijk->k", inner * decay, squares) * 1.5 * spread**2
    gradient = np.array([*slopes, np.sum(inner * kernel), noise**2 * np.trace(inner)])
    return value, gradient


#: More points of a family cost time and tell little.
MOST_POINTS: Final = 240
#: With fewer points the costs of a family's work say nothing about another point.
_ENOUGH_POINTS: Final = 8
#: Until the costs of the work stand still.
_REWEIGHTINGS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One point of a family's curve."""

    features: tuple[float, ...]
    time_s: Seconds
    flop: float
    moved_bytes: float
    units: tuple[float, ...]
    """Of each kind of work."""


def fit_family(
    name: str,
    timings: Sequence[Timing],
    *,
    most_points: int = MOST_POINTS,
) -> OperatorFamily:
    """A curve through the ratios of a family's times to those of the work."""
    width = max((len(timing.features) for timing in timings), default=0)
    members = [timing for timing in timings if len(timing.features) == width]
    if len(members) > most_points:
        chosen = np.random.default_rng(0).choice(len(members), most_points, replace=False)
        members = [members[index] for index in sorted(chosen)]
    flop_per_s = max(timing.flop / timing.time_s for timing in members)
    bytes_per_s = max(timing.moved_bytes / timing.time_s for timing in members) or 1e9
    least_s = min(timing.time_s for timing in members)
    unit_s = unit_costs(members)
    ratios = np.log(
        [timing.time_s / work_s(timing.units, unit_s, least_s=least_s) for timing in members]
    )
    points = np.array([timing.features for timing in members])
    process = fit_gaussian_process(points, ratios)
    return OperatorFamily(
        name=name,
        flop_per_s=flop_per_s,
        bytes_per_s=bytes_per_s,
        least_s=least_s,
        unit_s=unit_s,
        features=tuple(timing.features for timing in members),
        log_ratios=tuple(float(ratio) for ratio in ratios),
        lengths=tuple(float(length) for length in process.lengths),
        spread=process.spread,
        noise=process.noise,
    )


def unit_costs(timings: Sequence[Timing]) -> tuple[Seconds, ...]:
    """Time per unit of each kind of work, none negative, that comes closest in log. [s]

    Squares of ``sum - time`` over ``sum * time``, which are those of logarithms as far as both are close.
    """
    units = np.array([timing.units for timing in timings])
    time_s = np.array([timing.time_s for timing in timings])
    scale = np.maximum(units.max(axis=0), 1.0)
    expected_s, found = time_s, np.zeros(units.shape[1])
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(time_s * expected_s)
        found, _ = nnls(units / scale * weights[:, None], time_s * weights)
        expected_s = np.maximum(units / scale @ found, 0.1 * time_s)
    return tuple(float(value) for value in found / scale)


#: As many show how rough a curve is.
_FEW_POINTS = 60
#: Families that surely move every byte that their shapes promise.
_STREAMING = ("pointwise", "copy", "function")
#: Below the resolution of any clock.
_SMALLEST_S = 1e-8
#: Sums over reference models are no better known than this, whatever few of them say.
_SMALLEST_ERROR = 0.02
#: Of sums that no reference model was compared with.
_ASSUMED_ERROR = 0.1


def fit_operators(
    observations: Sequence[Observation],
    *,
    workloads: Sequence[MeasuredWorkload],
    rates: Sequence[ComputeRate],
) -> OperatorCosts | None:
    """Everything that prices traced workloads, or ``None`` where no operator was timed.

    Parameters
    ----------
    workloads
        Reference models with their real steps: how far sums of operators are off.
    """
    layers = [entry for entry in observations if isinstance(entry, OperatorsObservation)]
    replays = of_newest_traces([e for e in observations if isinstance(e, ReplayObservation)])
    if not layers and not replays:
        return None
    timings = _timings(layers)
    families = _families(timings, most_points=MOST_POINTS)
    everything = [timing for group in timings.values() for timing in group]
    draft = OperatorCosts(
        peak_flop_per_s=_peak(
            [t.flop / t.time_s for t in everything] + [rate.flop_per_s for rate in rates]
        ),
        peak_bytes_per_s=_peak(
            [t.moved_bytes / t.time_s for name in _STREAMING for t in timings.get(name, ())]
            + [rate.bytes_per_s for rate in rates]
        ),
        families=families,
        measured=measured_steps(replays),
        replay_log_error=_ASSUMED_ERROR,
        curve_log_error=_ASSUMED_ERROR,
    )
    return replace(
        draft,
        replay_log_error=_sum_error(draft, replays, workloads, use_measured=True),
        curve_log_error=_sum_error(draft, replays, workloads, use_measured=False),
    )


def fit_curves(layers: Sequence[OperatorsObservation]) -> tuple[OperatorFamily, ...]:
    """Curves of all families in a hurry: good enough to see where they are uncertain."""
    return _families(_timings(layers), most_points=_FEW_POINTS)


def _families(
    timings: Mapping[str, Sequence[Timing]], *, most_points: int
) -> tuple[OperatorFamily, ...]:
    return tuple(
        fit_family(name, group, most_points=most_points) for name, group in sorted(timings.items())
    )


def _peak(rates: Iterable[float]) -> float:
    return max(rates, default=1e9) or 1e9


def _timings(layers: Sequence[OperatorsObservation]) -> dict[str, list[Timing]]:
    """Times by family."""
    groups: dict[str, list[Timing]] = defaultdict(list)
    for entry in layers:
        for timed in entry.operators:
            operator = timed.operator
            timing = Timing(
                features=features(operator),
                time_s=typical(timed.times_s),
                flop=operator.flop,
                moved_bytes=operator.read_bytes + operator.written_bytes,
                units=work(operator),
            )
            name = family(operator)
            groups[name].append(timing)
            # Only functions stand for each other; ways to convolve are told apart.
            if name.startswith("function ") and (wider := wider_family(name)):
                groups[wider].append(timing)
        for point in entry.optimizers:
            name = optimizer_family(point.optimizer, point.implementation)
            groups[name].append(_optimizer_timing(point))
    return groups


def _optimizer_timing(point: OptimizerPoint) -> Timing:
    """One tensor's share of a typical step."""
    return Timing(
        features=optimizer_features(point.tensor_bytes, point.tensor_bytes * point.num_tensors),
        time_s=typical(point.times_s) / point.num_tensors,
        flop=0.0,
        moved_bytes=OPTIMIZERS[point.optimizer].passes * point.tensor_bytes,
        units=optimizer_work(point.tensor_bytes),
    )


def _sum_error(
    draft: OperatorCosts,
    replays: Sequence[ReplayObservation],
    workloads: Sequence[MeasuredWorkload],
    *,
    use_measured: bool,
) -> float:
    """How far sums of operators are off the passes of the reference models: root mean square, in log."""
    known = {entry.workload.name: entry for entry in workloads}
    costs = OperatorPrices(draft, use_measured=use_measured)
    errors = []
    for entry in {(e.workload, e.micro_batch): e for e in replays}.values():
        if entry.workload not in known or (entry.traced is None and not use_measured):
            continue
        sums = (
            {phase: replayed_s([entry], phase.value) for phase in Phase}
            if entry.traced is None
            else {
                phase: found.time_s
                for phase, found in costs.step(
                    entry.traced.at(micro_batch=entry.micro_batch)
                ).items()
            }
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            real_s = _phase_s(known[entry.workload], phase, entry.micro_batch)
            errors.append(math.log(max(sums[phase], _SMALLEST_S) / max(real_s, _SMALLEST_S)))
    if not errors:
        return _ASSUMED_ERROR
    return max(_SMALLEST_ERROR, math.sqrt(sum(error**2 for error in errors) / len(errors)))


def _phase_s(workload: MeasuredWorkload, phase: Phase, micro_batch: int) -> Seconds:
    """What a phase of a reference model takes in its steps. [s]"""
    points = getattr(workload.phases[0], phase.value)
    draws = CurveDraws.sample(points, num_draws=1, rng=np.random.default_rng(0))
    return float(draws.read(micro_batch)[0])
