"""What a clause is about, read from a profile."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

import numpy as np

from perfmodel.cost.busbw import busbw_factor
from perfmodel.cost.curve import CurveDraws
from perfmodel.documents.acceptance import Clause, ClauseKind
from perfmodel.documents.goodput import GoodputDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.parallelism.strategy import Synchronisation, scaled_settings
from perfmodel.predictor import Predictor
from perfmodel.statistics.stragglers import expected_largest_deviate

_NUM_DRAWS: Final = 400
#: Spreads of ranks below this are not told apart from none.
_SMALLEST_SPREAD: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A positive value in SI units."""

    value: float
    log_error: float
    source: Literal["measured", "interpolated", "predicted"]


def quantity(
    profile: ProfileDocument, clause: Clause, *, goodput: GoodputDocument | None = None
) -> Quantity | None:
    """What the machine does about a clause; None if nothing was measured about it.

    Parameters
    ----------
    goodput
        Of a job on that machine, at its rates of failures.
    """
    match clause.kind:
        case ClauseKind.GEMM:
            return _kernel(profile, clause)
        case ClauseKind.BUSBW:
            return _busbw(profile, clause)
        case ClauseKind.LATENCY:
            return _all_reduce(profile, clause)
        case ClauseKind.SPREAD:
            return _spread(profile)
        case ClauseKind.STEP:
            return _step(profile, clause)
        case ClauseKind.GOODPUT:
            return None if goodput is None else _goodput(goodput)


def _kernel(profile: ProfileDocument, clause: Clause) -> Quantity | None:
    """Kernels have no error of their own: the machine's speed varied by that much between visits."""
    for rate in profile.rates:
        if (rate.probe, rate.dtype, rate.shape) == ("matmul", clause.dtype, clause.shape):
            return Quantity(
                value=rate.flop_per_s, log_error=profile.speed_spread, source="measured"
            )
    return None


def _all_reduce(profile: ProfileDocument, clause: Clause) -> Quantity | None:
    """Time of an all-reduce of the size, in the group of that size. [s]"""
    assert clause.size_bytes is not None
    for entry in profile.collectives:
        if entry.collective == "all_reduce" and entry.world_size == clause.world_size:
            curve = CurveDraws.sample(
                entry.points, num_draws=_NUM_DRAWS, rng=np.random.default_rng(0)
            )
            draws_s = curve.read(clause.size_bytes)
            return Quantity(
                value=float(draws_s[0]),
                log_error=float(np.log(draws_s[1:]).std()),
                source="measured" if clause.size_bytes in curve.at else "interpolated",
            )
    return None


def _busbw(profile: ProfileDocument, clause: Clause) -> Quantity | None:
    found = _all_reduce(profile, clause)
    if found is None:
        return None
    assert clause.size_bytes is not None
    assert clause.world_size is not None
    factor = busbw_factor("all_reduce", world_size=clause.world_size)
    assert factor is not None
    return Quantity(
        value=clause.size_bytes * factor / found.value,
        log_error=found.log_error,
        source=found.source,
    )


def _spread(profile: ProfileDocument) -> Quantity | None:
    """Slowest of all ranks over the median rank, of the workload that shows it most.

    The standard deviation of n ranks is itself uncertain by ``1 / sqrt(2 (n - 1))``.
    """
    ranks = profile.max_world_size
    if ranks == 1 or not profile.workloads:
        return None
    spread = max(workload.rank_spread for workload in profile.workloads)
    deviate = expected_largest_deviate(ranks)
    error = max(spread, _SMALLEST_SPREAD) / math.sqrt(2 * (ranks - 1))
    return Quantity(value=math.exp(spread * deviate), log_error=error * deviate, source="measured")


def _goodput(goodput: GoodputDocument) -> Quantity:
    """Half of the 90 % interval is 1.645 standard errors, which hold the doubt of the failure rates."""
    share = goodput.effective_fraction
    return Quantity(
        value=share.p50,
        log_error=math.log(share.p95 / share.p5) / (2 * NormalDist().inv_cdf(0.95)),
        source="predicted",
    )


def _has_all_reduce(profile: ProfileDocument) -> bool:
    return any(entry.collective == "all_reduce" for entry in profile.collectives)


def _step(profile: ProfileDocument, clause: Clause) -> Quantity | None:
    """As it ran, or as the model has it, which needs an all-reduce for several ranks. [s]"""
    assert clause.workload is not None
    assert clause.world_size is not None
    assert clause.micro_batch is not None
    workload = profile.workload(clause.workload)
    if workload is None:
        return None
    [setting] = scaled_settings(
        clause.workload, [clause.world_size], scaling="weak", batch=clause.micro_batch
    )
    for step in profile.steps:
        known = (step.workload, step.world_size, step.micro_batch, step.synchronisation)
        asked = (setting.workload, setting.world_size, setting.micro_batch)
        if known == (*asked, setting.synchronisation.value) and step.bucket_cap_mb is None:
            error = math.hypot(step.relative_error, profile.round_error)
            return Quantity(value=step.step_s, log_error=error, source="measured")
    if setting.synchronisation is Synchronisation.DDP and not _has_all_reduce(profile):
        return None
    draws_s = Predictor(profile).step(workload, setting).step_s
    return Quantity(
        value=float(draws_s[0]), log_error=float(np.log(draws_s[1:]).std()), source="predicted"
    )
