"""Use case: all layouts of a model on a cluster, ranked by inferred step time, ties said."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.answer.inferred import (
    Training,
    layout_caveats,
    parts_record,
    trained_record,
)
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.jobs import Column, Jobs, jobs_from_columns, model_columns
from perfmodel.cost.layout_time import StepParts
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.documents import Provenance
from perfmodel.documents.prediction import ParallelismPlanDocument, RankedLayout, TestedLayout
from perfmodel.errors import NotFeasible
from perfmodel.layout import COLUMNS, LayoutColumns, feasible_layouts
from perfmodel.machine import Evidence
from perfmodel.statistics import DEVIATE_90, normal_cdf
from perfmodel.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """All layouts that are possible, with verdicts on them in their order."""

    training: Training
    layouts: LayoutColumns
    needed_bytes: Column
    """Of the fullest rank. [B]"""
    fit: Column
    """Probability that it runs within the capacity."""
    log_step: Column
    """Middle of the states that a step may be in, log of seconds; infinite if it hardly fits."""

    def jobs(self, chosen: NDArray[np.intp]) -> Jobs:
        """Some of the layouts as columns."""
        return search_jobs(self.training, LayoutColumns(rows=self.layouts.rows[chosen]))

    def fastest(self, among: NDArray[np.intp]) -> NDArray[np.intp]:
        """The candidates among some layouts, in the order of the search."""
        order = np.argsort(self.log_step[among], kind="stable")[:_CANDIDATES]
        return among[order]


def _verdicts(
    model: InferredModel, jobs: Jobs, capacity_bytes: int
) -> tuple[Column, Column, Column]:
    """Bytes of the fullest rank, probability that it fits, and log of the step of some layouts."""
    needed = model.memory.fullest_bytes(jobs)
    fit = model.memory.fit_probability(jobs, needed, capacity_bytes)
    log_step = np.full(len(jobs), np.inf)
    possible = np.flatnonzero(fit > 1 - FITS_ABOVE)
    log_step[possible] = model.mean_logs(jobs.take(possible))
    return needed, fit, log_step


def search_jobs(training: Training, layouts: LayoutColumns) -> Jobs:
    """The layouts of a search as columns for the closed forms."""
    each, left = np.divmod(training.model.shape.layers, layouts.column("pp"))
    recompute = layouts.column("recompute")
    return jobs_from_columns(
        {
            **model_columns(training.model.shape),
            **{name: layouts.column(name) for name in COLUMNS if name != "recompute"},
            "sequence": training.model.sequence,
            "devices_per_node": training.devices_per_node,
            "gpipe": 0.0,
            "recompute_attention": recompute == 1,
            "recompute_full": recompute == 2,
            "sequence_parallel": layouts.column("tp") > 1,
            # As ``Layout.stages`` spreads them.
            "first_layers": np.where(left > 0, each + (left == layouts.column("pp") - 1), 0),
            "most_layers": np.where(left > 0, each + 1, 0),
            "last_layers": np.where(left > 0, each, 0),
        }
    )


_CANDIDATES: Final = 256
"""Layouts whose interval is computed: far more than are shown, so that deviations may reorder them."""
_PIECE: Final = 8192
"""Layouts that are judged at a time, to bound memory."""
NEAR_FASTEST: Final = 0.03
"""A layout this little slower than the fastest is as good."""
MOST_TESTED: Final = 32
_SURE: Final = 0.9
_NUM_DRAWS: Final = 2000
_TERMS: Final = {
    "compute_s": "compute",
    "tensor_s": "tensor and context collectives",
    "pipeline_s": "pipeline",
    "data_s": "gradients and sharded parameters",
    "other_s": "optimizer and fixed costs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to search, and how much of it to show."""

    training: Training
    capacity_bytes: int
    interleave: int = 1
    top: int = 10
    caveats: tuple[str, ...] = ()
    """What else must be known of the machine."""


def plan_parallelism(model: InferredModel, request: Request) -> ParallelismPlanDocument:
    """Feasible layouts that fit, fastest first, with what each loses to the first."""
    search = search_layouts(model, request)
    fit, origin = search.fit, model.machine.origin
    fitting = np.flatnonzero(fit >= FITS_ABOVE)
    if not fitting.size:
        where = int(np.argmin(search.needed_bytes))
        raise NotFeasible(
            f"--device-memory: none of {len(search.layouts)} layouts fits into "
            f"{format_bytes(request.capacity_bytes)}; the leanest, {search.layouts.layout(where)}, needs "
            f"{format_bytes(float(search.needed_bytes[where]))}: take more or larger devices"
        )
    chosen = search.fastest(fitting)
    jobs = search.jobs(chosen)
    found = model.predict(jobs)
    sort = np.argsort(found.mean_s, kind="stable")[: request.top]
    ranked = _ranked(model, search, chosen[sort], request)
    tested, chances = to_test(model, jobs)
    close = np.flatnonzero((fit < FITS_ABOVE) & (fit > 1 - FITS_ABOVE))
    return ParallelismPlanDocument(
        provenance=Provenance.of_answer(host_fingerprint=origin.fingerprint, seed=origin.seed),
        profile_digest=model.machine.digest,
        device_name=model.machine.device_name,
        evidence=Evidence.INFERRED,
        trained=trained_record(request.training),
        capacity_bytes=request.capacity_bytes,
        num_feasible=len(search.layouts),
        num_fitting=len(fitting),
        ranked=ranked,
        test_first=tuple(
            TestedLayout(layout=str(search.layouts.layout(int(chosen[index]))), chance=chance)
            for index, chance in zip(tested, chances, strict=True)
        ),
        caveats=(
            *request.caveats,
            *layout_caveats(model, jobs.take(sort[:1])),
            *_close(model, search, close, ranked[0].step_s.nominal),
        ),
    )


def search_layouts(model: InferredModel, request: Request) -> Search:
    """Every layout that the model, the devices and the global batch allow."""
    training = request.training
    shape = training.model.shape
    layouts = feasible_layouts(
        training.limits,
        global_batch=training.global_batch,
        interleave=request.interleave,
        fused_attention=shape.fused_attention,
    )
    if not len(layouts):
        raise NotFeasible(
            f"--devices: {training.devices} cannot be split over {shape.layers} layers, {shape.heads} "
            f"heads and a global batch of {training.global_batch}; change one of them"
        )
    pieces = [
        _verdicts(model, search_jobs(training, LayoutColumns(rows=rows)), request.capacity_bytes)
        for rows in np.split(layouts.rows, range(_PIECE, len(layouts), _PIECE))
    ]
    needed_bytes, fit, log_step = map(np.concatenate, zip(*pieces, strict=True))
    return Search(
        training=training, layouts=layouts, needed_bytes=needed_bytes, fit=fit, log_step=log_step
    )


def _ranked(
    model: InferredModel, search: Search, chosen: NDArray[np.intp], request: Request
) -> tuple[RankedLayout, ...]:
    jobs = search.jobs(chosen)
    needed_bytes, fit = search.needed_bytes, search.fit
    found = model.predict(jobs)
    parts = model.parts(jobs)
    # How far every job is behind the first, in standard deviations: within those of 90 % the two tie.
    deviation = np.maximum(model.ratio_uncertainty(jobs), 1e-9)
    distance = np.log(found.mean_s / found.mean_s[0]) / deviation
    slower, ties = normal_cdf(distance), np.abs(distance) <= DEVIATE_90
    work = request.training.global_batch * request.training.model.sequence
    return tuple(
        RankedLayout(
            rank=1 if ties[index] else index + 1,
            layout=str(search.layouts.layout(int(where))),
            step_s=found.of(index),
            tokens_per_s=float(work / found.number_s[index]),
            mfu=float(model.peak_s(jobs)[index] / found.number_s[index]),
            needed_bytes=float(needed_bytes[where]),
            fit_probability=float(fit[where]),
            slower_probability=float(slower[index]),
            ties=bool(ties[index]),
            parts_s=parts_record(parts, index),
            loses_in=loses[0],
            loses_by_s=loses[1],
        )
        for index, where in enumerate(chosen)
        for loses in [_loss(parts, index)]
    )


def to_test(
    model: InferredModel, jobs: Jobs, *, most: int = MOST_TESTED
) -> tuple[list[int], list[float]]:
    """Jobs to try before a long run, the one that helps most first, and the chance that they suffice so far.

    They suffice if a run of one of them is within 3 % of the fastest run of all. Each next job is the one that
    does so in most of the draws in which none before it did.
    """
    logs = model.joint_logs(jobs, num_draws=_NUM_DRAWS)
    near = logs <= logs.min(axis=1, keepdims=True) + np.log1p(NEAR_FASTEST)
    open_draws = np.ones(len(logs), bool)
    chosen: list[int] = []
    chances: list[float] = []
    while open_draws.any() and len(chosen) < most and (not chances or chances[-1] < _SURE):
        chosen.append(int(np.argmax(near[open_draws].sum(axis=0))))
        open_draws &= ~near[:, chosen[-1]]
        chances.append(float(1 - open_draws.mean()))
    return chosen, chances


def _loss(parts: StepParts, index: int) -> tuple[str, float]:
    """The term that is longer than the first layout's by most."""
    if index == 0:
        return "", 0.0
    by_s = {
        term: float(getattr(parts, name)[index] - getattr(parts, name)[0])
        for name, term in _TERMS.items()
    }
    name = max(by_s, key=lambda term: by_s[term])
    return name, by_s[name]


def _close(
    model: InferredModel, search: Search, close: NDArray[np.intp], best_s: float
) -> list[str]:
    """Layouts whose memory is too close to call are left out; say if one would be faster."""
    if not close.size:
        return []
    first = search.fastest(close)[:1]
    step_s = float(model.predict(search.jobs(first)).number_s[0])
    if step_s >= best_s:
        return []
    where = int(first[0])
    return [
        (
            f"too close to call by memory and left out: {search.layouts.layout(where)}, "
            f"{format_duration(step_s)} if it fits (probability {search.fit[where]:.0%})"
        )
    ]
