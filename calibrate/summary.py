"""Runs of a setting, summed up: what is typical of each, and how far runs of one setting differ."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfmodel.documents.observation import PHASES, StepObservation
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import OCCASION_OVER_RUN, CurvePoint, Repeatability, SingleStep
from perfmodel.statistics import FloatArray
from perfmodel.units import Seconds

#: Spread of runs, in log, that is believed with the weight of one run more: few that agree by chance are not that
#: certain. Two runs that agree have an error of 1 %, ten of 0.2 %.
_BELIEVED_SPREAD = 0.02
#: Of a value that was measured once.
_ASSUMED_SPREAD = 0.1
#: A step that takes so much longer than its device waits for the host.
_WAITING = 1.03
#: Curves of what the host issues.
DISPATCH: Final = ("dispatch_forward", "dispatch_backward", "dispatch_optimizer")
#: Below the resolution of any clock; keeps the logarithm finite.
_SMALLEST_S = 1e-9
#: Fewer rounds do not tell how much they differ; this is assumed instead.
_MINIMUM_ROUNDS = 3
_ASSUMED_ROUND = 0.03
#: Occasions differ by so much at least, in log: ResNet-50 on 1 to 8 A100, repeated over three years, differs by 0.6 %
#: (mvsjober/ml-benchmarks @d5c4253c).
_LEAST_OCCASION = 0.006


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Typical steps of one run of a setting."""

    setting: RunSetting
    round: int
    step_s: Seconds
    """Of the slowest rank. [s]"""
    phases_s: Mapping[str, Seconds]
    """Mean over ranks, per micro-step (the optimizer per step). [s]"""
    rank_steps_s: tuple[Seconds, ...]
    ratios: tuple[float, ...]
    """Every step of every rank over what is typical of that rank."""
    device_s: Seconds
    """Of the device alone where it is asynchronous, else as ``step_s``. [s]"""
    waits: bool = False
    """Whether the device waits for its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A typical value over runs and the standard error of its logarithm."""

    value_s: Seconds
    relative_error: float
    num_repetitions: int

    def at(self, at: float) -> CurvePoint:
        """As a point of a curve."""
        return CurvePoint(at=at, time_s=self.value_s, relative_error=self.relative_error)


def typical(values: Sequence[float] | FloatArray) -> float:
    """Geometric mean."""
    # ``mean`` takes twice as long to start as to add few numbers.
    return float(np.exp(np.add.reduce(_logs(values)) / len(values)))


def typical_each(rows: Sequence[Sequence[float]]) -> list[float]:
    """Geometric mean of each row, of equal rows at once."""
    if len({len(row) for row in rows}) != 1:
        return [typical(row) for row in rows]
    found: list[float] = np.exp(
        np.add.reduce(_logs(np.array(rows)), axis=1) / len(rows[0])
    ).tolist()
    return found


def farthest(points: FloatArray, count: int) -> list[int]:
    """Indices of the first point and of those that lie farthest from all chosen before; no place twice.

    Distances are in standard deviations of each coordinate (Gonzalez 1985).
    """
    deviations = points.std(axis=0)
    scaled = points / np.where(deviations > 0, deviations, 1.0)
    chosen, distance = [0], np.full(len(points), np.inf)
    while len(chosen) < count:
        distance = np.minimum(distance, np.square(scaled - scaled[chosen[-1]]).sum(axis=1))
        if not distance.any():
            break
        chosen.append(int(np.argmax(distance)))
    return chosen


def estimate(values_s: Sequence[float]) -> Estimate:
    """Geometric mean, and the standard error of its logarithm, from one value per run."""
    count = len(values_s)
    spread = float(_logs(values_s).std(ddof=1)) if count > 1 else _ASSUMED_SPREAD
    believed = math.sqrt((_BELIEVED_SPREAD**2 + (count - 1) * spread**2) / count)
    return Estimate(
        value_s=typical(values_s),
        relative_error=max(believed, spread) / math.sqrt(count),
        num_repetitions=count,
    )


def undisturbed(times_s: Sequence[float]) -> float:
    """Lower quartile of the times of a device with a queue, one of those measured. [s]

    A host that pauses leaves gaps in some passes; nothing makes a kernel faster.
    """
    return float(np.quantile(times_s, 0.25, method="lower"))


def _logs(values: Sequence[float] | FloatArray) -> FloatArray:
    return np.log(np.maximum(values, _SMALLEST_S))


def repetition(observation: StepObservation) -> Repetition:
    """Sum up one run."""
    ranks = observation.ranks
    per_phase = {"optimizer": 1} | dict.fromkeys(PHASES[:-1], observation.setting.accumulation)
    step_s, streams = max(typical(rank.step_s) for rank in ranks), observation.device_streams
    device_s, input_s = step_s, 0.0
    if streams is not None:
        # Without gaps that the host leaves.
        dense = (streams.dense_forward_s, streams.dense_backward_s, streams.dense_optimizer_s)
        device_s = sum(map(undisturbed, dense))
        input_s = typical(streams.dense_input_s) if streams.dense_input_s else 0.0
    return Repetition(
        setting=observation.setting,
        round=observation.round,
        step_s=step_s,
        device_s=device_s,
        waits=step_s > _WAITING * (device_s + input_s),
        phases_s={
            phase: float(np.mean([typical(getattr(rank, f"{phase}_s")) for rank in ranks]))
            / per_phase[phase]
            for phase in PHASES
        },
        rank_steps_s=tuple(typical(rank.step_s) for rank in ranks),
        ratios=tuple(
            float(ratio) for rank in ranks for ratio in np.array(rank.step_s) / typical(rank.step_s)
        ),
    )


def streams_s(observation: StepObservation) -> dict[str, Seconds]:
    """Typical times of host and device in a step, by the name of their curve; empty where the two are one. [s]

        dispatch = dispatch of a step apart * min(1, step / sum of dispatch of a step apart)

    A host issues a steady step in no more time than the step takes. Steps apart are few, and each waits for the
    device to end the one before; the loop has many more. Some take twice as long, when something else asks the driver.
    """
    streams = observation.device_streams
    if streams is None:
        return {}
    found = {name: float(np.median(getattr(streams, f"{name}_s"))) for name in DISPATCH}
    dense = {name: getattr(streams, f"dense_{name}_s") for name in PHASES}
    found |= {name: undisturbed(times_s) for name, times_s in dense.items() if times_s}
    share = repetition(observation).step_s / sum(found[name] for name in DISPATCH)
    return found | {name: found[name] * min(1.0, share) for name in DISPATCH}


def calibrated_setting(step: SingleStep) -> RunSetting:
    """The setting whose step went into a profile."""
    return RunSetting(
        workload=step.workload,
        world_size=step.world_size,
        micro_batch=step.micro_batch,
        synchronisation=Synchronisation(step.synchronisation),
        bucket_cap_mb=step.bucket_cap_mb,
    )


def by_setting(repetitions: Iterable[Repetition]) -> dict[RunSetting, tuple[Repetition, ...]]:
    """Runs of each setting."""
    groups: dict[RunSetting, list[Repetition]] = defaultdict(list)
    for entry in repetitions:
        groups[entry.setting].append(entry)
    return {setting: tuple(group) for setting, group in groups.items()}


def repeatability(repetitions: Sequence[Repetition]) -> Repeatability:
    """How far rounds, and runs within a round, differ: standard deviations of the logarithm.

    Two-way analysis of variance by moments: log step = setting + round + run.

        run^2   = mean square of what remains after the means of settings and of rounds
        round^2 = variance of the rounds' means - run^2 / settings per round, not below 0

    No campaign sees two occasions. What other work takes from a shared host varies alike over seconds and
    over hours (1/f noise: as much in each decade of time). Runs of a second are spread over three decades;
    hours are one more, so that

        occasion^2 = 0.43 mean square of run, at least 0.6 %

    Steps that wait for their host vary as the host does, and tell that alone. Where all of them wait, nothing tells
    the device apart: it is taken to vary as much. A host varies over hours as from round to round, or as from run
    to run where nothing tells these apart. Steps of several ranks tell neither where a rank alone waits.
    """
    groups = {setting: g for setting, g in by_setting(repetitions).items() if len(g) > 1}
    waiting = {setting for setting, g in groups.items() if any(entry.waits for entry in g)}
    behind = {(setting.workload, setting.micro_batch) for setting in waiting}
    steady = [g for s, g in groups.items() if (s.workload, s.micro_batch) not in behind]
    if not steady:
        waiting, steady = set(), [*groups.values()]
    device = _variation(steady)
    rounds = _ASSUMED_ROUND if device.round is None else device.round
    mean_square = float(np.mean([value**2 for value in device.run.values()])) if device.run else 0.0
    occasion = max(_LEAST_OCCASION, math.sqrt(OCCASION_OVER_RUN * mean_square))
    if not waiting:
        return Repeatability(run=device.run, round=rounds, occasion=occasion)
    of_host = [groups[setting] for setting in waiting]
    squares = [_logs([entry.step_s for entry in group]).var(ddof=1) for group in of_host]
    return Repeatability(
        run=device.run,
        round=rounds,
        occasion=occasion,
        host=math.sqrt(float(np.mean(squares))),
        host_occasion=_variation(of_host).round if len(of_host) > 1 else None,
    )


class _Variation(NamedTuple):
    run: dict[int, float]
    """By the number of ranks."""
    round: float | None
    """None: too few to tell."""


def _variation(groups: Iterable[Sequence[Repetition]]) -> _Variation:
    """How far runs and rounds differ, by moments."""
    by_round: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for group in groups:
        logs = _logs([entry.step_s for entry in group])
        for entry, value in zip(group, logs - logs.mean(), strict=True):
            by_round[entry.round].append((entry.setting.world_size, float(value)))
    squares: dict[int, list[float]] = defaultdict(list)
    means = []
    for deviations in by_round.values():
        means.append(float(np.mean([value for _, value in deviations])))
        for world_size, value in deviations:
            squares[world_size].append((value - means[-1]) ** 2)
    # Both means take degrees of freedom: of each setting one, of each round one.
    num_settings = max(1, sum(map(len, by_round.values())) // max(1, len(means)))
    left = (1 - 1 / max(2, len(means))) * (1 - 1 / max(2, num_settings))
    run = {n: math.sqrt(float(np.mean(found)) / left) for n, found in sorted(squares.items())}
    if len(means) < _MINIMUM_ROUNDS:
        return _Variation(run, None)
    noise = float(np.mean([value**2 for value in run.values()])) / num_settings
    return _Variation(run, math.sqrt(max(0.0, float(np.var(means, ddof=1)) - noise)))
