"""Judging many layouts at once: how long a step takes, and whether it fits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.inferred_memory import fullest_and_fit
from perfmodel.cost.jobs import Column, Jobs, jobs_from_columns, model_columns
from perfmodel.cost.layout_time import step_time_s
from perfmodel.cost.memory import FITS_ABOVE
from perfmodel.cost.stalls import stall_time_s
from perfmodel.parallelism.layouts import COLUMNS, LayoutColumns
from perfmodel.predict_layout import Training


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """Verdicts on layouts, in their order."""

    needed_bytes: Column
    """Of the fullest rank. [B]"""
    fit: Column
    """Probability that it runs within the capacity."""
    log_step: Column
    """Middle of the states that a step may be in, log of seconds; infinite if it hardly fits."""


def judge_layouts(
    model: InferredModel, training: Training, capacity_bytes: int, layouts: LayoutColumns
) -> Judged:
    """Verdicts on some layouts."""
    jobs = search_jobs(training, layouts)
    needed, fit = fullest_and_fit(model.memory, jobs, capacity_bytes)
    log_step = np.full(len(jobs), np.inf)
    possible = np.flatnonzero(fit > 1 - FITS_ABOVE)
    log_step[possible] = _log_step(model, jobs.take(possible))
    return Judged(needed_bytes=needed, fit=fit, log_step=log_step)


def together(pieces: Sequence[Judged]) -> Judged:
    """Verdicts on all layouts from those on pieces."""
    return Judged(
        needed_bytes=np.concatenate([piece.needed_bytes for piece in pieces]),
        fit=np.concatenate([piece.fit for piece in pieces]),
        log_step=np.concatenate([piece.log_step for piece in pieces]),
    )


def _log_step(model: InferredModel, jobs: Jobs) -> Column:
    """Most states are calm; where stalls are likely the middle is later."""
    shift, _ = model.discrepancy.at(jobs)
    step_s = step_time_s(jobs, model.nominal)
    logs = np.log(step_s) + shift
    if model.disturbance is not None:
        late = np.log1p(stall_time_s(jobs, model.disturbance.stall_s) / step_s)
        logs = logs + model.disturbance.probability(jobs) * late
    return np.asarray(logs)


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
            "zero_bubble": 0.0,
            "recompute_attention": recompute == 1,
            "recompute_full": recompute == 2,
            "sequence_parallel": layouts.column("tp") > 1,
            # As ``Layout.stages`` spreads them.
            "first_layers": np.where(left > 0, each + (left == layouts.column("pp") - 1), 0),
            "most_layers": np.where(left > 0, each + 1, 0),
            "last_layers": np.where(left > 0, each, 0),
        }
    )
