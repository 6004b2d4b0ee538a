"""Use case: all layouts of a model on a cluster, ranked by inferred step time, ties said."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from perfmodel.cost.inferred import InferredModel, StepInterval
from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.layout_time import StepParts, step_time_s
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.documents.layout import ParallelismPlanDocument, RankedLayout
from perfmodel.documents.prediction import Interval
from perfmodel.errors import NotFeasible
from perfmodel.parallelism.layouts import LayoutColumns, Space, feasible_layouts
from perfmodel.plan.layout_search import Judged, judge_layouts, search_jobs, together
from perfmodel.plan.spread import Workers, spread
from perfmodel.predict_layout import (
    InferredMachine,
    Training,
    layout_caveats,
    layout_provenance,
    parts_record,
    trained_record,
    work_per_peak_s,
)
from perfmodel.statistics.normal import DEVIATE_90
from perfmodel.units import format_bytes, format_duration

_CANDIDATES: Final = 256
"""Layouts whose interval is computed: far more than are shown, so that deviations may reorder them."""
_PIECE: Final = 8192
"""Layouts that are judged at a time."""
ALONE: Final = Workers()
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """All layouts that are possible, with verdicts on them."""

    training: Training
    layouts: LayoutColumns
    judged: Judged

    def jobs(self, chosen: NDArray[np.intp]) -> Jobs:
        """Some of the layouts as columns."""
        return search_jobs(self.training, LayoutColumns(rows=self.layouts.rows[chosen]))

    def fastest(self, among: NDArray[np.intp]) -> NDArray[np.intp]:
        """The candidates among some layouts, in the order of the search."""
        order = np.argsort(self.judged.log_step[among], kind="stable")[:_CANDIDATES]
        return among[order]


def plan_parallelism(
    machine: InferredMachine,
    request: Request,
    *,
    argv: Sequence[str],
    workers: Workers = ALONE,
) -> ParallelismPlanDocument:
    """Feasible layouts that fit, fastest first, with what each loses to the first.

    Raises
    ------
    NotFeasible
        If no layout is possible, or none fits.
    UsageError
        If the workers cannot be reached.
    """
    search = search_layouts(machine.model, request, workers)
    fit = search.judged.fit
    fitting = np.flatnonzero(fit >= FITS_ABOVE)
    if not fitting.size:
        raise NotFeasible(_nothing_fits(search, request))
    chosen = search.fastest(fitting)
    jobs = search.jobs(chosen)
    found = machine.model.predict(jobs)
    sort = np.argsort(found.mean_s, kind="stable")[: request.top]
    ranked = _ranked(machine, search, chosen[sort], request)
    close = np.flatnonzero((fit < FITS_ABOVE) & (fit > 1 - FITS_ABOVE))
    return ParallelismPlanDocument(
        schema_version=ParallelismPlanDocument.current_version,
        provenance=layout_provenance(machine, argv),
        profile_digest=machine.document.digest,
        device_name=machine.document.device,
        evidence="inferred",
        trained=trained_record(request.training),
        capacity_bytes=request.capacity_bytes,
        num_feasible=len(search.layouts),
        num_fitting=len(fitting),
        ranked=ranked,
        caveats=(
            *layout_caveats(machine, jobs.take(sort[:1])),
            *_close(machine.model, search, close, ranked[0].step_s.p50),
        ),
    )


def search_layouts(model: InferredModel, request: Request, workers: Workers = ALONE) -> Search:
    """Every layout that the model, the devices and the global batch allow.

    Raises
    ------
    NotFeasible
        If there is none.
    UsageError
        If the workers cannot be reached.
    """
    training = request.training
    shape = training.model.shape
    space = Space(
        layers=shape.layers,
        heads=shape.heads,
        experts=shape.experts,
        sequence=training.model.sequence,
        devices=training.devices,
        global_batch=training.global_batch,
        fused_attention=shape.fused_attention,
        interleave=request.interleave,
    )
    layouts = feasible_layouts(space)
    if not len(layouts):
        raise NotFeasible(
            f"--devices: {training.devices} cannot be split over {shape.layers} layers, {shape.heads} "
            f"heads and a global batch of {training.global_batch}; change one of them"
        )
    judge = partial(judge_layouts, model, training, request.capacity_bytes)
    # Pieces of one size whoever works, so that all answers are the same to the last bit.
    pieces = [
        LayoutColumns(rows=layouts.rows[first : first + _PIECE])
        for first in range(0, len(layouts), _PIECE)
    ]
    judged = spread(judge, pieces, workers)
    return Search(training=training, layouts=layouts, judged=together(judged))


def _ranked(
    machine: InferredMachine, search: Search, chosen: NDArray[np.intp], request: Request
) -> tuple[RankedLayout, ...]:
    jobs = search.jobs(chosen)
    needed_bytes, fit = search.judged.needed_bytes, search.judged.fit
    found = machine.model.predict(jobs)
    parts = machine.model.parts(jobs)
    slower, ties = against_first(machine.model, jobs, found)
    work = request.training.global_batch * request.training.model.sequence
    return tuple(
        RankedLayout(
            rank=1 if ties[index] else index + 1,
            layout=str(search.layouts.layout(int(where))),
            step_s=Interval(
                p5=float(found.lower_s[index]),
                p50=float(found.number_s[index]),
                p95=float(found.upper_s[index]),
            ),
            tokens_per_s=float(work / found.number_s[index]),
            mfu=float(work_per_peak_s(machine, jobs) / found.number_s[index]),
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


def against_first(
    model: InferredModel, jobs: Jobs, found: StepInterval
) -> tuple[Column, NDArray[np.bool_]]:
    """Probability of every job to be slower than the first, and whether the two tie.

    Both are predicted from the same latents and neighbouring deviations, so that most of their doubt
    is shared: the doubt of the ratio is what counts.
    """
    deviation = np.maximum(spread_against_first(model, jobs), 1e-9)
    distance = np.log(found.mean_s / found.mean_s[0]) / deviation
    return np.asarray(ndtr(distance)), np.abs(distance) <= DEVIATE_90


def spread_against_first(model: InferredModel, jobs: Jobs) -> Column:
    """Standard deviation of the logarithm of every step over the first, in calm runs."""
    drawn = step_time_s(jobs, {name: values[:, None] for name, values in model.draws.items()})
    logs = np.log(drawn)
    variance = (logs - logs[:, :1]).var(axis=0) + model.discrepancy.difference_variance(jobs, 0)
    return np.asarray(np.sqrt(np.maximum(variance, 0)) * model.doubt_factor(jobs))


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
            f"{format_duration(step_s)} if it fits (probability {search.judged.fit[where]:.0%})"
        )
    ]


def _nothing_fits(search: Search, request: Request) -> str:
    needed_bytes = search.judged.needed_bytes
    where = int(np.argmin(needed_bytes))
    return (
        f"--device-memory: none of {len(search.layouts)} layouts fits into "
        f"{format_bytes(request.capacity_bytes)}; the leanest, {search.layouts.layout(where)}, needs "
        f"{format_bytes(float(needed_bytes[where]))}: take more or larger devices"
    )
