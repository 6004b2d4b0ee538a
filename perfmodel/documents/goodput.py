"""The course of a job over weeks: when it ends, where its time goes, how often to write checkpoints."""

from typing import ClassVar, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from perfmodel.documents.base import Document, Record
from perfmodel.engine.job import Job
from perfmodel.statistics import Interval


class TriedInterval(Record):
    """A checkpoint interval and what became of the job with it."""

    interval_s: PositiveFloat
    elapsed_mean_s: PositiveFloat
    is_as_good_as_best: bool
    """Not told apart from the best one: within two standard errors of their paired difference."""


class CheckpointIntervals(Record):
    """Work between two checkpoints, by everybody who has a formula. [s]"""

    young_s: PositiveFloat
    daly_s: PositiveFloat
    exact_s: PositiveFloat
    """Minimum of Daly's complete model, exactly."""
    simulated: tuple[TriedInterval, ...]
    """In ascending order; empty if no search was asked for."""

    @property
    def simulated_best(self) -> TriedInterval | None:
        """The one with the earliest mean end."""
        return min(self.simulated, key=lambda tried: tried.elapsed_mean_s, default=None)


class GoodputDocument(Document):
    """Answer of simulated courses of a job."""

    schema_version: int = 2
    title: ClassVar[str] = "goodput"
    made_by: ClassVar[str] = "perfmodel goodput"

    command_line: tuple[str, ...]
    seed: int
    replicas: PositiveInt
    job: Job
    mtbf_stops: PositiveInt | None
    """From how many stops the mean times between failures were estimated; None: taken as exact."""
    elapsed_s: Interval
    """From the start of the job to its end, by the calendar. [s]"""
    elapsed_mean_s: PositiveFloat
    elapsed_mean_error_s: float
    """Standard error of the mean, from the finite number of courses. [s]"""
    effective_fraction: Interval
    """Training that was kept, over all time."""
    unplanned_stops: Interval
    stops_mean: dict[str, float]
    """By cause."""
    planned_stops_mean: float
    spent_mean_s: dict[str, float]
    """By activity; sums to the mean elapsed time. [s]"""
    closed_form_elapsed_s: PositiveFloat | None
    """Daly's complete model; None where it does not hold. [s]"""
    closed_form_note: str
    intervals: CheckpointIntervals | None
    """None if nothing ever fails, or a checkpoint costs nothing."""
    deadline_s: PositiveFloat | None
    deadline_probability: float | None
    """Share of the courses that end in time."""
    caveats: tuple[str, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total_s = sum(self.spent_mean_s.values())
        if abs(total_s - self.elapsed_mean_s) > 1e-6 * self.elapsed_mean_s:
            raise ValueError(
                f"spent_mean_s must sum to elapsed_mean_s, got {total_s} and {self.elapsed_mean_s}"
            )
        return self


class BatchOutlook(Record):
    """One batch size; ratios are against the reference batch."""

    batch: PositiveFloat
    """Samples per optimizer step, of all devices together."""
    samples: Interval
    """Samples to the target in one more tuned run."""
    steps: Interval
    samples_ratio: Interval
    """Samples to the target over those of the reference batch, by the law alone."""
    samples_per_s: PositiveFloat | None
    throughput_speedup: PositiveFloat | None
    target_speedup: Interval | None
    """Time to the target of the reference batch over that of this one: the speed-up that counts."""
    learning_rate_factor: PositiveFloat
    """Best learning rate of SGD over that of the reference batch; for Adam its square root."""
    time_to_target_s: Interval | None
    is_beyond_critical: bool
    """Larger than the median critical batch."""
    is_extrapolated: bool
    """Larger than every batch that was run."""


class BatchDocument(Document):
    """The law of the batch of one task, and what follows from it."""

    schema_version: int = 2
    title: ClassVar[str] = "batch outlook"
    made_by: ClassVar[str] = "perfmodel batch"

    command_line: tuple[str, ...]
    points: dict[PositiveFloat, PositiveFloat]
    """Batch to samples to the target, as they were given, in samples."""
    reference_batch: PositiveFloat
    noise_scale: PositiveFloat | None
    """Gradient noise scale that the critical batch was expected at; None without one. [samples]"""
    critical_batch: Interval
    """Batch that needs twice the samples of a tiny one."""
    outlooks: tuple[BatchOutlook, ...]
    caveats: tuple[str, ...]
