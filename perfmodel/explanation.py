"""Use case: why n devices are not n times as fast, cause by cause, and one change for each."""

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.answer import Question
from perfmodel.answer.measured import measured_caveats
from perfmodel.documents import Shown
from perfmodel.errors import NotFeasible
from perfmodel.layout import RunSetting, Scaling, Synchronisation
from perfmodel.machine.measured import ComputeRate, MeasuredMachine, TracedWorkload
from perfmodel.scaling import (
    LossCause,
    Nominal,
    lost_by_cause,
    nothing,
    on_one_device,
    without,
    without_dispatch,
)
from perfmodel.step import Cause
from perfmodel.units import Seconds
from perfmodel.workload import Phase

#: Bucket caps to try. [MiB]
BUCKET_CAPS_MB: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)


class ChangeKind(enum.StrEnum):
    """What a user can change."""

    MICRO_BATCH = "micro_batch"
    ACCUMULATION = "accumulation"
    BUCKET_CAP = "bucket_cap"
    COMPRESSION = "compression"
    BUFFERS = "buffers"
    LOADER = "loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing done differently, all else as it was."""

    kind: ChangeKind
    what: str
    gain_s: Seconds
    """Time saved per global batch of the layout as it was; negative if the change hurts. [s]"""
    gain_speedup: float
    """Added to the speed-up, over the same baseline."""


def _tried(asked: Nominal) -> Iterator[tuple[ChangeKind, str, Seconds]]:
    """Every change with its step, brought to the samples of the step as it was. [s]"""
    layout, terms = asked.layout, asked.terms
    for kind, name, value in (
        (ChangeKind.MICRO_BATCH, "micro_batch", 2 * layout.micro_batch),
        (ChangeKind.ACCUMULATION, "accumulation", 4 * layout.accumulation),
    ):
        other = asked.at(**{name: value})
        before, after = layout.global_batch, other.layout.global_batch
        words = f"{name.replace('_', '-')} {value} (global batch {before} -> {after})"
        yield kind, words, other.step_s() * before / after
    if asked.question.loader_samples_per_s is not None:
        faster = replace(terms, load_s=terms.load_s / 2)
        yield ChangeKind.LOADER, "a loader twice as fast", asked.step_s(faster)
    if layout.zero > 0 or layout.replicas == 1 or layout.synchronisation is not Synchronisation.DDP:
        return
    others = [cap for cap in BUCKET_CAPS_MB if cap != layout.bucket_cap_mb]
    steps_s = {cap: asked.at(bucket_cap_mb=cap).step_s() for cap in others}
    best = min(others, key=lambda cap: steps_s[cap])
    names = ", ".join(f"{cap:g}" for cap in others)
    yield ChangeKind.BUCKET_CAP, f"bucket cap {best:g} MiB (best of {names})", steps_s[best]
    yield (
        ChangeKind.COMPRESSION,
        "gradients sent as 16 bit (assumed: half the bytes, free conversion)",
        asked.step_s(terms.sending(1 / 2)),
    )
    if any(o.cause is Cause.BROADCAST for o in asked.costs.program.operations):
        silent = without(terms, Cause.BROADCAST)
        yield ChangeKind.BUFFERS, "broadcast_buffers=False", asked.step_s(silent)


class Resource(enum.StrEnum):
    """What a step can wait for."""

    HOST = "host"
    COMPUTE = "compute"
    """Arithmetic of the device, and starts of its kernels; all that kernels do where operators are unknown."""
    MEMORY = "memory"
    """Reading and writing the device's memory."""
    COMMUNICATION = "communication"


def bottleneck(question: Question) -> Resource:
    """The resource without which the step would be shortest, each made free alone."""
    asked = Nominal.of(replace(question, num_draws=1, validation=None))
    terms, none, one = asked.terms, np.zeros(1), np.ones(1)
    silent = replace(
        terms,
        compute_speed=one,
        comm_speed=one,
        exchange_s=dict.fromkeys(terms.exchange_s, nothing),
    )
    free = {Resource.HOST: without_dispatch(asked), Resource.COMMUNICATION: silent}
    for resource, left in _device_parts(asked).items():
        compute_s = {c: time_s * left.get(c, 1.0) for c, time_s in terms.compute_s.items()}
        # Copies into buckets are starts of kernels, and traffic.
        copies = "bucket_s" if resource is Resource.COMPUTE else "bucket_s_per_byte"
        edits: dict[str, Any] = {"compute_s": compute_s, copies: none}
        free[resource] = replace(terms, **edits)
    return min(free, key=lambda resource: asked.step_s(free[resource]))


def _device_parts(asked: Nominal) -> dict[Resource, dict[Cause, float]]:
    """Parts of each pass that are left without arithmetic, and without traffic, by the measured rates.

    Products and traffic of a kernel overlap, after the start that the probes show; 3 fits published steps:

        t = start + ((FLOP / rate)^3 + (bytes / bandwidth)^3)^(1 / 3)
    """
    machine, workload = asked.question.machine, asked.question.workload
    assert isinstance(machine, MeasuredMachine)
    rates = machine.rates
    traffic = _line("memory", "", rates)
    if not isinstance(workload, TracedWorkload) or traffic is None:
        return {Resource.COMPUTE: dict.fromkeys(map(Cause, Phase), 0.0)}
    step = workload.trace.at(micro_batch=asked.layout.micro_batch)
    whole_s: dict[Cause, float] = defaultdict(float)
    left_s: dict[Resource, dict[Cause, float]] = {
        resource: defaultdict(float) for resource in (Resource.COMPUTE, Resource.MEMORY)
    }
    for (position, phase), calls in step.call_counts().items():
        operator = step.operators[position]
        count = calls * (not operator.view)
        moved = operator.read_bytes + operator.written_bytes
        probe = "convolution" if "convolution" in operator.name else "matmul"
        dtype = _HALVES.get(operator.inputs[0].dtype if operator.inputs else "")
        dtype = dtype or machine.precision_of_fp32(operator.name)
        products = _line(probe, dtype, rates) or _line("matmul", "fp32", rates)
        products = products if products and operator.flop else _Line(traffic.start_s, 0.0)
        products_s, traffic_s = operator.flop * products.unit_s, moved * traffic.unit_s
        cause = Cause(phase)
        whole_s[cause] += count * (products.start_s + (products_s**3 + traffic_s**3) ** (1 / 3))
        left_s[Resource.COMPUTE][cause] += count * traffic_s
        left_s[Resource.MEMORY][cause] += count * (products.start_s + products_s)
    return {
        resource: {
            cause: min(1.0, left / (whole_s[cause] or 1.0)) for cause, left in of_each.items()
        }
        for resource, of_each in left_s.items()
    }


_HALVES: Final = {"bfloat16": "bf16", "float16": "fp16"}


class _Line(NamedTuple):
    start_s: Seconds
    unit_s: Seconds


def _line(probe: str, dtype: str, rates: Sequence[ComputeRate]) -> _Line | None:
    """Through the shortest and the fastest kernel of a probe; None if it was not run."""
    name = "bytes_per_s" if probe == "memory" else "flop_per_s"
    found = [
        (r.time_s, float(getattr(r, name)))
        for r in rates
        if r.probe == probe and dtype in ("", r.dtype)
    ]
    if not found:
        return None
    fastest, (shortest_s, rate) = max(each for _, each in found), min(found)
    return _Line(max(0.0, shortest_s * (1 - rate / fastest)), 1 / fastest)


#: Below this a difference of two steps is rounding. [s]
_SMALLEST_S: Final = 1e-9


_LESS_OFTEN: Final = (ChangeKind.MICRO_BATCH, ChangeKind.ACCUMULATION)
_LESS_SENT: Final = (ChangeKind.COMPRESSION, ChangeKind.BUCKET_CAP, *_LESS_OFTEN)


class _Reason(NamedTuple):
    """What a cause is, what shows on the real job that it is as large as said, which changes bear on it."""

    what: str
    confirm: str
    remedies: tuple[ChangeKind, ...]


_REASONS: Final[Mapping[LossCause, _Reason]] = {
    LossCause.ALL_REDUCE: _Reason(
        "averaging gradients, where it is not hidden behind backward",
        "time steps inside model.no_sync(): they should be shorter by about that",
        _LESS_SENT,
    ),
    LossCause.BROADCAST: _Reason(
        "rank 0's buffers go to the others before the first forward pass",
        "time steps with broadcast_buffers=False",
        (ChangeKind.BUFFERS, *_LESS_OFTEN),
    ),
    LossCause.ALL_GATHER: _Reason(
        "sharded parameters are gathered before they are used",
        "time steps with reshard_after_forward=False: gathers of backward go",
        _LESS_OFTEN,
    ),
    LossCause.REDUCE_SCATTER: _Reason(
        "sharded gradients are summed, where it is not hidden behind backward",
        "time steps with set_requires_gradient_sync(False)",
        _LESS_OFTEN,
    ),
    LossCause.TENSOR: _Reason(
        "ranks that share matrices sum their activations, which compute waits for",
        "time one rank's share of the matrices without its collectives",
        (ChangeKind.MICRO_BATCH,),
    ),
    LossCause.P2P: _Reason(
        "pipeline stages send each other activations and their gradients",
        "profile one stage: time in send and receive",
        (ChangeKind.MICRO_BATCH,),
    ),
    LossCause.INTERFERENCE: _Reason(
        "computing and communication slow each other while both run",
        "profile backward in and out of model.no_sync(): kernels are slower outside",
        _LESS_SENT,
    ),
    LossCause.STRAGGLERS: _Reason(
        "everybody waits for the slowest rank",
        "time each rank up to its first all-reduce: the slowest should differ by that",
        _LESS_OFTEN,
    ),
    LossCause.BUCKET: _Reason(
        "DistributedDataParallel copies gradients into buckets and back",
        "time one rank with and without DistributedDataParallel around the model",
        (ChangeKind.BUCKET_CAP, *_LESS_OFTEN),
    ),
    LossCause.CONTENTION: _Reason(
        "ranks on one node compute slower than one alone",
        "time the bare model on one rank, then on all ranks of the node at once",
        _LESS_OFTEN,
    ),
    LossCause.SMALL_BATCH: _Reason(
        "a sample costs more in a smaller micro-batch than on one device",
        "time one device at both micro-batches, per sample",
        (ChangeKind.MICRO_BATCH,),
    ),
    LossCause.DISPATCH: _Reason(
        "the host issues operators, however small the batch",
        "double the micro-batch: a step should take less than twice as long",
        (ChangeKind.MICRO_BATCH,),
    ),
    LossCause.INPUT: _Reason(
        "preparing samples and moving them to the device",
        "train on one batch that is kept in memory, without the loader",
        (ChangeKind.LOADER, ChangeKind.MICRO_BATCH),
    ),
    LossCause.OPTIMIZER: _Reason(
        "every rank updates all parameters, however small its batch",
        "time steps that leave out optimizer.step()",
        _LESS_OFTEN,
    ),
}
#: A change that keeps the batch, and so the training, is named before better ones that do not, if
#: it wins back at least this part of the loss.
_WORTHWHILE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One cause, found by removing it alone."""

    cause: LossCause
    lost_s: Seconds
    """As ``lost_by_cause`` has it. [s]"""
    what: str
    confirm: str
    """A test on the real job that shows it."""
    one_change: str
    """What to try, of the changes that bear on this cause; empty if none helps."""
    gain_s: Seconds
    gain_speedup: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """Where the time of a layout goes beyond what n perfect devices would need."""

    setting: RunSetting
    baseline: RunSetting
    """One device without DDP, with the batch that the scaling fixes."""
    baseline_step_s: Seconds
    step_s: Seconds
    losses: tuple[Loss, ...]
    """From the largest to the smallest; removals overlap, so that they need not add up."""
    changes: tuple[Change, ...]
    """All that was tried, from the largest gain to the smallest."""
    bottleneck: "Resource | None" = None
    """What the step waits for; None where host and device are one, or no kernel was timed."""
    caveats: tuple[str, ...] = ()

    @property
    def ideal_speedup(self) -> int:
        """What nothing lost would give: the number of devices."""
        return self.setting.world_size

    @property
    def ideal_step_s(self) -> Seconds:
        """The baseline's time for the same samples, shared by all devices. [s]"""
        ratio = self.setting.global_batch / self.baseline.global_batch
        return self.baseline_step_s * ratio / self.setting.world_size

    @property
    def speedup(self) -> float:
        """Throughput over that of the baseline."""
        return self.ideal_speedup * self.ideal_step_s / self.step_s

    @property
    def lost_s(self) -> Seconds:
        """Step minus ideal step; 0 on one device without DDP, and where only rounding differs. [s]"""
        lost_s = self.step_s - self.ideal_step_s
        return lost_s if abs(lost_s) >= _SMALLEST_S else 0.0


def explain(question: Question, *, scaling: Scaling = "weak") -> Explanation:
    """Rank what a layout loses on a calibrated machine, each cause by its removal, at nominal parameters.

    On one device the same causes say what the step costs.

    ``scaling``: Which baseline: one device with the micro-batch of a rank (weak), or with that of all replicas
    together (strong).

    Raises ``CalibrationUnavailable`` if several ranks are asked for and none were measured together.
    """
    layout = question.layout
    if layout.one_process:
        raise NotFeasible(
            f"--layout: explain takes no parts out of DataParallel, got {layout}; predict tells its step"
        )
    asked = Nominal.of(replace(question, num_draws=1, validation=None))
    baseline = on_one_device(layout, scaling)
    single = Nominal.of(asked.question.at(baseline))
    baseline_s, step_s = single.step_s(), asked.step_s()
    speedup = layout.global_batch / baseline.global_batch * baseline_s / step_s
    tried = [
        Change(
            kind=kind,
            what=what,
            gain_s=step_s - changed_s,
            gain_speedup=speedup * (step_s / changed_s - 1),
        )
        for kind, what, changed_s in _tried(asked)
    ]
    changes = tuple(sorted(tried, key=lambda change: -change.gain_s))
    losses = [
        _loss(cause, seconds, changes) for cause, seconds in lost_by_cause(asked, single).items()
    ]
    large = [loss for loss in losses if loss.lost_s >= _SMALLEST_S]
    machine = question.machine
    has_kernels = isinstance(machine, MeasuredMachine) and machine.asynchronous and machine.rates
    return Explanation(
        setting=RunSetting.of(question.workload_name, layout),
        baseline=RunSetting.of(question.workload_name, baseline),
        baseline_step_s=baseline_s,
        step_s=step_s,
        losses=tuple(sorted(large, key=lambda loss: -loss.lost_s)),
        changes=changes,
        bottleneck=bottleneck(question) if has_kernels else None,
        caveats=measured_caveats(question, {layout: asked.terms.evidence}),
    )


def _loss(cause: LossCause, lost_s: Seconds, changes: tuple[Change, ...]) -> Loss:
    """With the best of the changes that bear on the cause; ``changes`` are ranked."""
    reason = _REASONS[cause]
    helpful = [c for c in changes if c.kind in reason.remedies and c.gain_s >= _SMALLEST_S]
    gentle = [c for c in helpful if c.kind not in _LESS_OFTEN and c.gain_s >= _WORTHWHILE * lost_s]
    best = next(iter(gentle or helpful), None)
    return Loss(
        cause=cause,
        lost_s=lost_s,
        what=reason.what,
        confirm=reason.confirm,
        one_change=best.what if best else "",
        gain_s=best.gain_s if best else 0.0,
        gain_speedup=best.gain_speedup if best else 0.0,
    )
