"""The validation: predictions beside fresh runs of settings that calibration never saw."""

from typing import Annotated, ClassVar, Final

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from perfmodel.documents.base import Document, Provenance, Record, Share, unless_empty
from perfmodel.documents.prediction import Interval
from perfmodel.parallelism.strategy import Setting


class ComparedSetting(Record):
    """One held-out setting. Signed errors are predicted over measured, minus 1."""

    setting: Setting
    predicted_s: Interval
    measured_s: PositiveFloat
    """Typical step over visits, each at the machine speed of the calibration. [s]"""
    measured_raw_s: PositiveFloat
    """Typical step over visits as the clock showed it. [s]"""
    num_visits: PositiveInt
    measured_relative_error: NonNegativeFloat
    """Standard error of the logarithm of ``measured_s``, from its visits."""
    signed_error: float
    signed_error_raw: float
    is_covered: bool
    """Whether ``measured_s`` lies within the predicted interval."""
    is_covered_raw: bool
    """Whether ``measured_raw_s`` does."""
    is_extrapolated: bool
    """Whether the micro-batch lies beyond the calibrated ones: no accuracy is promised there."""


class ComparedSpeedup(Record):
    """Throughput of several ranks over one device, predicted and measured."""

    workload: str
    world_size: PositiveInt
    micro_batch: PositiveInt
    accumulation: PositiveInt
    bucket_cap_mb: float | None
    predicted: Interval
    measured: PositiveFloat
    """From step times at the machine speed of the calibration."""
    measured_raw: PositiveFloat
    """From step times as the clock showed them."""
    signed_error: float
    signed_error_raw: float


#: Name of the gate on the mean absolute error of step times.
STEP_MAPE: Final = "step-time MAPE"


class Gate(Record):
    """A threshold written down before the run."""

    name: str
    unit: str
    """``fraction`` everywhere today: 0.06 is 6 %."""
    at_least: float | None = None
    at_most: float | None = None
    value: float
    passed: bool


class ErrorSummary(Record):
    """Signed errors of many settings, as fractions."""

    num_settings: int
    bias: float
    mape: NonNegativeFloat
    median_absolute: NonNegativeFloat
    worst_absolute: NonNegativeFloat


class Repeat(Record):
    """A calibrated setting run again: what even a perfect model could not predict."""

    setting: Setting
    calibrated_s: PositiveFloat
    measured_s: PositiveFloat
    measured_raw_s: PositiveFloat
    signed_error: float
    signed_error_raw: float


class ValidationDocument(Document):
    """The tool's own error."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "validation"
    made_by: ClassVar[str] = "perfmodel validate writes one"
    remake: ClassVar[str] = "validate again with this version of perfmodel"

    provenance: Provenance
    profile_digest: str
    observations_sha256: str
    machine_slowdown: PositiveFloat
    """Speed probe now over speed probe at calibration: 1.05 means that the machine is 5 % slower."""
    stolen: Share = 0.0
    """As in the profile, of these runs."""
    settings: Annotated[tuple[ComparedSetting, ...], Field(min_length=1)]
    speedups: tuple[ComparedSpeedup, ...]
    repeats: tuple[Repeat, ...]
    summary: ErrorSummary
    """Inside the calibrated range, at the machine speed of the calibration."""
    summary_extrapolated: ErrorSummary | None
    """Beyond the calibrated range, at the machine speed of the calibration."""
    summary_raw: ErrorSummary
    """As the clock showed it."""
    summary_by_workload: dict[str, ErrorSummary]
    speedup_summary: ErrorSummary | None
    """Inside the calibrated range, as are those as the clock showed them."""
    speedup_summary_extrapolated: ErrorSummary | None = None
    speedup_summary_raw: ErrorSummary | None
    noise_floor: ErrorSummary | None
    coverage: Share
    coverage_raw: Share
    """Of the times as the clock showed them."""
    gates: tuple[Gate, ...]
    passed: bool

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        return unless_empty(write(self), "stolen")
