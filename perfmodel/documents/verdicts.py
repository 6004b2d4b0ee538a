"""Verdicts: predictions beside fresh runs, and how wrong they were.

Signed errors are predicted over measured, minus 1. An interval tells of one run: coverage is the share of single
runs that it holds, and beside it that of means over the runs of a setting.
"""

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Final

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from perfmodel.documents import Document, Provenance, Record, Text
from perfmodel.errors import EXIT_OK, EXIT_OUT_OF_TOLERANCE
from perfmodel.layout import RunSetting
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval, Share

#: Name of the plain rule that a law of scaling has to beat.
CARRIED: Final = "efficiency carried on"
#: Names of the gates on mean absolute errors, on what they exceed noise by, and on intervals.
STEP_MAPE: Final = "step-time MAPE"
SPEEDUP_MAPE: Final = "speed-up MAPE"
OVER_NOISE: Final = "step-time error over noise floor"
COVERAGE_OF_RUNS: Final = "coverage of single runs"


class Gate(Record):
    """A threshold written down before the run."""

    name: str
    unit: str
    """``fraction`` everywhere today: 0.06 is 6 %."""
    at_least: float | None = None
    at_most: float | None = None
    value: float
    passed: bool


class Errors(Record):
    """Signed errors of many settings, as fractions."""

    bias: float
    mape: NonNegativeFloat
    median_absolute: NonNegativeFloat
    worst_absolute: NonNegativeFloat


class ErrorSummary(Errors):
    """With their number."""

    num_settings: int


class Verdict(Document):
    """What a judge says."""

    provenance: Provenance
    gates: tuple[Gate, ...]
    passed: bool


class ProfileVerdict(Verdict):
    """What a judge says of predictions from a profile."""

    profile_digest: str
    observations_sha256: str
    summary: ErrorSummary
    coverage: Share
    """Of means over the runs of each setting."""
    coverage_of_runs: Share | None = None
    """Of single runs."""

    @property
    def runs_inside(self) -> float | None:
        """Share of single runs in intervals of single runs; None where the gate counted means, in narrower ones."""
        counts_runs = any(gate.name == COVERAGE_OF_RUNS for gate in self.gates)
        return self.coverage_of_runs if counts_runs else None


class Compared(Record):
    """Predicted and measured time of a step of one setting."""

    setting: RunSetting
    predicted_s: Interval
    measured_s: PositiveFloat
    """Typical over repetitions. [s]"""
    num_repetitions: PositiveInt
    measured_relative_error: NonNegativeFloat
    """Standard error of the logarithm of ``measured_s``, from its repetitions."""
    signed_error: float
    is_covered: bool
    """Whether the interval holds ``measured_s``."""
    num_inside: NonNegativeInt | None = None
    """Of the repetitions, those that the interval holds; None: not recorded."""


def scatter_alone(rows: Iterable[Compared]) -> float | None:
    """MAPE that a prediction without errors would show, by the spread of the repetitions; None without rows.

    The mean size of a normal error is sqrt(2 / pi) of its standard deviation.
    """
    squares = [row.measured_relative_error**2 for row in rows]
    return math.sqrt(2 / math.pi * sum(squares) / len(squares)) if squares else None


class ComparedSetting(Compared):
    """One held-out setting of a calibrated workload."""

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
    signed_error: float
    num_repetitions: PositiveInt | None = None
    """Pairs of runs, one of each setting; None: not recorded."""
    num_inside: NonNegativeInt | None = None
    """Of them, those that the interval holds."""


class Repeat(Record):
    """A calibrated setting run again: what even a perfect model could not predict."""

    setting: RunSetting
    calibrated_s: PositiveFloat
    measured_s: PositiveFloat
    signed_error: float


class FailedModel(Record):
    """A setting, or a model that was drawn, that could not be judged."""

    name: str
    """Its label, or seed, index and family."""
    reason: str


class ValidationDocument(ProfileVerdict):
    """The tool's own error; ``summary`` and ``speedup_summary`` are inside the calibrated range."""

    schema_version: int = 3
    title: ClassVar[str] = "validation"
    made_by: ClassVar[str] = "perfmodel validate"

    steal: Share = 0.0
    """As in the profile, of these runs."""
    settings: Annotated[tuple[ComparedSetting, ...], Field(min_length=1)]
    too_large: tuple[str, ...] = ()
    """Settings that memory did not hold: predicted, and not run."""
    failed: tuple[FailedModel, ...] = ()
    """Settings of which every run failed."""
    speedups: tuple[ComparedSpeedup, ...]
    repeats: tuple[Repeat, ...]
    summary_extrapolated: ErrorSummary | None
    """Beyond the calibrated range."""
    summary_by_workload: dict[str, ErrorSummary]
    speedup_summary: ErrorSummary | None
    speedup_summary_extrapolated: ErrorSummary | None = None
    noise_floor: ErrorSummary | None
    expected_noise: NonNegativeFloat | None = None
    """The same as the calibration leads to expect, where gates rest on it (quick budget)."""

    @property
    def speedup_coverage(self) -> float | None:
        """Share of pairs of single runs whose speed-up lies inside its interval; None: not recorded."""
        pairs = sum(row.num_repetitions or 0 for row in self.speedups)
        return sum(row.num_inside or 0 for row in self.speedups) / pairs if pairs else None

    @property
    def speedup_scatter(self) -> float | None:
        """MAPE that a prediction of speed-ups without errors would show; both their steps scatter."""
        inside = [row for row in self.settings if not row.is_extrapolated] or self.settings
        alone = scatter_alone(row for row in inside if row.setting.world_size == 1)
        together = scatter_alone(row for row in inside if row.setting.world_size > 1)
        return None if alone is None or together is None else math.hypot(alone, together)

    @property
    def speedup_noise(self) -> float | None:
        """MAPE of speed-ups of calibrated settings as predictions of the same, run again; None without any.

        Drift of a host that several ranks feel otherwise than one does not cancel.
        """
        alone = {row.setting.workload: row for row in self.repeats if row.setting.world_size == 1}
        errors = [
            abs((1 + alone[row.setting.workload].signed_error) / (1 + row.signed_error) - 1)
            for row in self.repeats
            if row.setting.world_size > 1 and row.setting.workload in alone
        ]
        return sum(errors) / len(errors) if errors else None

    @property
    def signed_errors(self) -> dict[RunSetting, float]:
        """Error of every setting."""
        return {entry.setting: entry.signed_error for entry in self.settings}


class ComparedModel(Compared):
    """One run of a model that was drawn at random."""

    family: str
    evidence: Evidence
    untimed: tuple[str, ...]
    """Operators without any timing to read."""


class ModelsValidationDocument(ProfileVerdict):
    """The error on models drawn at random; ``summary`` is of one rank alone."""

    schema_version: int = 4
    title: ClassVar[str] = "validation of models"
    made_by: ClassVar[str] = "perfmodel validate models"

    mode: str
    """ "measured": in place, trained but on a GPU, and timed; "curves": calibrated curves alone."""
    seed: int
    num_drawn: PositiveInt
    steal: Share = 0.0
    models: tuple[ComparedModel, ...]
    failed: tuple[FailedModel, ...]
    summary_by_family: dict[str, ErrorSummary]
    summary_ddp: ErrorSummary | None
    summary_later: ErrorSummary | None = None
    """By the loops at the end alone, up to half an hour after the training in place."""


class PublishedErrors(Errors):
    """One predictor on one series."""

    method: str
    coverage: float | None
    """None for predictors without intervals."""
    mape_beyond: NonNegativeFloat | None = None
    """Where more devices were asked for than fitted; None if nowhere."""


class PublishedSeries(Record):
    """What was fitted, what was predicted, and how wrong each predictor was."""

    source: str
    name: str
    fitted: str
    predicted: str
    num_fitted: PositiveInt
    num_predicted: PositiveInt
    num_beyond: NonNegativeInt = 0
    """Predictions of more devices than were fitted."""
    errors: Annotated[tuple[PublishedErrors, ...], Field(min_length=1)]
    """Ours first, then the baselines."""


class PublishedRows(Record):
    """All rows of a table: fitted or predicted by a protocol, or left out with the reason."""

    source: str
    num_judged: NonNegativeInt
    left_out: dict[str, PositiveInt]
    """By reason."""


class PublishedDocument(Document):
    """Verdict over all published series."""

    title: ClassVar[str] = "published verdict"
    made_by: ClassVar[str] = "perfmodel validate published"

    provenance: Provenance
    data_sha256: dict[str, str]
    series: tuple[PublishedSeries, ...]
    skipped: tuple[str, ...]
    """Series that hold too little to hold something out."""
    rows: tuple[PublishedRows, ...] = ()


class NetworkVerdict(Verdict):
    """Verdict on every collective, each predicted from a part of what was measured."""

    title: ClassVar[str] = "network verdict"
    made_by: ClassVar[str] = "perfmodel validate network"

    series: Annotated[tuple[PublishedSeries, ...], Field(min_length=1)]


class ComparedStrategy(Compared):
    """One stack of layers under one layout."""

    family: str


class JudgedFamily(Record):
    """Settings that are summed up together."""

    name: str
    summary: ErrorSummary
    coverage: Share
    """Of single runs; of means where the gate of the verdict counted those."""


class StrategiesDocument(ProfileVerdict):
    """The verdict on real runs of layouts, predicted from a profile alone."""

    schema_version: int = 3
    title: ClassVar[str] = "verdict on strategies"
    made_by: ClassVar[str] = "perfmodel validate strategies"

    settings: Annotated[tuple[ComparedStrategy, ...], Field(min_length=1)]
    families: tuple[JudgedFamily, ...]
    """One rank, which no gate counts, then every family of layouts, and these together as the last."""
    steal: Share
    """Processor time that a hypervisor gave to others meanwhile, of what was wanted."""


class StageRun(Record):
    """The latest run of one stage."""

    name: Text
    command: tuple[str, ...]
    exit_code: int | None
    """None: it was ended when its time was over."""
    limit_s: NonNegativeFloat
    took_s: NonNegativeFloat
    words: str
    """The last line that it wrote."""

    @property
    def is_done(self) -> bool:
        """Whether it need not run again; out of tolerance is a verdict, too."""
        return self.exit_code in (EXIT_OK, EXIT_OUT_OF_TOLERANCE)


class CampaignDocument(Document):
    """The stages of a campaign, in order."""

    title: ClassVar[str] = "campaign"
    made_by: ClassVar[str] = "perfmodel calibrate --campaign"

    version: Text
    """Of perfmodel, as it is installed where the campaign ran."""
    device_kind: Text
    truth: str | None = None
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    num_ranks: Annotated[int, Field(ge=1)]
    skipped: dict[str, str] = Field(default_factory=dict)
    """Stages that this kind of device cannot have, and why."""
    stages: tuple[StageRun, ...] = ()

    @property
    def done(self) -> frozenset[str]:
        """Names of the stages that need not run again."""
        return frozenset(stage.name for stage in self.stages if stage.is_done)

    def with_run(self, run: StageRun) -> "CampaignDocument":
        """The campaign after one more run of a stage, which replaces an earlier one."""
        others = tuple(stage for stage in self.stages if stage.name != run.name)
        return self.model_copy(update={"stages": (*others, run)})
