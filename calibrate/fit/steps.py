"""Compute curves, noise and single steps of each workload from its repetitions."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import nnls

from perfmodel.arrays import FloatArray
from perfmodel.documents.observation import PHASES, DeviceStreams, RankSteps, StepObservation
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import (
    ASSUMED_SENSITIVITY,
    PHASE_CURVES,
    CurvePoint,
    MeasuredWorkload,
    PhaseCurves,
    SingleStep,
    StepNoise,
)
from perfmodel.units import Seconds
from perfmodel.workload.workload import Workload

#: A standard error is at least this: two repetitions that agree by chance are not that certain.
_SMALLEST_ERROR = 0.01
_ASSUMED_SPREAD = 0.1
#: Of two repetitions neither can be called the disturbed one.
_PAIR = 2
#: Below the resolution of any clock; keeps the logarithm finite.
_SMALLEST_S = 1e-9
#: What rounding leaves of the variance of equal values.
_NO_VARIANCE = 1e-12
#: Repetitions needed before the sensitivity to machine speed is worth regressing.
_MINIMUM_PAIRS = 8

Values: TypeAlias = Sequence[float] | FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Typical steps of one observation."""

    setting: RunSetting
    round: int
    step_s: Seconds
    """Of the slowest rank. [s]"""
    phases_s: Mapping[str, Seconds]
    """Mean over ranks, per micro-step (the optimizer per step). [s]"""
    rank_steps_s: tuple[Seconds, ...]
    speed_probe_s: Seconds
    ratios: tuple[float, ...]
    """Every step of every rank over what is typical of that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A typical value over repetitions and the standard error of its logarithm."""

    value_s: Seconds
    relative_error: float


def repetition(observation: StepObservation) -> Repetition:
    """Summarise one observation."""
    ranks = observation.ranks
    accumulation = observation.setting.accumulation
    return Repetition(
        setting=observation.setting,
        round=observation.round,
        step_s=max(trimmed_mean(rank.step_s) for rank in ranks),
        phases_s={
            phase: float(np.mean([trimmed_mean(_phase(rank, phase)) for rank in ranks]))
            / (1 if phase == "optimizer" else accumulation)
            for phase in PHASES
        },
        rank_steps_s=tuple(trimmed_mean(rank.step_s) for rank in ranks),
        speed_probe_s=float(np.mean([trimmed_mean(rank.speed_probe_s) for rank in ranks])),
        ratios=tuple(
            float(ratio)
            for rank in ranks
            for ratio in np.array(rank.step_s) / trimmed_mean(rank.step_s)
        ),
    )


def _phase(rank: RankSteps, phase: str) -> Sequence[float]:
    values: Sequence[float] = getattr(rank, f"{phase}_s")
    return values


def by_setting(repetitions: Iterable[Repetition]) -> dict[RunSetting, tuple[Repetition, ...]]:
    """Repetitions of each setting."""
    groups: dict[RunSetting, list[Repetition]] = defaultdict(list)
    for entry in repetitions:
        groups[entry.setting].append(entry)
    return {setting: tuple(group) for setting, group in groups.items()}


def typical_speed(repetitions: Iterable[Repetition]) -> dict[int, Seconds]:
    """Typical time of the speed probe by the number of ranks at work. [s]

    Ranks on one machine slow each other's probe down, always: that is no drift, so that each
    world size has a reference of its own.
    """
    times_s: dict[int, list[Seconds]] = defaultdict(list)
    for entry in repetitions:
        times_s[entry.setting.world_size].append(entry.speed_probe_s)
    return {size: estimate(group).value_s for size, group in sorted(times_s.items())}


def speed_sensitivity(repetitions: Iterable[Repetition]) -> float:
    """Exponent in [0, 1] by which step times follow the speed probe, within settings."""
    groups = by_setting(repetitions).values()
    if sum(map(len, groups)) < _MINIMUM_PAIRS:
        return ASSUMED_SENSITIVITY
    return exponent_within(
        [([e.speed_probe_s for e in group], [e.step_s for e in group]) for group in groups],
        otherwise=ASSUMED_SENSITIVITY,
    )


def exponent_within(groups: Iterable[tuple[Values, Values]], *, otherwise: float) -> float:
    """Exponent in [0, 1] by which second values follow first ones, within groups.

    Least squares of logarithms; ``otherwise`` where the first ones do not differ.
    """
    deviations = [
        [logs - logs.mean() for logs in map(_logs_repetitions, pair)]
        for pair in groups
        if len(pair[0])
    ]
    variance = sum(float(first @ first) for first, _ in deviations)
    if variance < _NO_VARIANCE:
        return otherwise
    covariance = sum(float(first @ second) for first, second in deviations)
    return float(np.clip(covariance / variance, 0.0, 1.0))


def to_speed(
    entry: Repetition, *, speed_probe_s: Mapping[int, Seconds], sensitivity: float
) -> float:
    """Factor that brings a repetition's times to the typical machine speed of its world size."""
    return float((speed_probe_s[entry.setting.world_size] / entry.speed_probe_s) ** sensitivity)


def trimmed_mean(values: Values) -> float:
    """Mean in log without a sixth at either end.

    Nearly as robust as the median against what was disturbed, and more precise. Fewer than six values are
    all kept: of the two speeds of a processor neither can be called the disturbed one.
    """
    return _mean_without(len(values) // 6, values)


def estimate(values_s: Sequence[float]) -> Estimate:
    """Trimmed mean, and the standard error of its logarithm, from one value per repetition.

    From three repetitions on at least the highest and the lowest are dropped: few must stand one that was
    disturbed.
    """
    # One repetition says nothing about its own spread.
    spread = (
        float(_logs_repetitions(values_s).std(ddof=1)) if len(values_s) > 1 else _ASSUMED_SPREAD
    )
    num_dropped = max(len(values_s) // 6, 1 if len(values_s) > _PAIR else 0)
    return Estimate(
        value_s=_mean_without(num_dropped, values_s),
        relative_error=max(_SMALLEST_ERROR, spread / math.sqrt(len(values_s))),
    )


def _mean_without(num_dropped: int, values: Values) -> float:
    """Mean in log without so many at either end."""
    logs = np.sort(_logs_repetitions(values))
    return float(np.exp(logs[num_dropped : len(logs) - num_dropped].mean()))


def _logs_repetitions(values: Values) -> FloatArray:
    return np.log(np.maximum(values, _SMALLEST_S))


#: Fewer rounds do not tell how much they differ; this is assumed instead.
_MINIMUM_ROUNDS = 3
_ASSUMED_ROUND_ERROR = 0.03
#: Points needed before a line through them says more than they do.
_MINIMUM_LINE = 3
#: How far true times stray from a line over the micro-batch, as a standard deviation in log.
_CURVATURE = 0.04
#: Ratios kept per noise distribution.
_NUM_RATIOS = 64


def fit_workload(
    workload: Workload, repetitions: Sequence[Repetition], *, speed_probe_s: Mapping[int, Seconds]
) -> MeasuredWorkload:
    """Curves and noise of one workload, at one machine speed."""
    sensitivity = speed_sensitivity(repetitions)
    groups = by_setting(repetitions)
    world_sizes = sorted({s.world_size for s in groups if _isolates_compute(s)})
    phases = tuple(
        PhaseCurves(
            world_size=world_size,
            **{
                phase: _curve(groups, phase, world_size, speed_probe_s, sensitivity)
                for phase in PHASES
            },
        )
        for world_size in world_sizes
    )
    return MeasuredWorkload(
        workload=workload,
        phases=phases,
        noise=_noise(groups, max(world_sizes)),
        rank_spread=_rank_spread(groups),
        speed_sensitivity=sensitivity,
    )


def round_error(
    repetitions: Sequence[Repetition],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> float:
    """Standard error, in log, of what all settings of a round have in common.

    What the speed probe does not see (other caches, other neighbours) moves whole rounds. Each
    round's mean deviation from the settings' own means is one draw of it.
    """
    deviations: dict[int, list[float]] = defaultdict(list)
    for group in by_setting(repetitions).values():
        logs = _logs(group, speed_probe_s, sensitivities)
        mean = sum(logs.values()) / len(logs)
        for index, value in logs.items():
            deviations[index].append(value - mean)
    rounds = [float(np.mean(values)) for values in deviations.values()]
    if len(rounds) < _MINIMUM_ROUNDS:
        return _ASSUMED_ROUND_ERROR
    return float(np.std(rounds, ddof=1) / math.sqrt(len(rounds)))


def repetition_errors(
    repetitions: Sequence[Repetition],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> dict[int, float]:
    """By the number of ranks at work, how far one repetition is off its setting's mean, in log.

    Root mean square over settings; without settings that were measured twice, nothing is known.
    """
    squares: dict[int, list[float]] = defaultdict(list)
    for setting, group in by_setting(repetitions).items():
        logs = _logs(group, speed_probe_s, sensitivities)
        if len(logs) > 1:
            squares[setting.world_size].append(float(np.var([*logs.values()], ddof=1)))
    return {n: math.sqrt(sum(found) / len(found)) for n, found in sorted(squares.items())}


def _logs(
    group: Sequence[Repetition],
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> dict[int, float]:
    """Logarithm of a setting's step at the typical machine speed, by round."""
    return {
        v.round: math.log(v.step_s)
        + math.log(
            to_speed(
                v,
                speed_probe_s=speed_probe_s,
                sensitivity=sensitivities[v.setting.workload],
            )
        )
        for v in group
    }


def with_device_streams(
    profile: MeasuredWorkload, observations: Sequence[StepObservation]
) -> MeasuredWorkload:
    """Replace the curves of an asynchronous device by dense device times and host times."""
    streams: dict[int, list[DeviceStreams]] = {}
    for observation in observations:
        if observation.device_streams is not None:
            streams.setdefault(observation.setting.micro_batch, []).append(
                observation.device_streams
            )
    if not streams:
        return profile
    curves: dict[str, Any] = {
        name: tuple(
            _point(
                batch,
                [trimmed_mean(getattr(entry, f"{_source(name)}_s")) for entry in entries],
            )
            for batch, entries in sorted(streams.items())
        )
        for name in PHASE_CURVES
        if name != "input"
    }
    phases = tuple(replace(entry, **curves) for entry in profile.phases)
    return replace(profile, phases=phases)


def single_steps(
    groups: Mapping[RunSetting, Sequence[Repetition]],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> tuple[SingleStep, ...]:
    """Each calibrated setting as measured, at one machine speed."""
    steps = []
    for setting, repetitions in groups.items():
        sensitivity = sensitivities[setting.workload]
        result = estimate(
            [
                v.step_s * to_speed(v, speed_probe_s=speed_probe_s, sensitivity=sensitivity)
                for v in repetitions
            ]
        )
        steps.append(
            SingleStep(
                workload=setting.workload,
                world_size=setting.world_size,
                micro_batch=setting.micro_batch,
                synchronisation=setting.synchronisation.value,
                bucket_cap_mb=setting.bucket_cap_mb,
                step_s=result.value_s,
                relative_error=result.relative_error,
            )
        )
    return tuple(steps)


def _source(name: str) -> str:
    return name if name.startswith("dispatch") else f"dense_{name}"


def _isolates_compute(setting: RunSetting) -> bool:
    return setting.synchronisation is (
        Synchronisation.NONE if setting.world_size == 1 else Synchronisation.NO_SYNC
    )


def _curve(
    groups: Mapping[RunSetting, Sequence[Repetition]],
    phase: str,
    world_size: int,
    speed_probe_s: Mapping[int, Seconds],
    sensitivity: float,
) -> tuple[CurvePoint, ...]:
    points = [
        _point(
            setting.micro_batch,
            [
                v.phases_s[phase]
                * to_speed(v, speed_probe_s=speed_probe_s, sensitivity=sensitivity)
                for v in repetitions
            ],
        )
        for setting, repetitions in groups.items()
        if setting.world_size == world_size and _isolates_compute(setting)
    ]
    return smoothed(sorted(points, key=lambda point: point.at))


def smoothed(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Points drawn towards their common line, each as far as its own error warrants.

    The time of a batch is a constant plus a cost per sample, up to a few percent of true
    curvature (caches, vector tails). Each point is the posterior mean of a measurement with its
    error and that line with its curvature.
    """
    if len(points) < _MINIMUM_LINE:
        return tuple(points)
    at = np.array([point.at for point in points])
    times_s = np.array([point.time_s for point in points])
    noise = np.array([point.relative_error for point in points]) ** 2
    curvature = _CURVATURE**2
    line_s = _line(at, times_s, weights=1 / ((noise + curvature) * times_s**2))
    trust = curvature / (curvature + noise)
    return tuple(
        CurvePoint(
            at=point.at,
            time_s=max(0.0, float(expected_s + share * (point.time_s - expected_s))),
            relative_error=float(np.sqrt(share) * point.relative_error),
        )
        for point, expected_s, share in zip(points, line_s, trust, strict=True)
    )


def _line(at: FloatArray, times_s: FloatArray, *, weights: FloatArray) -> FloatArray:
    """Weighted least-squares line with constant and slope not below zero, at the points. [s]"""
    design = np.stack([np.ones_like(at), at / at.max()], axis=1)
    root = np.sqrt(weights)
    scale = float(np.max(root * times_s)) or 1.0
    solution, _ = nnls(design * root[:, None] / scale, times_s * root / scale)
    return np.asarray(design @ solution)


def _point(at: float, values_s: Sequence[float]) -> CurvePoint:
    result = estimate(values_s)
    return CurvePoint(at=at, time_s=result.value_s, relative_error=result.relative_error)


def _noise(
    groups: Mapping[RunSetting, Sequence[Repetition]], world_size: int
) -> tuple[StepNoise, ...]:
    """Distribution of single steps per micro-batch, where ranks do not wait for each other."""
    noise = []
    for setting, repetitions in sorted(groups.items(), key=lambda item: item[0].micro_batch):
        if setting.world_size != world_size or not _isolates_compute(setting):
            continue
        ratios = np.concatenate([repetition.ratios for repetition in repetitions])
        count = min(_NUM_RATIOS, len(ratios))
        probabilities = (np.arange(count) + 0.5) / count
        noise.append(
            StepNoise(
                micro_batch=setting.micro_batch,
                ratios=tuple(float(value) for value in np.quantile(ratios, probabilities)),
            )
        )
    return tuple(noise)


def _rank_spread(groups: Mapping[RunSetting, Sequence[Repetition]]) -> float:
    """Spread of ranks that persists over repetitions: the part that is not step noise.

    Each rank's mean log offset over all no_sync repetitions; with few repetitions the offsets also hold
    noise, whose share is subtracted.
    """
    offsets = [
        np.log(repetition.rank_steps_s) - np.mean(np.log(repetition.rank_steps_s))
        for setting, repetitions in groups.items()
        if setting.world_size > 1 and _isolates_compute(setting)
        for repetition in repetitions
    ]
    if not offsets:
        return 0.0
    largest = max(len(entry) for entry in offsets)
    table = np.array([entry for entry in offsets if len(entry) == largest])
    variance = float(table.mean(axis=0).var(ddof=1))
    noise = float(table.var(axis=0, ddof=1).mean()) / len(table) if len(table) > 1 else variance
    return float(np.sqrt(max(0.0, variance - noise)))
