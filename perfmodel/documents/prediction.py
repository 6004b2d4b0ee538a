"""The prediction: quantities with intervals, evidence per term, caveats."""

import enum
from collections.abc import Iterable
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from perfmodel.arrays import FloatArray
from perfmodel.documents.base import Document, Provenance, Record
from perfmodel.parallelism.strategy import Setting
from perfmodel.program.operation import Cause


class Evidence(enum.StrEnum):
    """Where a term comes from, from the best to the weakest."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ASSUMED = "assumed"

    @classmethod
    def weakest(cls, found: Iterable["Evidence"]) -> "Evidence":
        """The weakest of some; of none, the weakest there is."""
        return max(found, key=list(cls).index, default=cls.ASSUMED)


class Interval(Record):
    """A quantity and its doubt: 90 % of outcomes should lie between p5 and p95."""

    p5: float
    p50: float
    p95: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.p5 <= self.p50 <= self.p95:
            raise ValueError(f"p5 <= p50 <= p95 must hold, got {self.p5}, {self.p50}, {self.p95}")
        return self

    @classmethod
    def of(cls, draws: FloatArray, *, nominal: float | None = None) -> Self:
        """The middle 90 % of draws around their median, or around a nominal value, always inside."""
        p5, p50, p95 = (float(value) for value in np.quantile(draws, [0.05, 0.5, 0.95]))
        if nominal is None:
            return cls(p5=p5, p50=p50, p95=p95)
        return cls(p5=min(p5, nominal), p50=nominal, p95=max(p95, nominal))

    def __mul__(self, factor: float) -> "Interval":
        return Interval(p5=self.p5 * factor, p50=self.p50 * factor, p95=self.p95 * factor)

    def __truediv__(self, divisor: float) -> "Interval":
        return Interval(p5=self.p5 / divisor, p50=self.p50 / divisor, p95=self.p95 / divisor)

    def __rtruediv__(self, dividend: float) -> "Interval":
        return Interval(p5=dividend / self.p95, p50=dividend / self.p50, p95=dividend / self.p5)

    def holds(self, measured: float) -> bool:
        """Whether a value lies inside, ends included."""
        return self.p5 <= measured <= self.p95

    def signed_error(self, measured: float) -> float:
        """Predicted over measured, minus 1."""
        return self.p50 / measured - 1


class PredictedPoint(Record):
    """One world size."""

    setting: Setting
    step_s: Interval
    """Typical step of a run, from the end of one step to the end of the next. [s]"""
    samples_per_s: Interval
    """Global batch over step. [1/s]"""
    speedup: Interval
    """Throughput over that of one device on its own (no DDP) with the batch that the scaling fixes."""
    scaling_efficiency: Interval
    """Speed-up over world size."""
    exposed_comm_s: Interval
    """Step minus the same step with communication that costs nothing. [s]"""
    breakdown_s: dict[Cause, float]
    """Time on the critical path by cause; sums to the step. [s]"""
    straggler_s: float
    """Part of the step spent waiting for the slowest rank. [s]"""
    evidence: dict[str, Evidence]
    """Term of the model to where it comes from."""
    tail_s: dict[str, Interval] = Field(default_factory=dict)
    """``p95`` and ``p99`` over the steps of a run, by the measured noise of ranks. [s]"""
    binding_link: str | None = None
    """With a cluster: which tier costs most of the largest all-reduce, and why."""

    @property
    def weakest_evidence(self) -> Evidence:
        """Of all its terms."""
        return Evidence.weakest(self.evidence.values())


class MeasuredPoint(Record):
    """A real run of the same workload, for comparison."""

    world_size: PositiveInt
    micro_batch: PositiveInt
    step_s: PositiveFloat
    speedup: PositiveFloat | None


class PredictionDocument(Document):
    """What so many devices would do for a workload."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "prediction"

    provenance: Provenance
    profile_digest: str
    validation_digest: str | None
    device_name: str
    workload: str
    scaling: Literal["weak", "strong"]
    """Weak: the batch of each rank is fixed; strong: the global batch is."""
    cluster: str | None = None
    """Name of the cluster; without it, one ring of links like the measured ones."""
    points: tuple[PredictedPoint, ...]
    measured: tuple[MeasuredPoint, ...]
    caveats: tuple[str, ...]
