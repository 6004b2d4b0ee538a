"""The verdict on real runs of strategies: predicted beside measured."""

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record, Share
from perfmodel.documents.prediction import Interval
from perfmodel.documents.validation import ErrorSummary, Gate


class ForetoldStrategy(Record):
    """What was predicted before a setting ran."""

    name: str
    step_s: Interval
    """Median step of a run. [s]"""


class JudgedStrategy(Record):
    """One setting, predicted beside measured. Errors are predicted over measured, minus 1."""

    name: str
    family: str
    world_size: PositiveInt
    foretold: ForetoldStrategy
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

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "verdict on strategies"

    provenance: Provenance
    law: dict[str, float]
    """Parameters that were calibrated with two ranks."""
    settings: Annotated[tuple[JudgedStrategy, ...], Field(min_length=1)]
    families: tuple[StrategyFamily, ...]
    """Every strategy, and all as the last."""
    gates: tuple[Gate, ...]
    passed: bool
