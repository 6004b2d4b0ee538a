"""Use case: why n devices are not n times as fast, cause by cause, and one change for each."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.terms import Samples, Terms
from perfmodel.layout.layout import Layout, Scaling, Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import MeasuredWorkload
from perfmodel.predictor import Predictor, StepPrediction, interval, refuse_other_jobs, step_times
from perfmodel.statistics.interval import Interval
from perfmodel.step.program import Cause
from perfmodel.units import Bytes, Seconds

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

    @property
    def keeps_batch(self) -> bool:
        """Whether the global batch, and so the training, stays as it is."""
        return self.kind not in {ChangeKind.MICRO_BATCH, ChangeKind.ACCUMULATION}


@dataclass(frozen=True, slots=True)
class NominalModel:
    """One workload on one machine, without draws: what differences of steps are taken from."""

    predictor: Predictor
    """With one draw, which is the nominal one."""
    workload: MeasuredWorkload
    loader_samples_per_s: float | None

    def step(self, layout: Layout) -> StepPrediction:
        """Predict one layout."""
        return self.predictor.step(
            self.workload, layout, loader_samples_per_s=self.loader_samples_per_s
        )

    def step_s(self, layout: Layout) -> Seconds:
        """Duration of one layout. [s]"""
        step = self.step(layout)
        return nominal_step_time(step, step.terms)


def nominal_step_time(step: StepPrediction, terms: Terms) -> Seconds:
    """Duration of a step under other terms. [s]"""
    return float(step_times(step.program, terms, terms.durations(step.program))[0])


def nothing(_size_bytes: Bytes | Samples) -> Samples:
    """Communication that costs nothing. [s]"""
    return np.zeros(1)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to a step, each predicted."""

    model: NominalModel
    asked: StepPrediction
    speedup: float
    """Of the step as it is."""

    def ranked(self) -> tuple[Change, ...]:
        """All that can be changed here, from the largest gain to the smallest."""
        return tuple(sorted(self._changes(), key=lambda change: -change.gain_s))

    def _changes(self) -> Iterator[Change]:
        layout = self.asked.layout
        micro_batch, accumulation = 2 * layout.micro_batch, 4 * layout.accumulation
        yield self._resized(
            ChangeKind.MICRO_BATCH,
            f"micro-batch {micro_batch}",
            dataclasses.replace(layout, micro_batch=micro_batch),
        )
        yield self._resized(
            ChangeKind.ACCUMULATION,
            f"accumulation {accumulation}",
            dataclasses.replace(layout, accumulation=accumulation),
        )
        if self.model.loader_samples_per_s is not None:
            faster = dataclasses.replace(self.asked.terms, load_s=self.asked.terms.load_s / 2)
            yield self._other_terms(ChangeKind.LOADER, "a loader twice as fast", faster)
        if layout.world_size > 1 and layout.synchronisation is Synchronisation.DDP:
            yield from self._of_ddp()

    def _of_ddp(self) -> Iterator[Change]:
        terms = self.asked.terms
        yield self._best_cap()
        yield self._other_terms(
            ChangeKind.COMPRESSION,
            "gradients sent as 16 bit (assumed: half the bytes, free conversion)",
            dataclasses.replace(terms, all_reduce_s=lambda size: terms.all_reduce_s(size // 2)),
        )
        if self.model.workload.workload.buffer_bytes:
            yield self._other_terms(
                ChangeKind.BUFFERS,
                "broadcast_buffers=False",
                dataclasses.replace(terms, broadcast_s=nothing),
            )

    def _best_cap(self) -> Change:
        layout = self.asked.layout
        others = [cap for cap in BUCKET_CAPS_MB if cap != layout.bucket_cap_mb]
        steps_s = {
            cap: self.model.step_s(dataclasses.replace(layout, bucket_cap_mb=cap)) for cap in others
        }
        best = min(others, key=lambda cap: steps_s[cap])
        names = ", ".join(f"{cap:g}" for cap in others)
        return self._change(
            ChangeKind.BUCKET_CAP, f"bucket cap {best:g} MiB (best of {names})", steps_s[best]
        )

    def _resized(self, kind: ChangeKind, what: str, layout: Layout) -> Change:
        """Another global batch: its step is brought to the samples of the step as it was."""
        before, after = self.asked.layout.global_batch, layout.global_batch
        step_s = self.model.step_s(layout) * before / after
        return self._change(kind, f"{what} (global batch {before} -> {after})", step_s)

    def _other_terms(self, kind: ChangeKind, what: str, terms: Terms) -> Change:
        return self._change(kind, what, nominal_step_time(self.asked, terms))

    def _change(self, kind: ChangeKind, what: str, step_s: Seconds) -> Change:
        asked_s = nominal_step_time(self.asked, self.asked.terms)
        return Change(
            kind=kind,
            what=what,
            gain_s=asked_s - step_s,
            gain_speedup=self.speedup * (asked_s / step_s - 1),
        )


#: Every operator of a forward pass has about two in the backward pass (gradients of input and
#: weight): the dispatch of both is shared out accordingly.
_DISPATCH_SHARES: Final = {Cause.FORWARD: 1 / 3, Cause.BACKWARD: 2 / 3}


class LossCause(enum.StrEnum):
    """What can be taken out of a step."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    INTERFERENCE = "interference"
    STRAGGLERS = "stragglers"
    BUCKET = "bucket"
    SHARING = "sharing"
    SMALL_BATCH = "small_batch"
    DISPATCH = "dispatch"
    INPUT = "input"
    OPTIMIZER = "optimizer"


def alone(layout: Layout) -> Layout:
    """The same micro-steps on one device without DDP."""
    return dataclasses.replace(layout, dp=1, wrapper=None, bucket_cap_mb=None)


def removals(
    model: NominalModel, asked: StepPrediction, baseline: Layout
) -> Iterator[tuple[LossCause, Terms]]:
    """Terms of the step with one cause removed at a time."""
    terms, none, one = asked.terms, np.zeros(1), np.ones(1)
    replace = dataclasses.replace
    yield LossCause.ALL_REDUCE, replace(terms, all_reduce_s=nothing)
    yield LossCause.BROADCAST, replace(terms, broadcast_s=nothing)
    yield LossCause.INTERFERENCE, replace(terms, compute_speed=one, comm_speed=one)
    yield LossCause.STRAGGLERS, replace(terms, slowest=one)
    yield LossCause.BUCKET, replace(terms, bucket_s=none, bucket_s_per_byte=none)
    yield LossCause.DISPATCH, _without_dispatch(model, terms)
    yield LossCause.INPUT, replace(_without(terms, Cause.INPUT), load_s=none)
    yield LossCause.OPTIMIZER, _without(terms, Cause.OPTIMIZER)
    if asked.layout.world_size > 1:
        single = model.step(alone(asked.layout)).terms
        yield (
            LossCause.SHARING,
            replace(terms, compute_s=single.compute_s, issue_s=single.issue_s),
        )
    if asked.layout.micro_batch != baseline.micro_batch:
        yield LossCause.SMALL_BATCH, _at_large_batch(model, asked, baseline.micro_batch)


def _without_dispatch(model: NominalModel, terms: Terms) -> Terms:
    """On synchronous devices dispatch is part of the passes."""
    if terms.issue_s:
        return dataclasses.replace(terms, issue_s=dict.fromkeys(terms.issue_s, np.zeros(1)))
    dispatch_s = model.predictor.profile.dispatch_s * model.workload.workload.num_operators
    compute_s = {
        cause: np.maximum(0.0, time_s - dispatch_s * _DISPATCH_SHARES.get(cause, 0.0))
        for cause, time_s in terms.compute_s.items()
    }
    return dataclasses.replace(terms, compute_s=compute_s)


def _at_large_batch(model: NominalModel, asked: StepPrediction, micro_batch: int) -> Terms:
    """Each sample costs what it does in the baseline's micro-batch; the optimizer is as it was."""
    large = model.step(dataclasses.replace(asked.layout, micro_batch=micro_batch)).terms
    share = asked.layout.micro_batch / micro_batch

    def scaled(
        large_s: Mapping[Cause, Samples], asked_s: Mapping[Cause, Samples]
    ) -> dict[Cause, Samples]:
        return {
            cause: asked_s[cause] if cause is Cause.OPTIMIZER else time_s * share
            for cause, time_s in large_s.items()
        }

    return dataclasses.replace(
        asked.terms,
        compute_s=scaled(large.compute_s, asked.terms.compute_s),
        issue_s=scaled(large.issue_s, asked.terms.issue_s),
    )


def _without(terms: Terms, cause: Cause) -> Terms:
    none = {cause: np.zeros(1)}
    issue_s = {**terms.issue_s, **none} if cause in terms.issue_s else terms.issue_s
    return dataclasses.replace(terms, compute_s={**terms.compute_s, **none}, issue_s=issue_s)


#: Below this a difference of two steps is rounding. [s]
_SMALLEST_S: Final = 1e-9


_WHAT: Final[Mapping[LossCause, str]] = {
    LossCause.ALL_REDUCE: "averaging gradients, where it is not hidden behind backward",
    LossCause.BROADCAST: "rank 0's buffers go to the others before the first forward pass",
    LossCause.INTERFERENCE: "computing and communication slow each other while both run",
    LossCause.STRAGGLERS: "everybody waits for the slowest rank",
    LossCause.BUCKET: "DistributedDataParallel copies gradients into buckets and back",
    LossCause.SHARING: "ranks on one node compute slower than one alone",
    LossCause.SMALL_BATCH: "a sample costs more in a smaller micro-batch than on one device",
    LossCause.DISPATCH: "the host issues operators, however small the batch",
    LossCause.INPUT: "preparing samples and moving them to the device",
    LossCause.OPTIMIZER: "every rank updates all parameters, however small its batch",
}
#: What shows on the real job whether a cause is as large as said.
_CONFIRM: Final[Mapping[LossCause, str]] = {
    LossCause.ALL_REDUCE: "time steps inside model.no_sync(): they should be shorter by about that",
    LossCause.BROADCAST: "time steps with broadcast_buffers=False",
    LossCause.INTERFERENCE: "profile backward in and out of model.no_sync(): kernels are slower outside",
    LossCause.STRAGGLERS: "time each rank up to its first all-reduce: the slowest should differ by that",
    LossCause.BUCKET: "time one rank with and without DistributedDataParallel around the model",
    LossCause.SHARING: "time the bare model on one rank, then on all ranks of the node at once",
    LossCause.SMALL_BATCH: "time one device at both micro-batches, per sample",
    LossCause.DISPATCH: "double the micro-batch: a step should take less than twice as long",
    LossCause.INPUT: "train on one batch that is kept in memory, without the loader",
    LossCause.OPTIMIZER: "time steps that leave out optimizer.step()",
}
_LESS_OFTEN: Final = (ChangeKind.MICRO_BATCH, ChangeKind.ACCUMULATION)
_LESS_SENT: Final = (ChangeKind.COMPRESSION, ChangeKind.BUCKET_CAP, *_LESS_OFTEN)
_REMEDIES: Final[Mapping[LossCause, tuple[ChangeKind, ...]]] = {
    LossCause.ALL_REDUCE: _LESS_SENT,
    LossCause.BROADCAST: (ChangeKind.BUFFERS, *_LESS_OFTEN),
    LossCause.INTERFERENCE: _LESS_SENT,
    LossCause.STRAGGLERS: _LESS_OFTEN,
    LossCause.BUCKET: (ChangeKind.BUCKET_CAP, *_LESS_OFTEN),
    LossCause.SHARING: _LESS_OFTEN,
    LossCause.SMALL_BATCH: (ChangeKind.MICRO_BATCH,),
    LossCause.DISPATCH: (ChangeKind.MICRO_BATCH,),
    LossCause.INPUT: (ChangeKind.LOADER, ChangeKind.MICRO_BATCH),
    LossCause.OPTIMIZER: _LESS_OFTEN,
}
#: A change that keeps the batch, and so the training, is named before better ones that do not, if
#: it wins back at least this part of the loss.
_WORTHWHILE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One cause, found by removing it alone."""

    cause: LossCause
    lost_s: Seconds
    """Step minus the same step without the cause. [s]"""
    what: str
    confirm: str
    """A test on the real job that shows it."""
    one_change: str
    """What to try, of the changes that bear on this cause; empty if none helps."""
    gain_s: Seconds
    gain_speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
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
        """Step minus ideal step; 0 on one device without DDP. [s]"""
        return self.step_s - self.ideal_step_s


def explain(
    predictor: Predictor,
    *,
    workload: MeasuredWorkload,
    layout: Layout,
    scaling: Scaling = "weak",
    loader_samples_per_s: float | None = None,
) -> Explanation:
    """Rank what a layout loses, each cause by its removal, at nominal parameters.

    On one device the same causes say what the step costs.

    Parameters
    ----------
    scaling
        Which baseline: one device with the micro-batch of a rank (weak), or with that of all ranks
        together (strong).

    Raises
    ------
    CalibrationUnavailable
        If several ranks are asked for and none were measured together.
    UsageError
        If other jobs share the links of the cluster.
    """
    refuse_other_jobs(predictor.cluster, by="explain")
    # Causes are compared at nominal parameters; the caller's predictor keeps its random state.
    nominal = Predictor(predictor.profile, num_draws=1, cluster=predictor.cluster)
    model = NominalModel(nominal, workload, loader_samples_per_s)
    factor = layout.world_size if scaling == "strong" else 1
    baseline = dataclasses.replace(alone(layout), micro_batch=factor * layout.micro_batch)
    baseline_s = model.step_s(baseline)
    asked = model.step(layout)
    step_s = nominal_step_time(asked, asked.terms)
    speedup = layout.global_batch / baseline.global_batch * baseline_s / step_s
    changes = Changes(model, asked, speedup).ranked()
    return Explanation(
        setting=RunSetting.of(workload.workload.name, layout),
        baseline=RunSetting.of(workload.workload.name, baseline),
        baseline_step_s=baseline_s,
        step_s=step_s,
        losses=_losses(asked, removals(model, asked, baseline), changes),
        changes=changes,
    )


def _losses(
    asked: StepPrediction, removals: Iterator[tuple[LossCause, Terms]], changes: tuple[Change, ...]
) -> tuple[Loss, ...]:
    step_s = nominal_step_time(asked, asked.terms)
    losses = [
        _loss(cause, step_s - nominal_step_time(asked, terms), changes) for cause, terms in removals
    ]
    large = [loss for loss in losses if loss.lost_s >= _SMALLEST_S]
    return tuple(sorted(large, key=lambda loss: -loss.lost_s))


def _loss(cause: LossCause, lost_s: Seconds, changes: tuple[Change, ...]) -> Loss:
    """With the best of the changes that bear on the cause; ``changes`` are ranked."""
    helpful = [c for c in changes if c.kind in _REMEDIES[cause] and c.gain_s >= _SMALLEST_S]
    gentle = [c for c in helpful if c.keeps_batch and c.gain_s >= _WORTHWHILE * lost_s]
    best = next(iter(gentle or helpful), None)
    return Loss(
        cause=cause,
        lost_s=lost_s,
        what=_WHAT[cause],
        confirm=_CONFIRM[cause],
        one_change=best.what if best else "",
        gain_s=best.gain_s if best else 0.0,
        gain_speedup=best.gain_speedup if best else 0.0,
    )


class Verdict(enum.StrEnum):
    """Where a measured step lies against the 90 % interval of the prediction."""

    NORMAL = "normal"
    SLOWER = "slower than normal"
    FASTER = "faster than normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured step among the predicted ones."""

    measured_s: Seconds
    predicted_s: Interval
    share_slower: float
    """Share of the predicted outcomes that take longer than the measured step."""

    @property
    def verdict(self) -> Verdict:
        """In one word, or three."""
        if self.measured_s > self.predicted_s.p95:
            return Verdict.SLOWER
        return Verdict.FASTER if self.measured_s < self.predicted_s.p5 else Verdict.NORMAL


def standing(
    predictor: Predictor,
    *,
    workload: MeasuredWorkload,
    layout: Layout,
    measured_s: Seconds,
    loader_samples_per_s: float | None = None,
) -> Standing:
    """Put a measured step among the draws of its prediction.

    Raises
    ------
    CalibrationUnavailable, NotFeasible
        As for the prediction.
    """
    [draws_s] = predictor.step_draws(workload, [layout], loader_samples_per_s=loader_samples_per_s)
    return Standing(
        measured_s=measured_s,
        predicted_s=interval(draws_s),
        share_slower=float((draws_s[1:] > measured_s).mean()),
    )
