"""What real steps take beyond the sum of their operators, per call."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.replays import Pair, StepKey, replayed_s, step_key, steps_over_replays
from perfmodel.arrays import FloatArray
from perfmodel.cost.terms import CurveDraws
from perfmodel.documents.observation import ReplayObservation
from perfmodel.machine.measured import CallOverhead, MeasuredStep, MeasuredWorkload
from perfmodel.units import Seconds
from perfmodel.workload.operator import Phase

#: Below the resolution of any clock.
_SMALLEST_S = 1e-8
#: Sums over reference models are no better known than this, whatever few of them say.
_SMALLEST_ERROR = 0.02
#: What is assumed of sums that no reference model was compared with.
ASSUMED_ERROR = 0.1

NO_OVERHEAD = CallOverhead(
    forward_s=0.0,
    backward_s=0.0,
    optimizer_s=0.0,
    forward_log_error=ASSUMED_ERROR,
    backward_log_error=ASSUMED_ERROR,
    optimizer_log_error=ASSUMED_ERROR,
)


def fit_overhead(
    measured: Sequence[MeasuredStep],
    replays: Sequence[ReplayObservation],
    workloads: Sequence[MeasuredWorkload],
) -> CallOverhead:
    """What real steps of the reference models take beyond the sum of their operators, per call.

    Less than nothing where the steps call their operators more cheaply than a replay does: a backward
    pass calls them from C++.
    """
    rows = _rows_in_turn(replays)
    least_s = -math.inf
    if not rows:
        # Steps of other moments say too little to tell that.
        rows, least_s = _rows_apart(measured, replays, workloads), 0.0
    fitted = {phase: _per_call(rows[phase], least_s) for phase in ("forward", "backward")}
    # The optimizer is timed as one call with its loop over the tensors: nothing is left to add.
    fitted["optimizer"] = 0.0, _remaining_error(rows["optimizer"], 0.0)
    return CallOverhead(
        forward_s=fitted["forward"][0],
        backward_s=fitted["backward"][0],
        optimizer_s=fitted["optimizer"][0],
        forward_log_error=fitted["forward"][1],
        backward_log_error=fitted["backward"][1],
        optimizer_log_error=fitted["optimizer"][1],
    )


#: Real time, sum over the operators, and calls of one pass.
PassRow = tuple[Seconds, Seconds, int]
_Rows = dict[str, list[PassRow]]


def _rows_in_turn(replays: Sequence[ReplayObservation]) -> _Rows:
    """Of replays that took turns with real steps: both saw the same machine; a row for each step."""
    groups: dict[StepKey, list[Pair]] = defaultdict(list)
    for entry in replays:
        if entry.beside is not None:
            groups[step_key(entry)].append((entry.beside, entry))
    rows: _Rows = defaultdict(list)
    for pairs in groups.values():
        for phase, calls in call_counts(pairs[0][1]).items():
            sum_s = replayed_s([replay for _, replay in pairs], phase)
            rows[phase].append((sum_s * steps_over_replays(pairs, phase).value_s, sum_s, calls))
    return rows


def _rows_apart(
    measured: Sequence[MeasuredStep],
    replays: Sequence[ReplayObservation],
    workloads: Sequence[MeasuredWorkload],
) -> _Rows:
    """Of replays and steps of different moments, brought to one machine speed."""
    known = {entry.workload.name: entry for entry in workloads}
    rows: _Rows = defaultdict(list)
    for step in measured:
        profile = known.get(step.workload)
        if profile is None:
            continue
        counts = call_counts(_replay_of(step, replays))
        sums = {
            "forward": _sum_s(step, Phase.FORWARD, replays),
            "backward": _sum_s(step, Phase.BACKWARD, replays),
            "optimizer": step.optimizer_s,
        }
        for phase, sum_s in sums.items():
            real_s = real_s_of(profile, phase, step.micro_batch)
            rows[phase].append((real_s, sum_s, counts[phase]))
    return rows


def call_counts(entry: ReplayObservation) -> Mapping[str, int]:
    """Calls of each phase; of the optimizer the tensors that it goes over."""
    counts: dict[str, int] = {"forward": 0, "backward": 0, "optimizer": entry.num_trained}
    for operator in entry.operators:
        counts[operator.phase.value] += operator.num_calls
    return counts


def _sum_s(step: MeasuredStep, phase: Phase, replays: Sequence[ReplayObservation]) -> Seconds:
    counts = {
        (operator.signature, operator.phase.value): operator.num_calls
        for operator in _replay_of(step, replays).operators
    }
    return sum(
        counts[operator.signature, operator.phase] * operator.time_s
        for operator in step.operators
        if operator.phase == phase.value
    )


def _replay_of(step: MeasuredStep, replays: Sequence[ReplayObservation]) -> ReplayObservation:
    wanted = step.workload, step.micro_batch, step.parameters
    return next(entry for entry in replays if step_key(entry) == wanted)


def real_s_of(profile: MeasuredWorkload, phase: str, micro_batch: int) -> Seconds:
    """What a phase of a reference model takes in its steps. [s]"""
    points = getattr(profile.phases[0], phase)
    draws = CurveDraws.sample(points, num_draws=1, rng=np.random.default_rng(0))
    return float(draws.read(micro_batch)[0])


def _per_call(rows: Sequence[PassRow], least_s: Seconds = -math.inf) -> tuple[Seconds, float]:
    """Least relative squares of ``real = sum + overhead * calls``, and what remains, in log."""
    if not rows:
        return 0.0, ASSUMED_ERROR
    real_s, sum_s, calls = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    slope = calls / real_s
    overhead_s = float(max(least_s, slope @ (1 - sum_s / real_s) / max(slope @ slope, 1e-12)))
    return overhead_s, _remaining_error(rows, overhead_s)


def _remaining_error(rows: Sequence[PassRow], overhead_s: Seconds) -> float:
    """Root mean square of what sums with their overhead miss, in log."""
    if not rows:
        return ASSUMED_ERROR
    real_s, sum_s, calls = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    rest = np.log(np.maximum(sum_s + overhead_s * calls, _SMALLEST_S) / real_s)
    return root_mean_square(rest)


def root_mean_square(errors: Sequence[float] | FloatArray) -> float:
    """Of errors in log; no smaller than sums over reference models can be known."""
    return max(_SMALLEST_ERROR, float(np.sqrt(np.mean(np.square(errors)))))
