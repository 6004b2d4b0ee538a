"""Durations of single operators from their timings: curves by family, steps timed in place."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.linalg.blas import dsymv, dsyr, dtrmm
from scipy.linalg.lapack import dlauum, dpotrf, dtpttr, dtrtri, dtrttp
from scipy.optimize import minimize, nnls

from calibrate.replays import StepKey, measured_steps, of_newest_traces, replayed_s, step_key
from calibrate.summary import farthest, typical, typical_each
from perfmodel.cost import CurveDraws
from perfmodel.cost.families import (
    TYPICAL_LENGTH,
    TYPICAL_NOISE,
    TYPICAL_SPREAD,
    all_functions,
    attends,
    by_channel_alone,
    call_features,
    convolves,
    family,
    family_on,
    features,
    in_channels_last,
    is_half,
    is_of_optimizer,
    optimizer_family,
    optimizer_features,
    optimizer_work,
    work,
)
from perfmodel.cost.operators import OperatorDurations, work_s
from perfmodel.documents.observation import (
    Observation,
    OperatorsObservation,
    ReplayObservation,
)
from perfmodel.machine.measured import (
    ComputeRate,
    MeasuredWorkload,
    OperatorCosts,
    OperatorFamily,
)
from perfmodel.statistics import FloatArray, GaussianProcess
from perfmodel.units import Seconds
from perfmodel.workload import Operator, Phase
from perfmodel.workload.step import OPTIMIZERS, signature

#: Of the logarithms of lengths, spread and noise.
_PRIOR_WIDTH: Final = 0.7
#: More points of a family cost time and tell little.
_MOST_POINTS: Final = 240
#: Of matrices that LAPACK inverts as fast as by their blocks.
_BLOCK: Final = 64
#: Until the costs of the work stand still.
_REWEIGHTINGS: Final = 7
#: Families that surely move every byte that their shapes promise.
_STREAMING: Final = ("pointwise", "copy", "function")
#: How much what is expected of a unit of work counts beside one timing.
_EXPECTED_WEIGHT: Final = 0.2
#: An optimizer over lists updates many tensors at once: of a kernel's start, each pays its share.
_TENSORS_PER_KERNEL: Final = 100
#: However few tensors there are.
_KERNELS_PER_UPDATE: Final = 3
#: Of rows that a kernel goes through as many at least take as long as its start.
_ROWS_PER_START: Final = 1000
#: What a block of threads needs for each byte of a channel, by whether it has 16 bit, and a kernel for a row of few
#: pixels: single batch normalisations of the calibration of an H100. [s]
_BLOCK_BYTE_S: Final = {False: 1.5e-10, True: 5e-10}
_PIXEL_ROW_S: Final = 3e-10
#: What a convolution by channel needs for a tap of its kernel at a pixel: an H200 and an H100. [s]
_TAP_S: Final = 1.7e-12
#: FLOP or bytes per second of kinds of kernels that were not timed.
_UNSEEN_RATE: Final = 1e9
#: Below the resolution of any clock.
_SMALLEST_S: Final = 1e-8
#: No GPU starts a kernel in less: a shorter time was that of the events around it alone.
_SHORTEST_KERNEL_S: Final = 1e-7
#: Groups of drawn models that are left out of the curves, one after another.
_FOLDS: Final = 4
#: Sums over reference models are no better known than this, whatever few of them say.
_SMALLEST_ERROR: Final = 0.02
#: Of sums that no reference model was compared with.
_ASSUMED_ERROR: Final = 0.1


@functools.lru_cache(maxsize=128)
def fit_gaussian_process(
    points: tuple[tuple[float, ...], ...], values: tuple[float, ...]
) -> GaussianProcess:
    """The process of highest posterior density: marginal likelihood times broad priors.

    Remembered: leaving models out changes no family that they do not call.
    """
    inputs, targets = np.array(points), np.array(values)
    num_features = inputs.shape[1]
    squares = squared_differences(inputs)
    typical = np.log([*(TYPICAL_LENGTH,) * num_features, TYPICAL_SPREAD, TYPICAL_NOISE])

    def loss(logs: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = _negative_log_likelihood(squares, targets, np.exp(logs))
        deviation = (logs - typical) / _PRIOR_WIDTH
        return value + 0.5 * float(deviation @ deviation), gradient + deviation / _PRIOR_WIDTH

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


def squared_differences(inputs: FloatArray) -> FloatArray:
    """Of each feature between two points: the lower triangle by columns, ``(features, points * (points + 1) / 2)``."""
    features = np.ascontiguousarray(inputs.T)
    columns, rows = np.triu_indices(len(inputs))
    return np.square(features.take(rows, axis=1) - features.take(columns, axis=1))


def _negative_log_likelihood(
    squares: FloatArray, targets: FloatArray, parameters: FloatArray
) -> tuple[float, FloatArray]:
    """Value and gradient in the logarithms of lengths, spread and noise; ``squares``: of differences.

    Matrices are symmetric: their lower triangles alone are computed, packed column by column as LAPACK does.
    """
    lengths, spread, noise = parameters[:-2], parameters[-2], parameters[-1]
    count = len(targets)
    diagonal = np.diag_indices(count)
    # In place: new tables of this size cost more than the arithmetic.
    distance = lengths**-2 @ squares
    distance *= 3
    np.sqrt(distance, out=distance)
    decay = np.exp(-distance)
    kernel = distance
    kernel += 1
    kernel *= spread**2
    kernel *= decay
    covariance, _ = dtpttr(count, kernel, uplo="L")
    covariance[diagonal] += noise**2 + 1e-9
    factor, failed = dpotrf(covariance, lower=True, overwrite_a=True)
    if failed:
        raise np.linalg.LinAlgError(f"a covariance must be positive definite, got order {failed}")
    residual = targets - targets.mean()
    log_determinant = 2 * float(np.sum(np.log(factor[diagonal])))
    inverse, _ = dlauum(_inverse(factor), lower=True, overwrite_c=True)
    weights = dsymv(1.0, inverse, residual, lower=True)
    value = 0.5 * (float(residual @ weights) + log_determinant)
    inner = dsyr(-1.0, weights, lower=True, a=inverse, overwrite_a=True)
    trace = float(np.sum(inner[diagonal]))
    # A product of two symmetric matrices is summed over its lower triangle twice, but once over its diagonal.
    inner[diagonal] /= 2
    packed, _ = dtrttp(inner, uplo="L")
    packed *= 2
    # d kernel / d log length = 3 spread^2 exp(-distance) * squared scaled difference.
    of_spread = float(packed @ kernel)
    packed *= decay
    slopes = squares @ packed * lengths**-2 * 1.5 * spread**2
    return value, np.array([*slopes, of_spread, noise**2 * trace])


def _inverse(lower: FloatArray) -> FloatArray:
    """Of a lower triangular matrix, by products of its blocks: LAPACK solves column by column, in twice the time.

    [A 0; B C]^-1 = [A^-1 0; -C^-1 B A^-1 C^-1]
    """
    count = len(lower)
    if count <= _BLOCK:
        small: FloatArray = dtrtri(lower, lower=True)[0]
        return small
    half = count // 2
    found = np.zeros((count, count), order="F")
    first = found[:half, :half] = _inverse(lower[:half, :half])
    last = found[half:, half:] = _inverse(lower[half:, half:])
    below = dtrmm(1.0, last, lower[half:, :half], lower=True)
    found[half:, :half] = dtrmm(-1.0, first, below, side=True, lower=True, overwrite_b=True)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One point of a family's curve."""

    features: tuple[float, ...]
    time_s: Seconds
    flop: float
    moved_bytes: float
    units: tuple[float, ...]
    """Of each kind of work."""
    num_calls: int = 1
    """How often a pass calls it, where that tells something."""
    is_in_place: bool = False
    """Whether it writes where it reads, where that tells something."""

    @property
    def place(self) -> FloatArray:
        """All that tells it from others of its family."""
        of_call = call_features(self.num_calls, is_in_place=self.is_in_place)
        return np.array([*self.features, *of_call])


#: By family.
Timings = Mapping[str, Sequence[Timing]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCosts:
    """What any kernel is expected to take: its start, its products and its bytes at the best rates seen.

    Families of which few points were timed would else take the shortest of these for the start.
    """

    on_gpu: bool
    """Kernels of a GPU start alike; of a CPU this is what most families start within."""
    start_s: Seconds
    flop_per_s: Mapping[tuple[bool, bool], float]
    """Of products by whether they convolve, which TF32 may do, and whether their factors have 16 bit."""
    bytes_per_s: float

    @classmethod
    def seen(cls, timings: Timings, *, on_gpu: bool) -> "KernelCosts | None":
        """The best of all families; ``None`` without a kernel that moves something."""
        kernels = [(n, t) for n, group in timings.items() for t in group if is_kernel(n, t)]
        if not kernels:
            return None
        shortest_s: dict[str, Seconds] = {}
        for name, timing in kernels:
            shortest_s[name] = min(timing.time_s, shortest_s.get(name, math.inf))
        rates: dict[tuple[bool, bool], float] = defaultdict(float)
        for name, timing in kernels:
            kind = convolves(name), is_half(name)
            rates[kind] = max(rates[kind], timing.flop / timing.time_s)
        streams = (t for n, t in kernels if n.startswith(_STREAMING))
        first_s = [*shortest_s.values()]
        return cls(
            on_gpu=on_gpu,
            start_s=min(first_s) if on_gpu else float(np.median(first_s)),
            flop_per_s=rates,
            bytes_per_s=max((t.moved_bytes / t.time_s for t in streams), default=0) or _UNSEEN_RATE,
        )

    def unit_s(self, name: str, members: Sequence[Timing]) -> tuple[Seconds, ...]:
        """By kind of work, as ``work`` counts it; nothing of views, and of tensors that are updated one by one.

        Nor on a CPU where the timings suffice to tell: kernels differ there.
        """
        if not self.on_gpu and (is_of_optimizer(name) or len(members) >= len(members[0].units)):
            return ()
        if is_of_optimizer(name) and not name.endswith(" loop"):
            passes = max(timing.moved_bytes / timing.units[1] for timing in members)
            start_s = _KERNELS_PER_UPDATE * self.start_s
            return self.start_s / _TENSORS_PER_KERNEL, passes / self.bytes_per_s, start_s
        if not all(is_kernel(name, timing) for timing in members):
            return ()
        flop_per_s = self.flop_per_s[convolves(name), is_half(name)] or _UNSEEN_RATE
        byte_s = 1 / self.bytes_per_s
        flop_s = 1 / flop_per_s
        if self.on_gpu and (by_channel_alone(name) or attends(name)):
            # What a GPU does in them is counted by itself.
            flop_s *= 1e-3
        streams = (self.start_s, flop_s, byte_s, byte_s, byte_s)
        return (*streams, *self._on_gpu_s(name)) if self.on_gpu else streams

    def _on_gpu_s(self, name: str) -> tuple[Seconds, ...]:
        """Of the kinds of work that follow, in the kernels of a GPU."""
        byte_s, row_s = 1 / self.bytes_per_s, self.start_s / _ROWS_PER_START
        if "batch_norm" in name:
            passes = 1 + ("backward" in name)
            by_channel = passes * _BLOCK_BYTE_S[is_half(name)], _PIXEL_ROW_S / passes
            # Where channels lie side by side, one of a hundred processors goes through one.
            return (100 * byte_s,) if in_channels_last(name) else (byte_s, *by_channel)
        if convolves(name):
            # Caches hold the weights that are read again for every sample, and many rows run side by side.
            return byte_s / 100, *((_TAP_S, _TAP_S) if by_channel_alone(name) else ())
        if attends(name):
            return row_s, 1 / (self.flop_per_s[False, is_half(name)] or _UNSEEN_RATE)
        return (row_s,)


def is_kernel(name: str, timing: Timing) -> bool:
    """Whether an operator starts one kernel: no view, and no optimizer over many tensors."""
    return timing.moved_bytes > 0 and not is_of_optimizer(name)


def fit_family(
    name: str,
    timings: Sequence[Timing],
    *,
    most_points: int = _MOST_POINTS,
    kernels: KernelCosts | None = None,
) -> OperatorFamily:
    """A curve through the ratios of a family's times to those of the work; ``kernels``: of all families."""
    width = max((len(timing.features) for timing in timings), default=0)
    members = [timing for timing in timings if len(timing.features) == width]
    if len(members) > most_points:
        # Those far from all others first: chance would hardly ever keep a recurrence among many calls of networks.
        members = _averaged(members)
        chosen = farthest(np.array([timing.place for timing in members]), most_points)
        members = [members[index] for index in sorted(chosen)]
    flop_per_s = max(timing.flop / timing.time_s for timing in members)
    bytes_per_s = max(timing.moved_bytes / timing.time_s for timing in members) or 1e9
    least_s = min(timing.time_s for timing in members)
    expected_s = () if kernels is None else kernels.unit_s(name, members)
    if expected_s:
        least_s = min(least_s, expected_s[0])
    unit_s = unit_costs(members, expected_s)
    ratios = np.log(
        [timing.time_s / work_s(timing.units, unit_s, least_s=least_s) for timing in members]
    )
    points = np.array([timing.place for timing in members])
    # Where all are as frequent, or none is in place, what others take would be the prior's word alone.
    varies = np.ptp(points, axis=0) > 0
    num_told = varies[-1] * (1 + varies[-2])
    points = np.delete(points, slice(width, points.shape[1] - num_told), axis=1)
    places, values = tuple(map(tuple, points.tolist())), tuple(ratios.tolist())
    process = fit_gaussian_process(places, values)
    return OperatorFamily(
        name=name,
        flop_per_s=flop_per_s,
        bytes_per_s=bytes_per_s,
        least_s=least_s,
        unit_s=unit_s,
        features=places,
        log_ratios=values,
        lengths=tuple(float(length) for length in process.lengths),
        spread=process.spread,
        noise=process.noise,
    )


def _averaged(timings: Sequence[Timing]) -> list[Timing]:
    """One timing of each place."""
    groups: dict[tuple[float, ...], list[Timing]] = defaultdict(list)
    for timing in timings:
        groups[tuple(timing.place)].append(timing)
    return [replace(g[0], time_s=typical([t.time_s for t in g])) for g in groups.values()]


def unit_costs(
    timings: Sequence[Timing], expected_s: Sequence[Seconds] = ()
) -> tuple[Seconds, ...]:
    """Time per unit of each kind of work, none negative, that comes closest in log. [s]

    Squares of ``sum - time`` over ``sum * time``, which are those of logarithms as far as both are close.
    ``expected_s``: What is known of the first kinds beforehand, to about their own size.
    """
    units = np.array([timing.units for timing in timings])
    time_s = np.array([timing.time_s for timing in timings])
    scale = np.maximum(units.max(axis=0), 1.0)
    prior = np.zeros((len(expected_s), units.shape[1]))
    np.fill_diagonal(prior, _EXPECTED_WEIGHT / (np.array(expected_s) * scale[: len(expected_s)]))
    promised = np.full(len(expected_s), _EXPECTED_WEIGHT)
    sum_s, found = time_s, np.zeros(units.shape[1])
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(time_s * sum_s)
        design = np.vstack([units / scale * weights[:, None], prior])
        found, _ = nnls(design, np.r_[time_s * weights, promised])
        sum_s = np.maximum(units / scale @ found, 0.1 * time_s)
    return tuple(float(value) for value in found / scale)


def fit_operators(
    observations: Sequence[Observation],
    *,
    workloads: Sequence[MeasuredWorkload],
    rates: Sequence[ComputeRate],
    run_log_error: float = 0.0,
    on_gpu: bool = False,
) -> OperatorCosts | None:
    """Everything that times traced workloads, or ``None`` where no operator was timed.

    ``workloads`` are reference models with their real steps: how far sums of operators are off. ``run_log_error``:
    How far one process is off the mean of many. ``on_gpu``: Kernels of all families start alike, and models of a round
    share one process.
    """
    layers = [entry for entry in observations if isinstance(entry, OperatorsObservation)]
    replays = of_newest_traces([e for e in observations if isinstance(e, ReplayObservation)])
    if not layers and not replays:
        return None
    layers_s = [typical_each([one.times_s for one in layer.operators]) for layer in layers]
    by_layer = [
        timings_of(layer, each_s, on_gpu=on_gpu)
        for layer, each_s in zip(layers, layers_s, strict=True)
    ]
    replayed = _by_family(_replayed(replays), on_gpu=True) if on_gpu else {}
    timings = _together([*by_layer, replayed])
    kernels = KernelCosts.seen(timings, on_gpu=on_gpu)
    flop_per_s = [t.flop / t.time_s for group in timings.values() for t in group]
    bytes_per_s = [t.moved_bytes / t.time_s for name in _STREAMING for t in timings.get(name, ())]
    draft = OperatorCosts(
        peak_flop_per_s=max([*flop_per_s, *(rate.flop_per_s for rate in rates)], default=0) or 1e9,
        peak_bytes_per_s=max([*bytes_per_s, *(rate.bytes_per_s for rate in rates)], default=0)
        or 1e9,
        families=fit_curves([timings], kernels=kernels),
        measured=measured_steps(replays),
        replay_log_error=_ASSUMED_ERROR,
        curve_log_error=_ASSUMED_ERROR,
    )
    unseen = draft
    if on_gpu and layers:
        # Reference models judge curves that have not seen them.
        unseen = replace(draft, families=fit_curves(by_layer, kernels=kernels))
    # What timings of one process share is in curves and sums alike.
    run = 0.0 if on_gpu else run_log_error
    return replace(
        draft,
        replay_log_error=_sum_error(draft, replays, workloads, use_measured=True),
        curve_log_error=_left_out_error(draft, layers, layers_s, by_layer, kernels, run)
        or _sum_error(unseen, replays, workloads, use_measured=False),
    )


def fit_curves(
    timings: Sequence[Timings],
    *,
    most_points: int = _MOST_POINTS,
    kernels: KernelCosts | None = None,
) -> tuple[OperatorFamily, ...]:
    """Curves of all families through these timings together."""
    return tuple(
        fit_family(name, group, most_points=most_points, kernels=kernels)
        for name, group in sorted(_together(timings).items())
    )


def _together(parts: Iterable[Timings]) -> dict[str, list[Timing]]:
    groups: dict[str, list[Timing]] = defaultdict(list)
    for part in parts:
        for name, group in part.items():
            groups[name] += group
    return groups


def timings_of(
    layer: OperatorsObservation, operators_s: Sequence[Seconds], *, on_gpu: bool
) -> Timings:
    """Times of some layers by family, as far as the kind of device tells them apart; ``operators_s``: typical ones."""
    timed = zip(layer.operators, operators_s, strict=True)
    calls = ((each.operator, each.num_calls, time_s) for each, time_s in timed)
    groups = _by_family(calls, on_gpu=on_gpu)
    for point in layer.optimizers:
        size = point.tensor_bytes
        # One tensor's share of a typical step.
        timing = Timing(
            features=optimizer_features(size, size * point.num_tensors),
            time_s=typical(point.times_s) / point.num_tensors,
            flop=0.0,
            moved_bytes=OPTIMIZERS[point.optimizer].passes * size,
            units=optimizer_work(size, size * point.num_tensors),
        )
        groups[optimizer_family(point.optimizer, point.implementation)].append(timing)
    return groups


def _by_family(
    calls: Iterable[tuple[Operator, int, Seconds]], *, on_gpu: bool
) -> dict[str, list[Timing]]:
    """Single operators with their times.

    A kernel of a GPU takes as long among others as alone: there the replays of known steps count, too.
    """
    groups: dict[str, list[Timing]] = defaultdict(list)
    for operator, num_calls, time_s in calls:
        name, place, units = _placed(operator, on_gpu=on_gpu)
        timing = Timing(
            features=place,
            time_s=time_s,
            flop=operator.flop,
            moved_bytes=operator.read_bytes + operator.written_bytes,
            units=units,
            # Convolutions arrange their data for every call by themselves.
            num_calls=1 if on_gpu or convolves(name) else num_calls,
            is_in_place=bool(operator.mutated) and not on_gpu,
        )
        if on_gpu and time_s < _SHORTEST_KERNEL_S and is_kernel(name, timing):
            continue
        groups[name].append(timing)
        if wider := all_functions(name):
            groups[wider].append(timing)
    return groups


@functools.lru_cache(maxsize=8192)
def _placed(
    operator: Operator, *, on_gpu: bool
) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """Family, features and work of an operator, which every round times again."""
    name = family_on(family(operator), gpu=on_gpu)
    return name, features(operator), work(operator, gpu=on_gpu)


def _replayed(replays: Sequence[ReplayObservation]) -> Iterator[tuple[Operator, int, Seconds]]:
    """Operators of replayed steps whose traces are known, each as if called once, with its typical time."""
    traces = {entry.workload: entry.traced for entry in replays if entry.traced is not None}
    groups: dict[StepKey, list[ReplayObservation]] = defaultdict(list)
    for entry in replays:
        if entry.workload in traces:
            groups[step_key(entry)].append(entry)
    for (workload, micro_batch, _), group in groups.items():
        step = traces[workload].at(micro_batch=micro_batch)
        known = {signature(each): each for each in step.operators}
        times: dict[tuple[str, Phase], list[Seconds]] = defaultdict(list)
        for timed in (each for entry in group for each in entry.operators):
            times[timed.signature, timed.phase].append(typical(timed.times_s))
        for (name, _), times_s in times.items():
            if name in known:
                yield known[name], 1, typical(times_s)


def _left_out_error(
    draft: OperatorCosts,
    layers: Sequence[OperatorsObservation],
    layers_s: Sequence[Sequence[Seconds]],
    timings: Sequence[Timings],
    kernels: KernelCosts | None,
    run_log_error: float,
) -> float | None:
    """Error of curves for models that they have not seen, beyond what the curves say of themselves.

        error^2 = mean of (log(sum of curves / sum of timings)^2 - curves' own^2) - run^2

    Drawn models are left out in groups, and each pass is one sum. A model was timed in one run. How far that is off
    the mean of many is no error of curves: an answer adds it for the run that it predicts. ``None`` without drawn
    models. ``layers_s``, ``timings``: typical times of each layer's operators, and the same by family.
    A GPU's prior for calls far from timings is no part of it: it would lower the error of all others.
    """
    drawn = [index for index, entry in enumerate(layers) if entry.model is not None]
    if len(drawn) < _FOLDS:
        return None
    excess = []
    for fold in range(_FOLDS):
        left_out = drawn[fold::_FOLDS]
        rest = [timings[index] for index in sorted({*range(len(layers))}.difference(left_out))]
        families = fit_curves(rest, most_points=_MOST_POINTS // 2, kernels=kernels)
        costs = OperatorDurations(
            replace(draft, families=families, curve_log_error=0.0), use_measured=False
        )
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            passes: list[tuple[tuple[tuple[int, int], ...], Seconds]] = []
            models: dict[tuple[tuple[int, int], ...], list[tuple[Operator, int]]] = {}
            for index in left_out:
                timed = zip(layers[index].operators, layers_s[index], strict=True)
                ran = [(one, time_s) for one, time_s in timed if one.phase is phase]
                # Equal operators are one: whatever every round times again is predicted once.
                model = tuple((id(one.operator), one.num_calls) for one, _ in ran)
                models.setdefault(model, [(one.operator, one.num_calls) for one, _ in ran])
                passes.append((model, sum(one.num_calls * time_s for one, time_s in ran)))
            # Curves are read once for all models.
            costs.durations((call for calls in models.values() for call in calls), phase)
            found = {model: costs.phase(calls, phase) for model, calls in models.items() if calls}
            for model, real_s in passes:
                if model not in found:
                    continue
                error = math.log(max(found[model].time_s, _SMALLEST_S) / max(real_s, _SMALLEST_S))
                excess.append(error**2 - found[model].relative_error ** 2)
    square = float(np.mean(excess)) - run_log_error**2
    return max(_SMALLEST_ERROR, math.sqrt(max(0.0, square)))


def _sum_error(
    draft: OperatorCosts,
    replays: Sequence[ReplayObservation],
    workloads: Sequence[MeasuredWorkload],
    *,
    use_measured: bool,
) -> float:
    """How far sums of operators are off the passes of the reference models: root mean square, in log."""
    known = {entry.workload.name: entry for entry in workloads}
    costs = OperatorDurations(draft, use_measured=use_measured)
    errors = []
    for entry in {(e.workload, e.micro_batch): e for e in replays}.values():
        if entry.workload not in known or (entry.traced is None and not use_measured):
            continue
        steps = None
        if entry.traced is not None:
            steps = costs.step(entry.traced.at(micro_batch=entry.micro_batch))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            sum_s = replayed_s([entry], phase.value) if steps is None else steps[phase].time_s
            points = getattr(known[entry.workload].phases[0], phase.value)
            draws = CurveDraws.sample(points, num_draws=1, rng=np.random.default_rng(0))
            real_s = float(draws.read(entry.micro_batch)[0])
            errors.append(math.log(max(sum_s, _SMALLEST_S) / max(real_s, _SMALLEST_S)))
    if not errors:
        return _ASSUMED_ERROR
    return max(_SMALLEST_ERROR, math.sqrt(sum(error**2 for error in errors) / len(errors)))
