"""The law of the batch beside real trainings to a target, at several batches and learning rates."""

from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record, Share
from perfmodel.documents.prediction import Interval
from perfmodel.documents.validation import ErrorSummary


class JudgedBatch(Record):
    """One batch at its best learning rate. Signed errors are predicted over measured, minus 1."""

    batch: PositiveInt
    learning_rate: PositiveFloat
    """That reached the target in the fewest steps, out of those that were tried."""
    is_rate_at_edge: bool
    """Whether none higher, or none lower, was tried: tuning may not have ended."""
    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """To the target at that rate, one per start, of those that reached it."""
    measured_steps: PositiveFloat
    """Median over all starts; one that did not reach it counts as longer than any that did."""
    predicted_steps: Interval
    signed_error: float
    is_covered: bool


class BatchValidationDocument(Document):
    """The error of predicted steps to a target."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "validation of batches"

    provenance: Provenance
    profile_digest: str
    observations_sha256: str
    workload: str
    samples: str
    """What was learned."""
    reference_batch: PositiveInt
    """Of the calibration; its steps are the only ones that a prediction knows."""
    noise_scale: PositiveFloat
    """As calibrated. [samples]"""
    measured_critical_batch: Interval
    """As the law, fitted to the measured batches alone, has it. [samples]"""
    batches: tuple[JudgedBatch, ...]
    not_reached: tuple[PositiveInt, ...]
    """Batches at which no learning rate reached the target often enough."""
    summary: ErrorSummary
    """Of the batches other than the reference."""
    from_own_reference: ErrorSummary | None = None
    """The same where the law starts from the steps that this campaign took at the reference batch, and not
    from those of the calibration: the error of the law alone. None if that batch did not arrive."""
    same_samples: ErrorSummary
    """Of the plain rule that every batch needs as many samples."""
    same_steps: ErrorSummary
    """Of the plain rule that every batch needs as many steps."""
    coverage: Share
