"""A model inferred from runs as part of a document, and back: predictions need no new fit."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.discrepancy import Spreads, condition
from perfmodel.cost.inferred import InferredModel
from perfmodel.cost.inferred_memory import InferredMemory
from perfmodel.cost.jobs import USUAL, Jobs, jobs_from_columns
from perfmodel.cost.latents import Prior
from perfmodel.cost.stalls import Disturbance
from perfmodel.documents.inferred import (
    DeviationSpreads,
    InferredDocument,
    InferredLatent,
    PeakMemory,
    StallRecord,
)

KNOWN_BELOW = 0.7
"""A latent counts as determined if the runs narrowed its prior at least to this share."""


def inferred_fields(
    model: InferredModel, printed: NDArray[np.intp] | None = None
) -> Mapping[str, Any]:
    """What a document keeps of a model, by its fields.

    Parameters
    ----------
    model
        The model.
    printed
        Positions of the runs behind its memory; all if not given.
    """
    runs = model.discrepancy.runs
    return {
        "num_runs": len(runs),
        "runs": _said(runs),
        "latents": tuple(_latent(model, name, prior) for name, prior in model.priors.items()),
        "deviations": tuple(map(float, model.discrepancy.deviations)),
        "trust": tuple(map(float, model.discrepancy.trust)),
        "spreads": DeviationSpreads(**asdict(model.discrepancy.spreads)),
        "stalls": _stalls(model),
        "interval_widening": model.widening,
        "memory": _peaks(model.memory, np.arange(len(runs)) if printed is None else printed),
    }


def model_of(document: InferredDocument) -> InferredModel:
    """The model of a document."""
    runs = jobs_from_columns(document.runs)
    return InferredModel(
        priors={
            latent.name: Prior(
                median=latent.prior, log_sigma=latent.prior_log_sigma, meaning=latent.meaning
            )
            for latent in document.latents
        },
        draws={latent.name: np.array(latent.draws) for latent in document.latents},
        moved={
            latent.name: latent.log_sigma / latent.prior_log_sigma for latent in document.latents
        },
        discrepancy=condition(
            runs,
            np.array(document.deviations),
            np.array(document.trust),
            Spreads(**document.spreads.model_dump()),
        ),
        disturbance=_disturbance(document),
        widening=document.interval_widening,
        memory=_memory(document, runs),
    )


def _said(runs: Jobs) -> dict[str, tuple[float, ...]]:
    """Columns of the runs; what is as usual in all of them is left out."""
    columns = {field.name: getattr(runs, field.name) for field in fields(runs)}
    return {
        name: tuple(map(float, values))
        for name, values in columns.items()
        if name not in USUAL or (values != USUAL[name]).any()
    }


def _latent(model: InferredModel, name: str, prior: Prior) -> InferredLatent:
    return InferredLatent(
        name=name,
        value=model.nominal[name],
        log_sigma=prior.log_sigma * model.moved[name],
        prior=prior.median,
        prior_log_sigma=prior.log_sigma,
        determined=model.moved[name] < KNOWN_BELOW,
        meaning=prior.meaning,
        draws=tuple(map(float, model.draws[name])),
    )


def _stalls(model: InferredModel) -> StallRecord | None:
    if model.disturbance is None:
        return None
    return StallRecord(
        stall_s=model.disturbance.stall_s,
        weights=tuple(map(float, model.disturbance.weights)),
    )


def _peaks(memory: InferredMemory | None, printed: NDArray[np.intp]) -> PeakMemory | None:
    if memory is None:
        return None
    found = memory.discrepancy
    return PeakMemory(
        runs=tuple(map(int, printed)),
        factors=memory.factors,
        deviations=tuple(map(float, found.deviations)),
        trust=tuple(map(float, found.trust)),
        spreads=DeviationSpreads(**asdict(found.spreads)),
        interval_widening=memory.widening,
    )


def _memory(document: InferredDocument, runs: Jobs) -> InferredMemory | None:
    said = document.memory
    if said is None:
        return None
    return InferredMemory(
        factors=dict(said.factors),
        discrepancy=condition(
            runs.take(np.array(said.runs)),
            np.array(said.deviations),
            np.array(said.trust),
            Spreads(**said.spreads.model_dump()),
        ),
        widening=said.interval_widening,
    )


def _disturbance(document: InferredDocument) -> Disturbance | None:
    if document.stalls is None:
        return None
    return Disturbance(stall_s=document.stalls.stall_s, weights=np.array(document.stalls.weights))
