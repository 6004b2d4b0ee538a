"""The validation: predictions beside fresh runs of settings that calibration never saw."""

from typing import Annotated, ClassVar, Final

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from perfmodel.bounds import Share
from perfmodel.documents.base import Document, Provenance, Record
from perfmodel.documents.observation import RunSetting
from perfmodel.machine.evidence import Evidence
from perfmodel.statistics.interval import Interval


class ComparedSetting(Record):
    """One held-out setting. Signed errors are predicted over measured, minus 1."""

    setting: RunSetting
    predicted_s: Interval
    measured_s: PositiveFloat
    """Typical step over repetitions, each at the machine speed of the calibration. [s]"""
    measured_raw_s: PositiveFloat
    """Typical step over repetitions as the clock showed it. [s]"""
    num_repetitions: PositiveInt
    measured_relative_error: NonNegativeFloat
    """Standard error of the logarithm of ``measured_s``, from its repetitions."""
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

    setting: RunSetting
    calibrated_s: PositiveFloat
    measured_s: PositiveFloat
    measured_raw_s: PositiveFloat
    signed_error: float
    signed_error_raw: float


class ValidationDocument(Document):
    """The tool's own error."""

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "validation"
    made_by: ClassVar[str] = "perfmodel validate"

    provenance: Provenance
    profile_digest: str
    observations_sha256: str
    machine_slowdown: PositiveFloat
    """Speed probe now over speed probe at calibration: 1.05 means that the machine is 5 % slower."""
    steal: Share = 0.0
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


class ComparedModel(Record):
    """One held-out run. Signed errors are predicted over measured, minus 1."""

    setting: RunSetting
    mode: str
    """ "measured": the model's own operators, timed in place; "curves": calibrated curves alone."""
    predicted_s: Interval
    measured_s: PositiveFloat
    """Trimmed mean over repetitions, at the machine speed of the calibration. [s]

    Of steps that took turns with replays: their ratio, step by pass, times the typical replay.
    """
    measured_raw_s: PositiveFloat
    """As the clock showed it. [s]"""
    processor_s: NonNegativeFloat
    """Processor time of a step, at the machine speed of the calibration; waiting does not count. [s]"""
    num_repetitions: PositiveInt
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

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "validation of models"
    made_by: ClassVar[str] = "perfmodel validate models"

    provenance: Provenance
    profile_digest: str
    observations_sha256: str
    mode: str
    machine_slowdown: PositiveFloat
    steal: Share = 0.0
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


class PublishedErrors(Record):
    """One predictor on one series; errors are predicted over measured, minus 1."""

    method: str
    bias: float
    mape: Annotated[float, Field(ge=0)]
    median_absolute: Annotated[float, Field(ge=0)]
    worst_absolute: Annotated[float, Field(ge=0)]
    coverage: float | None
    """Fraction inside the 90 % interval; None for predictors without intervals."""


class PublishedSeries(Record):
    """What was fitted, what was predicted, and how wrong each predictor was."""

    source: str
    name: str
    fitted: str
    predicted: str
    num_fitted: PositiveInt
    num_predicted: PositiveInt
    errors: Annotated[tuple[PublishedErrors, ...], Field(min_length=1)]
    """Ours first, then the baselines."""


class PublishedDocument(Document):
    """Verdict over all series."""

    title: ClassVar[str] = "published verdict"
    made_by: ClassVar[str] = "perfmodel validate published"

    provenance: Provenance
    data_sha256: dict[str, str]
    series: tuple[PublishedSeries, ...]
    skipped: tuple[str, ...]
    """Series that hold too little to hold something out."""


class PredictedStrategy(Record):
    """What was predicted before a setting ran."""

    name: str
    step_s: Interval
    """Median step of a run. [s]"""


class JudgedStrategy(Record):
    """One setting, predicted beside measured. Errors are predicted over measured, minus 1."""

    name: str
    family: str
    world_size: PositiveInt
    predicted: PredictedStrategy
    measured_s: PositiveFloat
    """Median step. [s]"""
    signed_error: float
    is_covered: bool
    variation: NonNegativeFloat
    """Standard deviation over mean of the steps."""
    own_cpu_share: NonNegativeFloat
    """What the ranks needed of the machine that plays them."""


class StrategyFamily(Record):
    """Settings that are summed up together."""

    name: str
    summary: ErrorSummary
    coverage: Share


class StrategiesDocument(Document):
    """The verdict on real runs of strategies."""

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "verdict on strategies"
    made_by: ClassVar[str] = "perfmodel validate strategies"

    provenance: Provenance
    law: dict[str, float]
    """Parameters that were calibrated with two ranks."""
    settings: Annotated[tuple[JudgedStrategy, ...], Field(min_length=1)]
    families: tuple[StrategyFamily, ...]
    """Every strategy, and all as the last."""
    gates: tuple[Gate, ...]
    passed: bool


class ErrorsBySize(Record):
    """All collectives over the same links, by the size of their arrays."""

    name: str
    errors: ErrorSummary
    noise: NonNegativeFloat
    """MAPE that a law without errors would show, by the spread of the rounds."""


class NetworkVerdict(Document):
    """Verdict on every collective, each predicted from a part of what was measured."""

    title: ClassVar[str] = "network verdict"
    made_by: ClassVar[str] = "perfmodel validate network"

    provenance: Provenance
    series: Annotated[tuple[PublishedSeries, ...], Field(min_length=1)]
    by_size: tuple[ErrorsBySize, ...] = ()
    """Absent from early verdicts."""
    gates: tuple[Gate, ...]
    passed: bool


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

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "validation of batches"
    made_by: ClassVar[str] = "perfmodel validate batch"

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
