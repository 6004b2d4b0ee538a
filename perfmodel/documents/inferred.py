"""Latents of large-model steps that were inferred from runs of others."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record


class InferredLatent(Record):
    """One latent before and after the runs."""

    name: str
    value: PositiveFloat
    log_sigma: PositiveFloat
    """Standard deviation of its natural logarithm, after the runs."""
    prior: PositiveFloat
    prior_log_sigma: PositiveFloat
    determined: bool
    """False: the runs hardly tell, and the prior is kept with its wide doubt."""
    meaning: str


class InferredDocument(Document):
    """A calibration from logs; the runs are kept, so that the fit can be repeated."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "calibration from runs"

    provenance: Provenance
    evidence: Literal["inferred"]
    device: str
    num_runs: PositiveInt
    runs: dict[str, tuple[float, ...]]
    step_s: tuple[PositiveFloat, ...]
    latents: Annotated[tuple[InferredLatent, ...], Field(min_length=1)]
    stall_s: float | None
    """Stall per pipeline hop of disturbed runs; None if no run showed it. [s]"""
    interval_widening: PositiveFloat
