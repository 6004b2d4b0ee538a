"""Prices of single operators from their timings: curves by family, steps measured in place, overheads."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import lsq_linear, minimize, nnls

from calibrate.fit.overheads import (
    ASSUMED_ERROR,
    NO_OVERHEAD,
    PassRow,
    call_counts,
    fit_overhead,
    real_s_of,
    root_mean_square,
)
from calibrate.fit.steps import trimmed_mean
from calibrate.replays import measured_steps, of_newest_traces, to_typical_speed
from perfmodel.arrays import FloatArray
from perfmodel.cost.families import (
    FRESH_KIND,
    OPTIMIZER_FRESH_KIND,
    GaussianProcess,
    family,
    features,
    fresh_s,
    is_optimizer_family,
    optimizer_family,
    optimizer_features,
    optimizer_work,
    wider_family,
    work,
)
from perfmodel.cost.operators import OPTIMIZER_TRAFFIC, OperatorPrices, work_s
from perfmodel.documents.observation import (
    IsolatedOperator,
    Observation,
    OperatorsObservation,
    OptimizerPoint,
    ReplayObservation,
)
from perfmodel.machine.measured import (
    ASSUMED_SENSITIVITY,
    ComputeRate,
    MeasuredWorkload,
    OperatorCosts,
    OperatorFamily,
)
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase

#: Prior of the fit: lengths in e-folds of a size, spreads in log of a time.
TYPICAL_LENGTH = 2.5
TYPICAL_SPREAD = 0.5
TYPICAL_NOISE = 0.08
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


def fresh_byte_s(timings: Mapping[str, Sequence[Timing]]) -> Seconds:
    """What the first touch of a page costs per byte, beside the writing; the same in all families. [s]

    Pages do not care who touches them, and most families hold no result that large: whatever times
    exceed that is alike in those that do.
    """
    found: list[float] = []
    for group in timings.values():
        large = [t for t in group if _fresh_bytes(t)]
        usual = [t for t in group if not _fresh_bytes(t)]
        if large and len(usual) >= _ENOUGH_POINTS:
            unit_s = unit_costs(usual)
            found += [
                (t.time_s - work_s(t.units, unit_s, least_s=0.0)) / _fresh_bytes(t) for t in large
            ]
    return max(0.0, float(np.median(found))) if found else 0.0


def _rest_s(timing: Timing, unit_s: Sequence[Seconds]) -> Seconds:
    """Without fresh pages; something is always left. [s]"""
    return max(timing.time_s - fresh_s(timing.units, unit_s), 0.1 * timing.time_s)


def _fresh_bytes(timing: Timing) -> float:
    """None of an optimizer, whose kinds of work are others."""
    return timing.units[FRESH_KIND] if len(timing.units) > FRESH_KIND else 0.0


def fit_family(
    name: str,
    timings: Sequence[Timing],
    *,
    most_points: int = MOST_POINTS,
    known_s: Mapping[int, Seconds] | None = None,
) -> OperatorFamily:
    """A curve through the ratios of a family's times to those of the work.

    Parameters
    ----------
    known_s
        Time per unit of kinds of work that all families have in common, by position.
    """
    width = max((len(timing.features) for timing in timings), default=0)
    members = [timing for timing in timings if len(timing.features) == width]
    if len(members) > most_points:
        chosen = np.random.default_rng(0).choice(len(members), most_points, replace=False)
        members = [members[index] for index in sorted(chosen)]
    flop_per_s = max(timing.flop / timing.time_s for timing in members)
    bytes_per_s = max(timing.moved_bytes / timing.time_s for timing in members) or 1e9
    least_s = min(timing.time_s for timing in members)
    unit_s = unit_costs(members, known_s)
    ratios = np.log(
        [
            _rest_s(timing, unit_s) / work_s(timing.units, unit_s, least_s=least_s)
            for timing in members
        ]
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


def unit_costs(
    timings: Sequence[Timing], known_s: Mapping[int, Seconds] | None = None
) -> tuple[Seconds, ...]:
    """Time per unit of each kind of work, none negative, that comes closest in log. [s]

    Squares of ``sum - time`` over ``sum * time``, which are those of logarithms as far as both are close.
    What is known already is kept.
    """
    units = np.array([timing.units for timing in timings])
    time_s = np.array([timing.time_s for timing in timings])
    scale = np.maximum(units.max(axis=0), 1.0)
    kept, is_free = np.zeros(units.shape[1]), np.ones(units.shape[1])
    for kind, each_s in (known_s or {}).items():
        if kind < len(kept):
            kept[kind], is_free[kind] = each_s * scale[kind], 0.0
    free = units / scale * is_free
    fixed_s = units / scale @ kept
    expected_s = time_s
    found = kept
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(time_s * expected_s)
        rest, _ = nnls(free * weights[:, None], np.maximum(time_s - fixed_s, 0.0) * weights)
        found = kept + rest
        expected_s = np.maximum(units / scale @ found, 0.1 * time_s)
    return tuple(float(value) for value in found / scale)


#: As many show how rough a curve is.
_FEW_POINTS = 60
#: Families that surely move every byte that their shapes promise.
_STREAMING = ("pointwise", "copy", "function")
#: Below the resolution of any clock.
_SMALLEST_S = 1e-8
#: Share of repeats that are not believed.
_INTERRUPTED = 1 / 6
#: Passes of reference models that tell a factor from a constant per call.
_ENOUGH_ROWS = 8
#: Bounds of both.
_BELIEVED = (0.5, -math.inf), (2.0, math.inf)


def fit_operators(
    observations: Sequence[Observation],
    *,
    workloads: Sequence[MeasuredWorkload],
    rates: Sequence[ComputeRate],
    speed_probe_s: Seconds,
    sensitivity: float,
    keeps_memory: bool = False,
) -> OperatorCosts | None:
    """Everything that prices traced workloads, or ``None`` where no operator was timed.

    Parameters
    ----------
    workloads
        Reference models with their real steps, which tell what a step adds to its operators.
    speed_probe_s
        The machine speed to which everything is brought. [s]
    sensitivity
        Exponent by which work follows the speed probe.
    keeps_memory
        Whether no result lies in pages that are touched for the first time.
    """
    layers = [entry for entry in observations if isinstance(entry, OperatorsObservation)]
    replays = of_newest_traces([e for e in observations if isinstance(e, ReplayObservation)])
    if not layers and not replays:
        return None
    timings = _timings(layers, speed_probe_s, sensitivity)
    families = _families(timings, most_points=MOST_POINTS, keeps_memory=keeps_memory)
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
        measured=measured_steps(replays, to_typical_speed(replays, speed_probe_s, sensitivity)),
        overhead=NO_OVERHEAD,
        curve_log_error=ASSUMED_ERROR,
    )
    draft = replace(draft, overhead=fit_overhead(draft.measured, replays, workloads))
    rows = _curve_rows(draft, replays, workloads)
    asynchronous = any(entry.phases[0].dispatch_forward for entry in workloads)
    return _brought_to_steps(draft, rows, asynchronous=asynchronous)


def fit_curves(
    layers: Sequence[OperatorsObservation], *, keeps_memory: bool = False
) -> tuple[OperatorFamily, ...]:
    """Curves of all families in a hurry: good enough to see where they are in uncertainty."""
    if not layers:
        return ()
    speed_s = trimmed_mean([trimmed_mean(entry.speed_probe_s) for entry in layers])
    timings = _timings(layers, speed_s, ASSUMED_SENSITIVITY)
    return _families(timings, most_points=_FEW_POINTS, keeps_memory=keeps_memory)


def _families(
    timings: Mapping[str, Sequence[Timing]], *, most_points: int, keeps_memory: bool
) -> tuple[OperatorFamily, ...]:
    known: dict[int, Seconds] = {}
    known_of_optimizers: dict[int, Seconds] = {}
    if keeps_memory:
        known, known_of_optimizers = {FRESH_KIND: 0.0}, {OPTIMIZER_FRESH_KIND: 0.0}
    elif (fresh_s := fresh_byte_s(timings)) > 0:
        known = {FRESH_KIND: fresh_s}
    return tuple(
        fit_family(
            name,
            group,
            most_points=most_points,
            known_s=known_of_optimizers if is_optimizer_family(name) else known,
        )
        for name, group in sorted(timings.items())
    )


def _peak(rates: Iterable[float]) -> float:
    return max(rates, default=1e9) or 1e9


def _timings(
    layers: Sequence[OperatorsObservation], speed_probe_s: Seconds, sensitivity: float
) -> dict[str, list[Timing]]:
    """Times by family, at one machine speed, which they follow with an exponent."""

    def factor(timed: IsolatedOperator | OptimizerPoint, entry: OperatorsObservation) -> float:
        """To that speed by the probes before each time, or without any by those around all."""
        probe_s = trimmed_mean(timed.speed_probe_s or entry.speed_probe_s)
        return float((speed_probe_s / probe_s) ** sensitivity)

    groups: dict[str, list[Timing]] = defaultdict(list)
    for entry in layers:
        for timed in entry.operators:
            operator = timed.operator
            timing = Timing(
                features=features(operator),
                time_s=factor(timed, entry) * _typical_s(timed.times_s),
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
            groups[name].append(_optimizer_timing(point, factor(point, entry)))
    return groups


def _typical_s(times_s: Sequence[Seconds]) -> Seconds:
    """The time inside a step: a mean, since times are added up. [s]

    Without the slowest sixth, which met interruptions.
    """
    kept = sorted(times_s)[: math.ceil(len(times_s) * (1 - _INTERRUPTED))]
    return max(_SMALLEST_S, float(np.mean(kept)))


def _optimizer_timing(point: OptimizerPoint, factor: float) -> Timing:
    """One tensor's share of a typical step."""
    return Timing(
        features=optimizer_features(point.tensor_bytes, point.tensor_bytes * point.num_tensors),
        time_s=factor * trimmed_mean(point.times_s) / point.num_tensors,
        flop=0.0,
        moved_bytes=OPTIMIZER_TRAFFIC[point.optimizer] * point.tensor_bytes,
        units=optimizer_work(point.tensor_bytes),
    )


def _curve_rows(
    draft: OperatorCosts,
    replays: Sequence[ReplayObservation],
    workloads: Sequence[MeasuredWorkload],
) -> list[PassRow]:
    """Forward and backward passes of the reference models: real time, that by curves alone, calls.

    Without what every call takes beyond its price, whatever the price comes from.
    """
    known = {entry.workload.name: entry for entry in workloads}
    bare = replace(draft, overhead=NO_OVERHEAD)
    prices = OperatorPrices(bare, use_measured=False)
    rows = []
    for (name, micro_batch), entry in {
        (e.workload, e.micro_batch): e for e in replays if e.traced is not None
    }.items():
        if entry.traced is None or name not in known:
            continue
        for phase, price in prices.step(entry.traced.at(micro_batch=micro_batch)).items():
            if phase is not Phase.OPTIMIZER:
                calls = call_counts(entry)[phase.value]
                overhead_s = getattr(draft.overhead, f"{phase.value}_s") * calls
                real_s = real_s_of(known[name], phase.value, micro_batch) - overhead_s
                rows.append((max(real_s, _SMALLEST_S), price.time_s, calls))
    return rows


def _brought_to_steps(
    draft: OperatorCosts, rows: Sequence[PassRow], *, asynchronous: bool
) -> OperatorCosts:
    """Curves as steps are: ``real = factor * curve + constant * calls``, by least relative squares.

    A row of layers that found its memory there is kinder than a step to what works long, and harder on
    short calls, which start from emptier caches. Few passes, or those of an asynchronous device, whose
    calls are the host's, tell the factor alone, by a median.
    """
    if not rows:
        return draft
    real_s, curve_s, calls = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    factor, call_s = float(np.exp(np.median(np.log(real_s / curve_s)))), 0.0
    if len(rows) >= _ENOUGH_ROWS and not asynchronous:
        terms = np.stack([curve_s / real_s, calls / real_s], axis=1)
        factor, call_s = map(float, lsq_linear(terms, np.ones(len(rows)), bounds=_BELIEVED).x)
    left = np.log(np.maximum(factor * curve_s + call_s * calls, _SMALLEST_S) / real_s)
    return replace(
        draft,
        families=tuple(_slower(entry, factor) for entry in draft.families),
        curve_call_s=call_s,
        curve_log_error=root_mean_square(left),
    )


def _slower(family: OperatorFamily, factor: float) -> OperatorFamily:
    """A family's curve in steps; an optimizer's is left, timed as the one call that it is."""
    if is_optimizer_family(family.name):
        return family
    return replace(
        family,
        unit_s=tuple(each_s * factor for each_s in family.unit_s),
        least_s=family.least_s * factor,
    )
