"""Compute curves, noise and single steps of each workload from its repetitions."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from calibrate.summary import DISPATCH, Repetition, by_setting, estimate, streams_s, typical
from perfmodel.documents.observation import PHASES, StepObservation
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import (
    PHASE_CURVES,
    CurvePoint,
    MeasuredWorkload,
    PhaseCurves,
    SingleStep,
    StepNoise,
)
from perfmodel.units import Seconds
from perfmodel.workload import Workload

#: Points needed before a line through them says more than they do.
_MINIMUM_LINE = 3
#: How far true times stray from a line over the micro-batch, as a standard deviation in log.
_CURVATURE = 0.04
#: Ratios kept per noise distribution.
_NUM_RATIOS = 64


def fit_workload(
    workload: Workload, repetitions: Sequence[Repetition], *, spread: float
) -> MeasuredWorkload:
    """Curves and noise of one workload. ``spread`` is that of the machine's ranks."""
    every = by_setting(repetitions)
    # Compute alone: one rank without DDP, several that do not synchronise.
    groups = {
        setting: group
        for setting, group in every.items()
        if setting.synchronisation
        is (Synchronisation.NONE if setting.world_size == 1 else Synchronisation.NO_SYNC)
    }
    # An exchange leaves other caches: only the backward pass, beside which it runs, is as without it.
    beside = {
        setting: every.get(replace(setting, synchronisation=Synchronisation.DDP), group)
        if setting.world_size > 1
        else group
        for setting, group in groups.items()
    }
    # Buffers that replicas are sent in the forward pass are an operation of their own.
    bare = ("forward", "backward") if workload.buffer_bytes else ("backward",)
    world_sizes = sorted({setting.world_size for setting in groups})
    return MeasuredWorkload(
        workload=workload,
        phases=tuple(
            PhaseCurves(
                world_size=world_size,
                **{
                    phase: _curve(groups if phase in bare else beside, phase, world_size)
                    for phase in PHASES
                },
            )
            for world_size in world_sizes
        ),
        noise=_noise(groups, max(world_sizes)),
        rank_spread=spread,
    )


def with_device_streams(
    profile: MeasuredWorkload, observations: Sequence[StepObservation]
) -> MeasuredWorkload:
    """Replace the curves of an asynchronous device by dense device times and host times.

    Curves of several ranks hold what DDP's hooks and buckets cost the host; one rank under DDP tells.
    """
    bare, wrapped = (
        _streams(observations, how) for how in (Synchronisation.NONE, Synchronisation.DDP)
    )
    if not bare:
        return profile
    alone: dict[str, Any] = {
        name: tuple(
            estimate([entry[name] for entry in bare[batch]]).at(batch) for batch in sorted(bare)
        )
        for name in PHASE_CURVES
        if all(name in entry for entries in bare.values() for entry in entries)
    }
    together = dict(alone)
    for name in DISPATCH if wrapped else ():
        extra_s = _difference(bare, wrapped, name)
        together[name] = tuple(
            replace(point, time_s=point.time_s + extra_s) for point in alone[name]
        )
    first, *others = profile.phases
    # Without a second rank its curves are those of the first one.
    others = others or [replace(first, world_size=2)]
    return replace(
        profile,
        phases=(replace(first, **alone), *(replace(entry, **together) for entry in others)),
    )


_Streams = dict[int, list[dict[str, Seconds]]]
"""Typical times of one rank, by micro-batch."""


def _streams(observations: Sequence[StepObservation], how: Synchronisation) -> _Streams:
    """Of steps without DDP, or under it with its default buckets."""
    found: _Streams = defaultdict(list)
    for entry in observations:
        setting = entry.setting
        if entry.device_streams is not None and setting.synchronisation is how:
            found[setting.micro_batch].append(streams_s(entry))
    return found


def _difference(bare: _Streams, wrapped: _Streams, name: str) -> Seconds:
    """What DDP adds to a time of the host, which no batch changes; not below 0. [s]"""
    added_s = [
        typical([entry[name] for entry in entries])
        - typical([entry[name] for entry in bare[batch]])
        for batch, entries in wrapped.items()
        if batch in bare
    ]
    return max(0.0, float(np.mean(added_s))) if added_s else 0.0


def single_steps(groups: Mapping[RunSetting, Sequence[Repetition]]) -> tuple[SingleStep, ...]:
    """Each calibrated setting as measured."""
    estimates = {
        setting: estimate([entry.step_s for entry in repetitions])
        for setting, repetitions in groups.items()
    }
    return tuple(
        SingleStep(
            workload=setting.workload,
            world_size=setting.world_size,
            micro_batch=setting.micro_batch,
            synchronisation=setting.synchronisation.value,
            bucket_cap_mb=setting.bucket_cap_mb,
            step_s=found.value_s,
            relative_error=found.relative_error,
        )
        for setting, found in estimates.items()
    )


def _curve(
    groups: Mapping[RunSetting, Sequence[Repetition]], phase: str, world_size: int
) -> tuple[CurvePoint, ...]:
    points = [
        estimate([entry.phases_s[phase] for entry in repetitions]).at(setting.micro_batch)
        for setting, repetitions in groups.items()
        if setting.world_size == world_size
    ]
    return smoothed(sorted(points, key=lambda point: point.at))


def smoothed(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Points drawn towards their common line, each as far as its own error warrants.

    The time of a batch is a constant plus a cost per sample, neither negative, up to a few percent of
    true curvature (caches, vector tails). Each point is the posterior mean of a measurement with its
    error and that line with its curvature.
    """
    if len(points) < _MINIMUM_LINE:
        return tuple(points)
    at = np.array([point.at for point in points])
    times_s = np.array([point.time_s for point in points])
    noise = np.array([point.relative_error for point in points]) ** 2
    curvature = _CURVATURE**2
    root = np.sqrt(1 / ((noise + curvature) * times_s**2))
    scale = float(np.max(root * times_s))
    design = np.stack([np.ones_like(at), at / at.max()], axis=1)
    solution, _ = nnls(design * root[:, None] / scale, times_s * root / scale)
    trust = curvature / (curvature + noise)
    return tuple(
        CurvePoint(
            at=point.at,
            time_s=max(0.0, float(expected_s + share * (point.time_s - expected_s))),
            relative_error=float(np.sqrt(share) * point.relative_error),
        )
        for point, expected_s, share in zip(points, design @ solution, trust, strict=True)
    )


def _noise(
    groups: Mapping[RunSetting, Sequence[Repetition]], world_size: int
) -> tuple[StepNoise, ...]:
    """Distribution of single steps per micro-batch, where ranks do not wait for each other."""
    noise = []
    for setting, repetitions in sorted(groups.items(), key=lambda item: item[0].micro_batch):
        if setting.world_size != world_size:
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


def rank_spread(repetitions: Iterable[Repetition]) -> float:
    """Spread of ranks that stays through a run, in log: a property of the machine, whatever the model.

    Ranks that exchange gradients wait for the slowest of a run, which need not be that of the next run. Noise
    of steps is drawn step by step, and left out:

        spread^2 = variance of the ranks' typical steps in a run - variance of a step / steps
    """
    alone = [
        each
        for each in repetitions
        if each.setting.world_size > 1 and each.setting.synchronisation is Synchronisation.NO_SYNC
    ]
    if not alone:
        return 0.0
    squares = [
        np.log(each.rank_steps_s).var(ddof=1)
        - np.log(each.ratios).var() * len(each.rank_steps_s) / len(each.ratios)
        for each in alone
    ]
    return math.sqrt(max(0.0, float(np.mean(squares))))
