"""The validation on models that no fit has seen: predictions from traces beside fresh runs."""

from typing import ClassVar

from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from perfmodel.documents.base import Document, Provenance, Record, Share, unless_empty
from perfmodel.documents.prediction import Evidence, Interval
from perfmodel.documents.validation import ErrorSummary, Gate
from perfmodel.parallelism.strategy import Setting


class ComparedModel(Record):
    """One held-out run. Signed errors are predicted over measured, minus 1."""

    setting: Setting
    mode: str
    """ "measured": the model's own operators, timed in place; "curves": calibrated curves alone."""
    predicted_s: Interval
    measured_s: PositiveFloat
    """Trimmed mean over visits, at the machine speed of the calibration. [s]

    Of steps that took turns with replays: their ratio, step by pass, times the typical replay.
    """
    measured_raw_s: PositiveFloat
    """As the clock showed it. [s]"""
    processor_s: NonNegativeFloat
    """Processor time of a step, at the machine speed of the calibration; waiting does not count. [s]"""
    num_visits: PositiveInt
    measured_relative_error: NonNegativeFloat
    signed_error: float
    signed_error_processor: float
    """Against processor time; of one rank alone it tells the model's error from disturbed runs."""
    phase_errors: dict[str, float]
    """Forward, backward and optimizer of one rank alone."""
    evidence: Evidence
    unpriced: tuple[str, ...]
    is_covered: bool


class ModelsValidationDocument(Document):
    """The error on models that were never fitted."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "validation of models"

    provenance: Provenance
    profile_digest: str
    observations_sha256: str
    mode: str
    machine_slowdown: PositiveFloat
    stolen: Share = 0.0
    """As in the profile, of these runs."""
    models: tuple[ComparedModel, ...]
    summary: ErrorSummary
    """One rank alone."""
    summary_processor: ErrorSummary
    summary_by_phase: dict[str, ErrorSummary]
    summary_by_optimizer: dict[str, ErrorSummary]
    summary_ddp: ErrorSummary | None
    coverage: NonNegativeFloat
    gates: tuple[Gate, ...]
    passed: bool

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        return unless_empty(write(self), "stolen")
