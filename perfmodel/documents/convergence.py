"""The verdict on the law of the batch: published tasks, predicted beside measured."""

from typing import ClassVar

from perfmodel.documents.base import Document, Record


class PredictedBatch(Record):
    """One batch of a benchmark that the fit has not seen."""

    split: str
    benchmark: str
    round: str
    batch: float
    beyond: float
    """Batch over the largest fitted one."""
    predicted: float
    p5: float
    p95: float
    measured: float
    """In the unit of the source: epochs, samples or tokens."""
    constant: float
    """Baseline: as many samples as the largest fitted batch."""
    linear: float
    """Baseline: a straight line through samples over batch."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the 90 % interval held it."""
        return self.p5 <= self.measured <= self.p95


class SplitSummary(Record):
    """Errors of one split."""

    split: str
    num_series: int
    num_predictions: int
    mape: float
    bias: float
    coverage: float
    worst: float
    mape_of_benchmarks: float
    """Mean over benchmarks of the mean within each: many rounds of one count once."""
    mape_constant: float
    mape_linear: float


class ConvergenceVerdict(Document):
    """What published convergence says about the law of the batch."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "convergence verdict"

    judged_split: str
    mape_at_most: float
    coverage_at_least: float
    summaries: tuple[SplitSummary, ...]
    predictions: tuple[PredictedBatch, ...]

    @property
    def passed(self) -> bool:
        """Whether both gates held."""
        judged = next(entry for entry in self.summaries if entry.split == self.judged_split)
        return judged.mape <= self.mape_at_most and judged.coverage >= self.coverage_at_least
