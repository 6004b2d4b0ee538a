"""Replayed steps, summed up: what each operator of a traced step takes in its surroundings."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from calibrate.summary import typical, undisturbed
from perfmodel.documents.observation import (
    DDP_PROBE,
    HOST_PROBES,
    PHASES,
    QUEUE_PROBE,
    ComputeObservation,
    IsolatedOperator,
    OperatorsObservation,
    OptimizerPoint,
    ReplayObservation,
    StepObservation,
    Taken,
    TimedOperator,
    failures,
    read_observations,
)
from perfmodel.machine.measured import ComputeRate, MeasuredMachine, MeasuredOperator, MeasuredStep
from perfmodel.units import Seconds
from perfmodel.workload import Operator, Phase, TensorSpec, base_name
from perfmodel.workload.step import TracedStep

#: Below the resolution of any clock.
_SMALLEST_S = 1e-8
#: Sums of a step are no better known than this.
_SMALLEST_ERROR = 0.01

#: Rounds of one start of processes. Starts differ by 2 % (0 to 6, by model), runs of one by 3 %.
_RUNS_PER_START: Final = 2
#: Of a step on one device, without its input.
_PHASES = PHASES[1:]

_Taken = TypeVar("_Taken", bound=Taken)
_Timed = TypeVar("_Timed", TimedOperator, IsolatedOperator, OptimizerPoint)
#: Of a timed call that is left at least: calls that start no kernel take nothing else than events do.
_LEAST_SHARE = 1e-3
#: These are not timed by events, or tell what those take.
_WITHOUT_EVENTS = (*HOST_PROBES, DDP_PROBE, QUEUE_PROBE)


def event_s(rates: Iterable[ComputeRate]) -> Seconds:
    """What two events around a call add to its time; 0 where it was not measured. [s]

    time of n kernels between two events = event_s + n * kernel_s
    """
    times_s = {rate.shape[0]: rate.time_s for rate in rates if rate.probe == QUEUE_PROBE}
    if len(times_s) < 2:
        return 0.0
    (few, few_s), *_, (many, many_s) = sorted(times_s.items())
    return max(0.0, (many * few_s - few * many_s) / (many - few))


def without_events(entry: _Taken, event_s: Seconds) -> _Taken:
    """The observation with this much less for every call between two events, if it has such. [s]

    Of passes the lower quartile counts: in one or the other the device waits for the host.
    """

    def less(times_s: Sequence[Seconds], count: int = 1) -> tuple[Seconds, ...]:
        return tuple(max(time_s - count * event_s, _LEAST_SHARE * time_s) for time_s in times_s)

    def kept(times_s: Sequence[Seconds]) -> tuple[Seconds, ...]:
        return less([undisturbed(times_s)])

    def timed(calls: Sequence[_Timed]) -> tuple[_Timed, ...]:
        return tuple(c.model_copy(update={"times_s": kept(c.times_s)}) for c in calls)

    found: dict[str, Any] = {}
    match entry:
        case ComputeObservation() if entry.probe not in _WITHOUT_EVENTS:
            found["durations_s"] = less(entry.durations_s)
        case StepObservation() if entry.device_streams is not None:
            micro, streams = entry.setting.accumulation, entry.device_streams
            marks = {"input": micro, "forward": micro, "backward": micro, "optimizer": 1}
            dense = {f"dense_{name}_s": count for name, count in marks.items()}
            shorter = {n: less(getattr(streams, n), count) for n, count in dense.items()}
            found["device_streams"] = streams.model_copy(update=shorter)
        case OperatorsObservation():
            found["operators"] = timed(entry.operators)
            found["optimizers"] = timed(entry.optimizers)
        case ReplayObservation() if entry.operators:
            found["operators"] = timed(entry.operators)
            found["optimizer_s"] = kept(entry.optimizer_s)
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                calls = (o for o in found["operators"] if o.phase is phase)
                sum_s = sum(call.num_calls * time_s for call in calls for time_s in call.times_s)
                found[f"{phase.value}_s"] = (sum_s,)
    return entry.model_copy(update=found)


#: Workload, micro-batch and signature of the parameters.
StepKey = tuple[str, int, str]


def step_key(entry: ReplayObservation) -> StepKey:
    """What step it is of."""
    return entry.workload, entry.micro_batch, entry.parameters


def of_newest_traces(replays: Sequence[ReplayObservation]) -> list[ReplayObservation]:
    """Without those of earlier traces of a step, which another version made of other operators."""

    def traced(entry: ReplayObservation) -> frozenset[tuple[str, Phase]]:
        return frozenset((operator.signature, operator.phase) for operator in entry.operators)

    newest = {step_key(entry): traced(entry) for entry in replays}
    return [entry for entry in replays if traced(entry) == newest[step_key(entry)]]


def replayed_s(group: Sequence[ReplayObservation], phase: str | None = None) -> Seconds:
    """Typical time of the replays of one step: of one phase, or the sum of all. [s]"""
    if phase is None:
        return sum(replayed_s(group, each) for each in _PHASES)
    return typical([typical(getattr(entry, f"{phase}_s")) for entry in group])


def measured_steps(replays: Sequence[ReplayObservation]) -> tuple[MeasuredStep, ...]:
    """Every replayed step: each operator's typical time, so that their sums are typical sums."""
    groups: dict[StepKey, dict[int, list[ReplayObservation]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for entry in of_newest_traces([e for e in replays if e.operators]):
        groups[step_key(entry)][1].append(entry)
    for entry in (e for e in replays if e.trained_s and not e.operators):
        of_step = groups.get(step_key(entry))
        if of_step and entry.calls in {each.calls for each in of_step[1]}:
            of_step[entry.world_size].append(entry)
    for of_step in groups.values():
        # Replays without a training, of a time when no code was at hand, know less.
        if any(e.trained_s and e.operators for e in of_step[1]):
            of_step[1] = [e for e in of_step[1] if e.trained_s]
    counts = {1}.union(*groups.values())
    deviations = {n: _deviation([s[n] for s in groups.values() if n in s]) for n in counts}
    run = _run_log_error([trained for s in groups.values() for trained in s.values()])
    steps = (_measured_step(key, g, deviations) for key, g in sorted(groups.items()))
    return tuple(replace(step, run_log_error=run) for step in steps)


def _log_s(entry: ReplayObservation) -> float:
    """Logarithm of its training, or of its replays if its model was not trained."""
    return math.log(max(_SMALLEST_S, entry.trained_s or replayed_s([entry])))


def _run_log_error(groups: Sequence[Sequence[ReplayObservation]]) -> float | None:
    """How far one more run of a step is off its mean, in log: starts and runs together."""
    squares = [np.var([_log_s(e) for e in group], ddof=1) for group in groups if len(group) > 1]
    return math.sqrt(float(np.mean(squares))) if squares else None


def _deviation(groups: Sequence[Sequence[ReplayObservation]]) -> float:
    """How far one replay is off its step's mean, in log: what few rounds of one step cannot tell.

    Starts of processes differ, and so do runs of one: random effects b and w. With n runs in S starts

        mean square of starts = sum over starts of runs * (mean of a start - mean)^2 / (S - 1) = w^2 + n/S b^2

    is n times the variance of the mean. It counts where it is more than the variance of single runs, for b^2 >= 0.
    What the next start adds is part of the machine's run-to-run deviation.
    """
    squares, of_starts = [], []
    for group in (group for group in groups if len(group) > 1):
        starts: dict[int, list[float]] = defaultdict(list)
        for entry in group:
            starts[start_of(entry.round)].append(_log_s(entry))
        runs = [log for logs in starts.values() for log in logs]
        means = [np.mean(logs) for logs in starts.values() for _ in logs]
        squares.append(np.var(runs, ddof=1))
        if len(starts) > 1:
            of_starts.append(np.var(means) * len(runs) / (len(starts) - 1))
    return math.sqrt(max(float(np.mean(each or [0.0])) for each in (squares, of_starts)))


def _measured_step(
    key: StepKey,
    by_ranks: Mapping[int, Sequence[ReplayObservation]],
    deviations: Mapping[int, float],
) -> MeasuredStep:
    group = [entry for entry in by_ranks[1] if entry.operators]
    errors = {
        # Where each step has one round on that number of ranks, they scatter as one does.
        ranks: max(_SMALLEST_ERROR, (deviations[ranks] or deviations[1]) / math.sqrt(len(entries)))
        for ranks, entries in by_ranks.items()
    }
    trained_s = {
        ranks: typical(times_s)
        for ranks, entries in by_ranks.items()
        if (times_s := [entry.trained_s for entry in entries if entry.trained_s is not None])
    }
    issued_s = [entry.issued_s for entry in by_ranks[1] if entry.issued_s is not None]
    totals_s = {phase: replayed_s(group, phase) for phase in _PHASES}
    times: dict[tuple[str, Phase], list[Seconds]] = defaultdict(list)
    counts: dict[tuple[str, Phase], int] = {}
    for entry in group:
        for operator in entry.operators:
            at = operator.signature, operator.phase
            times[at].append(typical(operator.times_s))
            counts[at] = operator.num_calls
    each_s = {at: typical(values_s) for at, values_s in times.items()}
    sums: dict[Phase, Seconds] = defaultdict(float)
    for at, time_s in each_s.items():
        sums[at[1]] += counts[at] * time_s
    # Geometric means of skewed times add up to less than that of their sum.
    scale = {
        phase: totals_s[phase.value] / max(sums[phase], _SMALLEST_S)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    return MeasuredStep(
        workload=key[0],
        micro_batch=key[1],
        parameters=key[2],
        operators=tuple(
            MeasuredOperator(signature=at[0], phase=at[1].value, time_s=time_s * scale[at[1]])
            for at, time_s in each_s.items()
        ),
        optimizer_s=totals_s["optimizer"],
        relative_error=errors[1],
        trained_s=trained_s.pop(1, None),
        issued_s=typical(issued_s) if issued_s else None,
        ddp_s={ranks: (time_s, errors[ranks]) for ranks, time_s in trained_s.items()},
        calls=group[-1].calls,
    )


def start_of(round_: int) -> int:
    """Which start of processes a round of models in place belongs to, from 0; one serves two rounds in a row."""
    return round_ // _RUNS_PER_START


def replays_in(observations: Path) -> list[ReplayObservation]:
    """Replayed steps of a file of observations."""
    return [
        entry for entry in read_observations(observations) if isinstance(entry, ReplayObservation)
    ]


def first_failure_in(observations: Path, *, world_size: int = 1) -> str:
    """Why the first of the steps that failed on a number of ranks did; empty if none did."""
    failed = failures(read_observations(observations))
    return next((e.reason for e in failed if e.setting.world_size == world_size), "")


def with_replays(profile: MeasuredMachine, replays: Sequence[ReplayObservation]) -> MeasuredMachine:
    """The profile with replayed steps beside those that it has; a new one replaces its old self."""
    assert profile.operators is not None, "profiles without operators are refused before measuring"
    if profile.asynchronous:
        replays = [without_events(entry, event_s(profile.rates)) for entry in replays]
    added = measured_steps(replays)

    def key(step: MeasuredStep) -> tuple[str, int, str, str]:
        return step.workload, step.micro_batch, step.parameters, step.calls

    new = set(map(key, added))
    kept = [step for step in profile.operators.measured if key(step) not in new]
    operators = replace(profile.operators, measured=(*kept, *added))
    return replace(profile, operators=operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedCall:
    """One call with tensors by number."""

    operator: int
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that no call makes: an input, a state, or one whose origin was not found."""

    spec: TensorSpec
    operator: int
    """The first operator that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """Forward and backward pass of a step with their tensors."""

    calls: tuple[LinkedCall, ...]
    released: tuple[tuple[int, ...], ...]
    """By call, the tensors that nobody needs after it."""
    parameters: dict[int, TensorSpec]
    """In the order of the step's parameters, laid out as the forward pass reads them."""
    sources: dict[int, Source]


#: Changes what a tensor looks like from here on.
_RESHAPE_IN_PLACE: Final = frozenset(
    {"transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "resize_"}
)
_BAG: Final = "_embedding_bag"
#: Gradients of a lookup of bags: where they read its integers, which are its indices, where bags begin, and
#: three of its results.
_BAG_GRADIENTS: Final[dict[str, dict[int, int]]] = {
    "_embedding_bag_backward": {1: 0, 2: 1, 3: 2, 4: 3, 5: 4},
    "_embedding_bag_dense_backward": {1: 0, 2: 2, 3: 3, 4: 4},
    "_embedding_bag_per_sample_weights_backward": {2: 0, 3: 1, 4: 2},
}
_OF_WEIGHTS: Final = "_embedding_bag_per_sample_weights_backward"


@dataclass(slots=True, kw_only=True)
class _Linker:
    step: TracedStep
    num_tensors: int = 0
    made: defaultdict[TensorSpec, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Tensors that calls have made and that may be read, the latest last."""
    parameters: dict[int, TensorSpec] = field(default_factory=dict)
    waiting: defaultdict[tuple[tuple[int, ...], str], deque[int]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Parameters by shape and type, the next one to be read first."""
    sources: dict[int, Source] = field(default_factory=dict)
    bags: tuple[list[LinkedCall], list[LinkedCall]] = field(default_factory=lambda: ([], []))
    """Lookups of bags without gradient of their table, or of their weights; the latest last."""

    def new(self) -> int:
        self.num_tensors += 1
        return self.num_tensors - 1

    def link(self, operator: int, phase: Phase) -> LinkedCall:
        called, name = self.step.operators[operator], base_name(self.step.operators[operator].name)
        kept = self._of_bag(called, name)
        inputs: list[int] = []
        for position in range(len(called.inputs)):
            tensor = kept.get(position)
            if tensor is None:
                tensor = self._found(called, operator, position, phase, inputs)
            inputs.append(tensor)
        # Who asks for a shape alone is not done with a tensor.
        asks_only = called.read_bytes == 0 and not called.view
        if phase is Phase.BACKWARD and not asks_only:
            for position, (tensor, spec) in enumerate(zip(inputs, called.inputs, strict=True)):
                if tensor in self.made[spec]:
                    self.made[spec].remove(tensor)
                if position in called.mutated:
                    self.made[spec].append(tensor)
        outputs = [self.new() for _ in called.outputs]
        self._offer(outputs, called)
        linked = LinkedCall(
            operator=operator, phase=phase, inputs=tuple(inputs), outputs=tuple(outputs)
        )
        if name in _RESHAPE_IN_PLACE:
            self._hide(inputs, called.inputs)
        elif name == _BAG:
            # Others would take positions of bags for classes or rows of a table.
            self._hide(inputs[1:3], called.inputs[1:3])
            self._hide(outputs[1:], called.outputs[1:])
            self.bags[0].append(linked)
            self.bags[1].append(linked)
        return linked

    def _offer(self, tensors: Sequence[int], called: Operator) -> None:
        """Let other calls read what a call made, but for what batch norm makes empty of nothing.

        Nobody reads that; a workspace that is empty in a trace is read.
        """
        for tensor, spec in zip(tensors, called.outputs, strict=True):
            if called.inputs or spec.size_bytes:
                self.made[spec].append(tensor)

    def _hide(self, tensors: Sequence[int], specs: Sequence[TensorSpec]) -> None:
        """Let no other call read some tensors."""
        for tensor, spec in zip(tensors, specs, strict=True):
            if tensor in self.made[spec]:
                self.made[spec].remove(tensor)

    def _of_bag(self, gradient: Operator, name: str) -> dict[int, int]:
        """Integers that a gradient of a bag shares with the lookup, by position; after it none like it has them.

        Of indices and positions of bags many have one shape; one for the other reads beyond the end of memory.
        """
        if name not in _BAG_GRADIENTS:
            return {}
        read, of_weights = _BAG_GRADIENTS[name], name == _OF_WEIGHTS
        table = gradient.inputs[1] if of_weights else gradient.outputs[0]
        indices = gradient.inputs[next(iter(read))]
        bags = self.bags[of_weights]
        for linked in reversed(bags):
            if self.step.operators[linked.operator].inputs[:2] == (table, indices):
                bags.remove(linked)
                kept = (*linked.inputs[1:3], *linked.outputs[1:4])
                return {position: kept[at] for position, at in read.items()}
        return {}

    def _found(
        self, called: Operator, operator: int, position: int, phase: Phase, taken: Sequence[int]
    ) -> int:
        spec = called.inputs[position]
        for tensor in reversed(self.made[spec]):
            if tensor not in taken:
                return tensor
        waiting = self.waiting[spec.shape, spec.dtype]
        # Forward meets the parameters in order, backward in the opposite one.
        at = 0 if phase is Phase.FORWARD else -1
        if waiting and self._is_laid_out(waiting[at], spec, phase):
            tensor = waiting[at]
            waiting.rotate(-1 if phase is Phase.FORWARD else 1)
            if tensor not in taken:
                return tensor
        tensor = self.new()
        self.sources[tensor] = Source(spec=spec, operator=operator)
        return tensor

    def _is_laid_out(self, parameter: int, spec: TensorSpec, phase: Phase) -> bool:
        """Whether a parameter has the strides of an input; the forward pass tells those of each."""
        is_expanded = 0 in (spec.stride or ())
        if parameter not in self.parameters and phase is Phase.FORWARD and not is_expanded:
            self.parameters[parameter] = spec
        return spec == self.parameters.get(parameter, replace(spec, stride=None))


def linked(step: TracedStep) -> Dataflow:
    """Guess the data flow of the forward and backward pass of a step."""
    linker = _Linker(step=step)
    contiguous = {linker.new(): TensorSpec(shape=p.shape, dtype=p.dtype) for p in step.parameters}
    for tensor, spec in reversed(contiguous.items()):
        # Gradients become ready in the opposite order of use.
        linker.waiting[spec.shape, spec.dtype].append(tensor)
    calls = tuple(
        linker.link(call.operator, call.phase)
        for call in step.calls()
        if call.phase is not Phase.OPTIMIZER
    )
    last_read = {tensor: at for at, call in enumerate(calls) for tensor in call.inputs}
    released: list[list[int]] = [[] for _ in calls]
    for at, call in enumerate(calls):
        for tensor in call.outputs:
            end = last_read.get(tensor, at)
            # What the backward pass makes or sums up, and nobody reads after, is a gradient: it stays.
            if calls[end].phase is Phase.FORWARD or not _is_left(tensor, calls[end], step):
                released[end].append(tensor)
    return Dataflow(
        calls=calls,
        released=tuple(tuple(group) for group in released),
        parameters={**contiguous, **linker.parameters},
        sources=linker.sources,
    )


def _is_left(tensor: int, last: LinkedCall, step: TracedStep) -> bool:
    """Whether a tensor's last call makes it, or adds to it in place."""
    written = {last.inputs[position] for position in step.operators[last.operator].mutated}
    return tensor in last.outputs or tensor in written
