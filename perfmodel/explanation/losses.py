"""Use case: why n devices are not n times as fast, cause by cause, and one change for each."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.context import refuse_other_jobs
from perfmodel.cost.terms import Terms
from perfmodel.documents.profile import WorkloadProfile
from perfmodel.explanation.remedies import (
    Change,
    ChangeKind,
    Changes,
    NominalModel,
    nominal_step_time,
)
from perfmodel.explanation.removals import LossCause, alone, removals
from perfmodel.parallelism.strategy import Scaling, Setting
from perfmodel.predictor import Predictor, StepPrediction
from perfmodel.units import Seconds

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
    """Where the time of a setting goes beyond what n perfect devices would need."""

    setting: Setting
    baseline: Setting
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
    workload: WorkloadProfile,
    setting: Setting,
    scaling: Scaling = "weak",
    loader_samples_per_s: float | None = None,
) -> Explanation:
    """Rank what a setting loses, each cause by its removal, at nominal parameters.

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
    factor = setting.world_size if scaling == "strong" else 1
    baseline = dataclasses.replace(alone(setting), micro_batch=factor * setting.micro_batch)
    baseline_s = model.step_s(baseline)
    asked = model.step(setting)
    step_s = nominal_step_time(asked, asked.terms)
    speedup = setting.global_batch / baseline.global_batch * baseline_s / step_s
    changes = Changes(model, asked, speedup).ranked()
    return Explanation(
        setting=setting,
        baseline=baseline,
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
