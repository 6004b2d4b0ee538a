"""Visits to settings, brought to one machine speed, and what they say together.

On a shared machine neighbours slow everything down in bursts and for minutes. The speed probe that
runs between steps sees the same slow-down, so each visit can be brought to the typical speed of the
whole calibration. How much of the probe's slow-down a workload shares is regressed from its own
visits; probe noise makes that exponent smaller than one, as it should for the best correction.

Typical are trimmed means, of steps and of probes alike. A processor whose core a neighbour shares has two
speeds: a median jumps from one to the other, where a mean follows the share of time at each.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.observation import PHASES, RankSteps, StepObservation
from perfmodel.documents.profile import ASSUMED_SENSITIVITY
from perfmodel.parallelism.strategy import Setting
from perfmodel.units import Seconds

#: A standard error is at least this: two visits that agree by chance are not that certain.
_SMALLEST_ERROR = 0.01
_ASSUMED_SPREAD = 0.1
#: Of two visits neither can be called the disturbed one.
_PAIR = 2
#: Below the resolution of any clock; keeps the logarithm finite.
_SMALLEST_S = 1e-9
#: What rounding leaves of the variance of equal values.
_NO_VARIANCE = 1e-12
#: Visits needed before the sensitivity to machine speed is worth regressing.
_MINIMUM_PAIRS = 8

Values: TypeAlias = Sequence[float] | FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Typical steps of one observation."""

    setting: Setting
    round: int
    step_s: Seconds
    """Of the slowest rank, as ``RankSteps`` counts seconds. [s]"""
    wall_s: Seconds
    """The same by the clock on the wall. [s]"""
    phases_s: Mapping[str, Seconds]
    """Mean over ranks, per micro-step (the optimizer per step). [s]"""
    rank_steps_s: tuple[Seconds, ...]
    speed_probe_s: Seconds
    ratios: tuple[float, ...]
    """Every step of every rank over what is typical of that rank, by the clock on the wall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A typical value over visits and the standard error of its logarithm."""

    value_s: Seconds
    relative_error: float


def visit(observation: StepObservation) -> Visit:
    """Summarise one observation."""
    ranks = observation.ranks
    accumulation = observation.setting.accumulation
    return Visit(
        setting=observation.setting,
        round=observation.round,
        step_s=max(trimmed_mean(rank.step_s) for rank in ranks),
        wall_s=max(trimmed_mean(wall_s(rank)) for rank in ranks),
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
            for ratio in np.array(wall_s(rank)) / trimmed_mean(wall_s(rank))
        ),
    )


def wall_s(rank: RankSteps) -> tuple[Seconds, ...]:
    """Every step by the clock on the wall. [s]"""
    return rank.wall_s or rank.step_s


def _phase(rank: RankSteps, phase: str) -> Sequence[float]:
    values: Sequence[float] = getattr(rank, f"{phase}_s")
    return values


def by_setting(visits: Iterable[Visit]) -> dict[Setting, tuple[Visit, ...]]:
    """Visits of each setting."""
    groups: dict[Setting, list[Visit]] = defaultdict(list)
    for entry in visits:
        groups[entry.setting].append(entry)
    return {setting: tuple(group) for setting, group in groups.items()}


def typical_speed(visits: Iterable[Visit]) -> dict[int, Seconds]:
    """Typical time of the speed probe by the number of ranks at work. [s]

    Ranks on one machine slow each other's probe down, always: that is no drift, so that each
    world size has a reference of its own.
    """
    times_s: dict[int, list[Seconds]] = defaultdict(list)
    for entry in visits:
        times_s[entry.setting.world_size].append(entry.speed_probe_s)
    return {size: estimate(group).value_s for size, group in sorted(times_s.items())}


def speed_sensitivity(visits: Iterable[Visit]) -> float:
    """Exponent in [0, 1] by which step times follow the speed probe, within settings."""
    groups = by_setting(visits).values()
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
        [logs - logs.mean() for logs in map(_logs, pair)] for pair in groups if len(pair[0])
    ]
    variance = sum(float(first @ first) for first, _ in deviations)
    if variance < _NO_VARIANCE:
        return otherwise
    covariance = sum(float(first @ second) for first, second in deviations)
    return float(np.clip(covariance / variance, 0.0, 1.0))


def to_speed(entry: Visit, *, speed_probe_s: Mapping[int, Seconds], sensitivity: float) -> float:
    """Factor that brings a visit's times to the typical machine speed of its world size."""
    return float((speed_probe_s[entry.setting.world_size] / entry.speed_probe_s) ** sensitivity)


def trimmed_mean(values: Values) -> float:
    """Mean in log without a sixth at either end.

    Nearly as robust as the median against what was disturbed, and more precise. Fewer than six values are
    all kept: of the two speeds of a processor neither can be called the disturbed one.
    """
    return _mean_without(len(values) // 6, values)


def estimate(values_s: Sequence[float]) -> Estimate:
    """Trimmed mean, and the standard error of its logarithm, from one value per visit.

    From three visits on at least the highest and the lowest are dropped: few must stand one that was
    disturbed.
    """
    # One visit says nothing about its own spread.
    spread = float(_logs(values_s).std(ddof=1)) if len(values_s) > 1 else _ASSUMED_SPREAD
    num_dropped = max(len(values_s) // 6, 1 if len(values_s) > _PAIR else 0)
    return Estimate(
        value_s=_mean_without(num_dropped, values_s),
        relative_error=max(_SMALLEST_ERROR, spread / math.sqrt(len(values_s))),
    )


def _mean_without(num_dropped: int, values: Values) -> float:
    """Mean in log without so many at either end."""
    logs = np.sort(_logs(values))
    return float(np.exp(logs[num_dropped : len(logs) - num_dropped].mean()))


def _logs(values: Values) -> FloatArray:
    return np.log(np.maximum(values, _SMALLEST_S))
