"""A step's terms with one cause of lost time removed at a time."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.cost.terms import Terms
from perfmodel.explanation.remedies import NominalModel, nothing
from perfmodel.parallelism.strategy import Setting, Synchronisation
from perfmodel.predictor import StepPrediction
from perfmodel.program.operation import Cause

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


def alone(setting: Setting) -> Setting:
    """The same micro-steps on one device without DDP."""
    return dataclasses.replace(
        setting, world_size=1, synchronisation=Synchronisation.NONE, bucket_cap_mb=None
    )


def removals(
    model: NominalModel, asked: StepPrediction, baseline: Setting
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
    if asked.setting.world_size > 1:
        single = model.step(alone(asked.setting)).terms
        yield (
            LossCause.SHARING,
            replace(terms, compute_s=single.compute_s, issue_s=single.issue_s),
        )
    if asked.setting.micro_batch != baseline.micro_batch:
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
    large = model.step(dataclasses.replace(asked.setting, micro_batch=micro_batch)).terms
    share = asked.setting.micro_batch / micro_batch

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
