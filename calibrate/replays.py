"""Replayed steps, summed up: what each operator of a traced step takes in its surroundings."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calibrate.visits import estimate
from perfmodel.documents.observation import ReplayObservation, read_observations
from perfmodel.documents.profile import MeasuredOperator, MeasuredStep, ProfileDocument
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase

#: Below the resolution of any clock.
_SMALLEST_S = 1e-8
#: Sums of a step are no better known than this.
_SMALLEST_ERROR = 0.01


#: Workload, micro-batch and signature of the parameters.
_Step = tuple[str, int, str]


def _step(entry: ReplayObservation) -> _Step:
    return entry.workload, entry.micro_batch, entry.parameters


def of_newest_traces(replays: Sequence[ReplayObservation]) -> list[ReplayObservation]:
    """Without those of earlier traces of a step, which another version made of other operators."""

    def traced(entry: ReplayObservation) -> frozenset[tuple[str, Phase]]:
        return frozenset((operator.signature, operator.phase) for operator in entry.operators)

    newest = {_step(entry): traced(entry) for entry in replays}
    return [entry for entry in replays if traced(entry) == newest[_step(entry)]]


def measured_steps(
    replays: Sequence[ReplayObservation], speed_probe_s: Seconds
) -> tuple[MeasuredStep, ...]:
    """Every replayed step: each operator's typical time, so that their sums are typical sums."""
    groups: dict[_Step, list[ReplayObservation]] = defaultdict(list)
    for entry in of_newest_traces(replays):
        groups[_step(entry)].append(entry)
    if not groups:
        return ()
    # One factor for all: a single probe is too noisy to correct a single replay by it.
    probes_s = [float(np.median(entry.speed_probe_s)) for entry in replays]
    factor = speed_probe_s / float(np.median(probes_s))
    deviation = _deviation([*groups.values()])
    return tuple(
        _measured_step(key, group, factor, deviation) for key, group in sorted(groups.items())
    )


def _deviation(groups: Sequence[Sequence[ReplayObservation]]) -> float:
    """How far one replay is off its step's mean, in log: what few rounds of one step cannot tell."""
    squares = [
        float(np.var([math.log(_whole_s(entry)) for entry in group], ddof=1))
        for group in groups
        if len(group) > 1
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _whole_s(entry: ReplayObservation) -> Seconds:
    phases_s = (entry.forward_s, entry.backward_s, entry.optimizer_s)
    return max(_SMALLEST_S, sum(float(np.median(times_s)) for times_s in phases_s))


def _measured_step(
    key: _Step,
    group: Sequence[ReplayObservation],
    factor: float,
    deviation: float,
) -> MeasuredStep:
    totals = {
        phase: estimate(
            [factor * float(np.median(getattr(entry, f"{phase}_s"))) for entry in group]
        )
        for phase in ("forward", "backward", "optimizer")
    }
    times: dict[tuple[str, Phase], list[Seconds]] = defaultdict(list)
    counts: dict[tuple[str, Phase], int] = {}
    for entry in group:
        for operator in entry.operators:
            at = operator.signature, operator.phase
            times[at].append(factor * float(np.median(operator.times_s)))
            counts[at] = operator.num_calls
    typical = {at: float(np.median(values_s)) for at, values_s in times.items()}
    sums: dict[Phase, Seconds] = defaultdict(float)
    for at, time_s in typical.items():
        sums[at[1]] += counts[at] * time_s
    # Medians of skewed times add up to less than the median of their sum.
    scale = {
        phase: totals[phase.value].value_s / max(sums[phase], _SMALLEST_S)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    return MeasuredStep(
        workload=key[0],
        micro_batch=key[1],
        parameters=key[2],
        operators=tuple(
            MeasuredOperator(signature=at[0], phase=at[1].value, time_s=time_s * scale[at[1]])
            for at, time_s in typical.items()
        ),
        optimizer_s=totals["optimizer"].value_s,
        relative_error=max(_SMALLEST_ERROR, deviation / math.sqrt(len(group))),
    )


def replays_in(observations: Path) -> list[ReplayObservation]:
    """Replayed steps of a file of observations."""
    return [
        entry for entry in read_observations(observations) if isinstance(entry, ReplayObservation)
    ]


def with_replays(profile: ProfileDocument, replays: Sequence[ReplayObservation]) -> ProfileDocument:
    """The profile with replayed steps beside those that it has; a new one replaces its old self."""
    assert profile.operators is not None, "profiles without prices are refused before measuring"
    speed_probe_s = profile.speed_probe_s[min(profile.speed_probe_s)]
    added = measured_steps(replays, speed_probe_s)
    new = {(step.workload, step.micro_batch, step.parameters) for step in added}
    kept = [
        step
        for step in profile.operators.measured
        if (step.workload, step.micro_batch, step.parameters) not in new
    ]
    operators = profile.operators.model_copy(update={"measured": (*kept, *added)})
    return profile.model_copy(update={"operators": operators})
