"""Costs of a device as whole training steps of many models tell them."""

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from annotated_types import MinLen

from perfmodel.bounds import Count, NonNegative, Positive

#: Precisions that devices compute in at different rates; 16-bit types share one.
Precision = Literal["fp32", "half"]
MemoryFormat = Literal["contiguous", "channels_last"]
#: Deviate of Student's distribution with four degrees of freedom that 5 % exceed: tails of errors are heavy.
HEAVY_TAILED_90: Final = 2.132


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutError:
    """Errors of model families that a fit had not seen, each left out once."""

    precision: Precision
    memory_format: MemoryFormat
    num_rows: Count
    num_families: Count
    mape: NonNegative
    """Mean absolute error, predicted over measured minus 1."""
    log_error: Positive
    """Absolute error in log that one new model in ten exceeds; few rows lean on errors of other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """Constants of the law of steps, fitted to the step times of others."""

    flop_per_s: dict[Precision, Positive]
    """Peaks of the data sheet, by precision of the factors."""
    bytes_per_s: Positive
    """Memory bandwidth of the data sheet."""
    constants: dict[str, Positive]
    """By name; what is not here is as the prior over devices says."""
    undetermined: tuple[str, ...]
    """Names among them that the rows hardly tell: the prior is kept."""
    left_out: Annotated[tuple[LeftOutError, ...], MinLen(1)]
    """By precision and memory format, that with most rows first."""
    num_rows: Count
    num_models: Count
    source: str
    """Who measured the steps, and where."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the software that was measured, such as torch."""
    version_drift: NonNegative = 0.0
    """Absolute change in log between versions that one model in ten exceeds; 0 if unknown."""

    def error(self, precision: Precision, memory_format: MemoryFormat) -> LeftOutError | None:
        """Errors of left-out families in one mode, if rows show it."""
        found = (
            e for e in self.left_out if (e.precision, e.memory_format) == (precision, memory_format)
        )
        return next(found, None)
