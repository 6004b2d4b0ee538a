"""What batch sizes mean for the time to a target, not for samples per second alone."""

from typing import ClassVar

from pydantic import PositiveFloat

from perfmodel.documents.base import Document, Record
from perfmodel.documents.prediction import Interval


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

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "batch outlook"

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
