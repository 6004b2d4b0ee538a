"""What traced operators cost: measured in place, read from a family's curve, or bounded by physics."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perfmodel.cost import Samples
from perfmodel.cost.families import (
    called_features,
    family,
    features,
    kernels_of_gpu,
    optimizer_family,
    optimizer_features,
    optimizer_work,
    unlike_families,
    wider_families,
    work,
)
from perfmodel.machine import Evidence
from perfmodel.machine.measured import MeasuredStep, OperatorCosts, OperatorFamily
from perfmodel.statistics import GaussianProcess
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import ELEMENT_BYTES, Operator, Phase
from perfmodel.workload.step import (
    ADAMW,
    OPTIMIZERS,
    TracedStep,
    calls_signature,
    parameters_signature,
    signature,
)

#: Standard deviation, in log, of an operator whose duration is the roofline alone: a prior.
UNKNOWN_LOG_ERROR = 1.0
#: A duration is extrapolated from this many e-folds beyond the timed sizes ...
_FAR_OUTSIDE = 0.5
#: ... or where the curve knows little more than its mean: this share of its spread.
_FAR_INSIDE = 0.8
#: Uncertainty, in log, per e-fold beyond the timed sizes: a prior.
_UNCERTAINTY_PER_EFOLD = 0.1
#: Uncertainty, in log, of an extrapolated kernel of a GPU, beside what its curve says: those of an H200 said 0.7 and
#: were off by 1.1 (root mean square over nine drawn models). A prior for other GPUs.
_FAR_LOG_ERROR = 0.8
#: Typical time over the roofline of memory for operators without a family.
_UNKNOWN_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The time of one call."""

    time_s: Seconds
    log_error: float
    evidence: Evidence
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDuration:
    """The time of one phase of a micro-step (the optimizer: of a step)."""

    time_s: Seconds
    relative_error: float
    evidence: Evidence
    """The weakest that a tenth of the time rests on."""
    untimed: tuple[str, ...]
    """Names of operators without any timing to compare with."""
    far_s: Mapping[str, Seconds] = field(default_factory=dict)
    """By family, the time of calls that lie far from every timing. [s]"""


def work_s(units: Sequence[float], unit_s: Sequence[Seconds], *, least_s: Seconds) -> Seconds:
    """Time of the units of each kind of work, one after another, at least that of a call. [s]"""
    return max(least_s, sum(n * each_s for n, each_s in zip(units, unit_s, strict=False)))


@dataclass(slots=True)
class OperatorDurations:
    """Durations of any operator on one machine.

        T = as it was timed in place
        T = max(floor, max(least, sum of units * unit_s) * ratio)      of a family with a curve of ratios
        T = least + 2 floor                                            of an operator nobody timed

    ``units`` are kinds of work: the call, FLOP, bytes of each factor; ``floor`` is the roofline at the peaks.
    """

    profile: OperatorCosts
    use_measured: bool = True
    """Whether times measured in place count, or curves alone."""
    own: str = ""
    """Signature of the parameters of a step whose own measurements come before those of others."""
    asynchronous: bool = False
    """Whether the device is a GPU, whose curves are known to err more far from timings than they say."""
    _measured: dict[tuple[str, str], Seconds] = field(default_factory=dict)
    _families: dict[str, OperatorFamily] = field(default_factory=dict)
    _known: dict[tuple[str, Phase, int], Duration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index what was measured."""
        self._families = {entry.name: entry for entry in self.profile.families}
        if self.use_measured:
            self._measured = {
                (operator.signature, operator.phase): operator.time_s
                for step in sorted(self.profile.measured, key=lambda s: s.parameters == self.own)
                for operator in step.operators
            }

    @property
    def _replay_error(self) -> float:
        """How far a step is off whose operators were timed in place, in log."""
        known = [m.relative_error for m in self.profile.measured if m.parameters == self.own]
        return max(known, default=0.0) if self.use_measured else 0.0

    def holds(self, step: TracedStep) -> bool:
        """Whether each call of a step was timed in place, of this workload or another, and its optimizer."""
        own = parameters_signature(step)
        calls = (
            (signature(step.operators[position]), phase.value)
            for position, phase in step.call_counts()
            if phase is not Phase.OPTIMIZER
        )
        has_optimizer = any(m.parameters == own for m in self.profile.measured)
        return has_optimizer and all(call in self._measured for call in calls)

    def trained(self, step: TracedStep) -> MeasuredStep | None:
        """The measurement of this very step by any name if its model was trained, on most numbers of ranks."""
        wanted = parameters_signature(step), step.micro_batch, calls_signature(step)
        trained = (m for m in self.profile.measured if m.trained_s is not None)
        found = (m for m in trained if (m.parameters, m.micro_batch, m.calls) == wanted)
        return max(found, key=lambda m: len(m.ddp_s), default=None)

    def step(self, step: TracedStep) -> dict[Phase, PhaseDuration]:
        """Forward, backward and optimizer of a step."""
        groups: dict[Phase, list[tuple[Operator, int]]] = defaultdict(list)
        for (position, phase), count in step.call_counts().items():
            groups[phase].append((step.operators[position], count))
        durations = {
            phase: self.phase(groups[phase], phase) for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        return {**durations, Phase.OPTIMIZER: self.optimizer(step)}

    def durations(self, calls: Iterable[tuple[Operator, int]], phase: Phase) -> list[Duration]:
        """One call of each operator that a pass calls this often, without what a step adds per call."""
        wanted = [(signature(operator), operator, count) for operator, count in calls]
        # What has no duration yet is found a whole family at once.
        groups: dict[str, dict[tuple[str, int], Operator]] = defaultdict(dict)
        for name, operator, count in wanted:
            if (name, phase, count) in self._known:
                continue
            time_s = self._measured.get((name, phase.value))
            if time_s is None:
                groups[family(operator)][name, count] = operator
            else:
                self._known[name, phase, count] = Duration(
                    time_s=time_s,
                    log_error=0.0,
                    evidence=Evidence.MEASURED,
                    family=family(operator),
                )
        for kind, members in groups.items():
            found = self._from_family(kind, [(one, count) for (_, count), one in members.items()])
            for (name, count), duration in zip(members, found, strict=True):
                self._known[name, phase, count] = duration
        return [self._known[name, phase, count] for name, _, count in wanted]

    def _from_family(self, kind: str, calls: list[tuple[Operator, int]]) -> list[Duration]:
        names = (kind, *kernels_of_gpu(kind), *wider_families(kind), *unlike_families(kind))
        entry = next(filter(None, map(self._families.get, names)), None)
        if entry is None:
            return [self._unknown(kind, operator) for operator, _ in calls]
        points = np.array([called_features(*call) for call in calls])
        # Where all calls that were timed are as frequent, or none is in place, and on a GPU, curves do not tell them.
        num_sizes = len(features(calls[0][0]))
        if not num_sizes <= len(entry.lengths) <= points.shape[1]:
            return [self._unknown(kind, operator) for operator, _ in calls]
        untold = slice(num_sizes, num_sizes + points.shape[1] - len(entry.lengths))
        points = np.delete(points, untold, axis=1)
        works_s = [work_s(work(each), entry.unit_s, least_s=entry.least_s) for each, _ in calls]
        ratios = self._ratios(entry, points)
        return [
            replace(ratio, time_s=max(self._floor_s(operator), each_s * ratio.time_s))
            for (operator, _), each_s, ratio in zip(calls, works_s, ratios, strict=True)
        ]

    def _ratios(self, entry: OperatorFamily, points: Samples) -> list[Duration]:
        """Points of a family's curve: durations of calls whose work takes a second."""
        process = _process(entry)
        means, errors = process.predict(points)
        low, high = process.inputs.min(axis=0), process.inputs.max(axis=0)
        outside = np.abs(points - np.clip(points, low, high)).sum(axis=1)
        near = (errors < _FAR_INSIDE * entry.spread) & (outside < _FAR_OUTSIDE)
        far_error = _FAR_LOG_ERROR if self.asynchronous else 0.0
        return [
            Duration(
                # Durations are added up: the mean of what scatters around the curve in log.
                time_s=math.exp(float(mean) + entry.noise**2 / 2),
                log_error=math.hypot(
                    float(error),
                    _UNCERTAINTY_PER_EFOLD * float(beyond),
                    0.0 if is_near else far_error,
                ),
                evidence=Evidence.INTERPOLATED if is_near else Evidence.EXTRAPOLATED,
                family=entry.name,
            )
            for mean, error, beyond, is_near in zip(means, errors, outside, near, strict=True)
        ]

    def _floor_s(self, operator: Operator) -> Seconds:
        """What no machine with these peaks can beat. [s]"""
        return max(
            operator.flop / self.profile.peak_flop_per_s,
            (operator.read_bytes + operator.written_bytes) / self.profile.peak_bytes_per_s,
        )

    def _unknown(self, kind: str, operator: Operator) -> Duration:
        # A view moves nothing and is known to cost a call.
        is_free = operator.view or operator.read_bytes + operator.written_bytes == 0
        shortest_s = [entry.least_s for entry in self.profile.families] or [1e-6]
        # The least of a GPU is that of views, which start no kernel. Root mean square log errors of 40 calls of 4
        # families on an H200: 7.3 with it, 1.2 with the median.
        least_s = float(
            np.median(shortest_s) if self.asynchronous and not is_free else min(shortest_s)
        )
        time_s = least_s + self._floor_s(operator) * _UNKNOWN_RATIO
        return Duration(
            time_s=time_s,
            log_error=UNKNOWN_LOG_ERROR,
            evidence=Evidence.INTERPOLATED if is_free else Evidence.ASSUMED,
            family=kind,
        )

    def phase(
        self, calls: Sequence[tuple[Operator, int]], phase: Phase, *, in_pass: Sequence[int] = ()
    ) -> PhaseDuration:
        """Calls of one phase, with how often each runs, and what a step adds per call.

        ``in_pass``: How often the whole pass runs each, if these are a part of it.
        """
        operators = [operator for operator, _ in calls]
        counts = [count for _, count in calls]
        durations = self.durations(zip(operators, in_pass or counts, strict=True), phase)
        return self._summed(durations, counts, names=[operator.name for operator in operators])

    def _summed(
        self, durations: list[Duration], counts: list[int], *, names: list[str]
    ) -> PhaseDuration:
        """Members of a family err together, families on their own.

        error^2 = sum over families of (sum of n T e)^2 / T^2 + model error^2
        """
        by_family: dict[str, Seconds] = defaultdict(float)
        by_evidence: dict[Evidence, Seconds] = defaultdict(float)
        total_s, untimed = 0.0, set[str]()
        far_s: dict[str, Seconds] = defaultdict(float)
        for name, duration, count in zip(names, durations, counts, strict=True):
            if duration.evidence is Evidence.ASSUMED:
                untimed.add(name)
            elif duration.evidence is Evidence.EXTRAPOLATED:
                far_s[duration.family] += count * duration.time_s
            total_s += count * duration.time_s
            by_family[duration.family] += count * duration.time_s * duration.log_error
            by_evidence[duration.evidence] += count * duration.time_s
        own = math.sqrt(sum(value**2 for value in by_family.values())) / max(total_s, 1e-12)
        if by_evidence[Evidence.MEASURED] < 0.5 * total_s:
            model = self.profile.curve_log_error
        else:
            model = math.hypot(self.profile.replay_log_error, self._replay_error)
        carried = [kind for kind, time_s in by_evidence.items() if time_s >= 0.1 * total_s]
        return PhaseDuration(
            time_s=total_s,
            relative_error=math.hypot(own, model),
            evidence=Evidence.weakest(carried) if carried else Evidence.MEASURED,
            untimed=tuple(sorted(untimed)),
            far_s=far_s,
        )

    def optimizer(self, step: TracedStep) -> PhaseDuration:
        """The optimizer of a step, by its name and implementation."""
        wanted = parameters_signature(step)
        measured = [m for m in self.profile.measured if m.parameters == wanted]
        if measured and self.use_measured:
            time_s = float(np.median([entry.optimizer_s for entry in measured]))
            return PhaseDuration(
                time_s=time_s,
                relative_error=math.hypot(self.profile.replay_log_error, self._replay_error),
                evidence=Evidence.MEASURED,
                untimed=(),
            )
        kind, sizes = _update_of(step)
        entry = self._families.get(kind)
        if entry is None:
            unknown = Duration(
                time_s=0.0, log_error=UNKNOWN_LOG_ERROR, evidence=Evidence.ASSUMED, family=kind
            )
            seconds = [each_s * _UNKNOWN_RATIO for each_s in self._moved_s(step, sizes)]
            durations = [replace(unknown, time_s=each_s) for each_s in seconds]
        else:
            points = np.array([optimizer_features(size, sum(sizes)) for size in sizes])
            durations = [
                replace(ratio, time_s=ratio.time_s * each_s)
                for each_s, ratio in zip(
                    _updates_s(entry, sizes), self._ratios(entry, points), strict=True
                )
            ]
        return self._summed(durations, [1] * len(durations), names=[kind] * len(durations))

    def optimizer_work_s(self, step: TracedStep) -> Seconds:
        """What the optimizer's family takes per tensor and per byte, without its curve. [s]

        For ratios of one update to a part of it: the curve's deviations at two sizes differ by chance.
        """
        kind, sizes = _update_of(step)
        entry = self._families.get(kind)
        return sum(self._moved_s(step, sizes) if entry is None else _updates_s(entry, sizes))

    def _moved_s(self, step: TracedStep, sizes_bytes: Sequence[Bytes]) -> list[Seconds]:
        """Time of what the update of each parameter reads and writes, at the peak of memory. [s]"""
        passes = OPTIMIZERS.get(step.method.optimizer, ADAMW).passes
        return [passes * size / self.profile.peak_bytes_per_s for size in sizes_bytes]


def _update_of(step: TracedStep) -> tuple[str, list[Bytes]]:
    """The family of the optimizer of a step, and the size of each parameter that it updates. [B]"""
    trained = (p for p in step.parameters if p.ready_after is not None)
    sizes = [p.num_elements * ELEMENT_BYTES[p.dtype] for p in trained]
    return optimizer_family(step.method.optimizer, step.method.optimizer_implementation), sizes


def _updates_s(entry: OperatorFamily, sizes_bytes: Sequence[Bytes]) -> list[Seconds]:
    """What the curve of an optimizer is relative to, of each parameter. [s]"""
    total = sum(sizes_bytes)
    return [
        work_s(optimizer_work(size, total), entry.unit_s, least_s=entry.least_s)
        for size in sizes_bytes
    ]


@functools.lru_cache(maxsize=256)
def _process(entry: OperatorFamily) -> GaussianProcess:
    """The curve of a family, solved once for all who read it."""
    return GaussianProcess(
        inputs=np.array(entry.features),
        targets=np.array(entry.log_ratios),
        lengths=np.array(entry.lengths),
        spread=entry.spread,
        noise=entry.noise,
    )
