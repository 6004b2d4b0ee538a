"""Compute curves, noise and single steps of each workload from its visits."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from calibrate.visits import (
    Visit,
    by_setting,
    estimate,
    speed_sensitivity,
    to_speed,
    trimmed_mean,
)
from perfmodel.arrays import FloatArray
from perfmodel.documents.observation import PHASES, DeviceStreams, StepObservation
from perfmodel.documents.profile import (
    PHASE_CURVES,
    CurvePoint,
    PhaseCurves,
    SingleStep,
    StepNoise,
    WorkloadProfile,
)
from perfmodel.parallelism.strategy import Setting, Synchronisation
from perfmodel.units import Seconds
from perfmodel.workload.workload import Workload

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
    workload: Workload, visits: Sequence[Visit], *, speed_probe_s: Mapping[int, Seconds]
) -> WorkloadProfile:
    """Curves and noise of one workload, at one machine speed."""
    sensitivity = speed_sensitivity(visits)
    groups = by_setting(visits)
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
    return WorkloadProfile(
        workload=workload,
        phases=phases,
        noise=_noise(groups, max(world_sizes)),
        rank_spread=_rank_spread(groups),
        speed_sensitivity=sensitivity,
    )


def round_error(
    visits: Sequence[Visit],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> float:
    """Standard error, in log, of what all settings of a round have in common.

    What the speed probe does not see (other caches, other neighbours) moves whole rounds. Each
    round's mean deviation from the settings' own means is one draw of it.
    """
    deviations: dict[int, list[float]] = defaultdict(list)
    for group in by_setting(visits).values():
        logs = _logs(group, speed_probe_s, sensitivities)
        mean = sum(logs.values()) / len(logs)
        for index, value in logs.items():
            deviations[index].append(value - mean)
    rounds = [float(np.mean(values)) for values in deviations.values()]
    if len(rounds) < _MINIMUM_ROUNDS:
        return _ASSUMED_ROUND_ERROR
    return float(np.std(rounds, ddof=1) / math.sqrt(len(rounds)))


def visit_errors(
    visits: Sequence[Visit],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> dict[int, float]:
    """By the number of ranks at work, how far one visit is off its setting's mean, in log.

    Root mean square over settings; without settings that were visited twice, nothing is known.
    """
    squares: dict[int, list[float]] = defaultdict(list)
    for setting, group in by_setting(visits).items():
        logs = _logs(group, speed_probe_s, sensitivities)
        if len(logs) > 1:
            squares[setting.world_size].append(float(np.var([*logs.values()], ddof=1)))
    return {n: math.sqrt(sum(found) / len(found)) for n, found in sorted(squares.items())}


def _logs(
    group: Sequence[Visit],
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
    profile: WorkloadProfile, observations: Sequence[StepObservation]
) -> WorkloadProfile:
    """Replace the curves of an asynchronous device by dense device times and host times."""
    streams: dict[int, list[DeviceStreams]] = {}
    for observation in observations:
        if observation.device_streams is not None:
            streams.setdefault(observation.setting.micro_batch, []).append(
                observation.device_streams
            )
    if not streams:
        return profile
    curves = {
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
    phases = tuple(entry.model_copy(update=curves) for entry in profile.phases)
    return profile.model_copy(update={"phases": phases})


def single_steps(
    groups: Mapping[Setting, Sequence[Visit]],
    *,
    speed_probe_s: Mapping[int, Seconds],
    sensitivities: Mapping[str, float],
) -> tuple[SingleStep, ...]:
    """Each calibrated setting as measured, at one machine speed."""
    steps = []
    for setting, visits in groups.items():
        sensitivity = sensitivities[setting.workload]
        result = estimate(
            [
                v.step_s * to_speed(v, speed_probe_s=speed_probe_s, sensitivity=sensitivity)
                for v in visits
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


def _isolates_compute(setting: Setting) -> bool:
    return setting.synchronisation is (
        Synchronisation.NONE if setting.world_size == 1 else Synchronisation.NO_SYNC
    )


def _curve(
    groups: Mapping[Setting, Sequence[Visit]],
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
                for v in visits
            ],
        )
        for setting, visits in groups.items()
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


def _noise(groups: Mapping[Setting, Sequence[Visit]], world_size: int) -> tuple[StepNoise, ...]:
    """Distribution of single steps per micro-batch, where ranks do not wait for each other."""
    noise = []
    for setting, visits in sorted(groups.items(), key=lambda item: item[0].micro_batch):
        if setting.world_size != world_size or not _isolates_compute(setting):
            continue
        ratios = np.concatenate([visit.ratios for visit in visits])
        count = min(_NUM_RATIOS, len(ratios))
        probabilities = (np.arange(count) + 0.5) / count
        noise.append(
            StepNoise(
                micro_batch=setting.micro_batch,
                ratios=tuple(float(value) for value in np.quantile(ratios, probabilities)),
            )
        )
    return tuple(noise)


def _rank_spread(groups: Mapping[Setting, Sequence[Visit]]) -> float:
    """Spread of ranks that persists over visits: the part that is not step noise.

    Each rank's mean log offset over all no_sync visits; with few visits the offsets also hold
    noise, whose share is subtracted.
    """
    offsets = [
        np.log(visit.rank_steps_s) - np.mean(np.log(visit.rank_steps_s))
        for setting, visits in groups.items()
        if setting.world_size > 1 and _isolates_compute(setting)
        for visit in visits
    ]
    if not offsets:
        return 0.0
    largest = max(len(entry) for entry in offsets)
    table = np.array([entry for entry in offsets if len(entry) == largest])
    variance = float(table.mean(axis=0).var(ddof=1))
    noise = float(table.var(axis=0, ddof=1).mean()) / len(table) if len(table) > 1 else variance
    return float(np.sqrt(max(0.0, variance - noise)))
