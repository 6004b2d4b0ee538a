"""Scenarios side by side: the same question with some fields changed."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from perfmodel.documents.base import Document, Provenance, Record, Share
from perfmodel.documents.prediction import Interval, PredictedPoint


class Contrast(Record):
    """A scenario against the first one, draw by draw."""

    throughput_ratio: Interval
    """Samples per second over those of the first scenario."""
    step_difference_s: Interval
    """Step minus that of the first scenario, whatever their batches. [s]"""
    probability_faster: Share
    """Share of the draws with more samples per second."""
    is_paired: bool
    """Whether both sides share their draws: errors of the same machine then cancel."""


class ScenarioOutcome(Record):
    """What one scenario would do."""

    name: str
    changes: dict[str, str]
    """Field to value, as typed; empty for the question as it was asked."""
    machine_digest: str
    """Of the profile before the changes: scenarios of the same machine share their draws."""
    device_name: str
    workload: str
    scaling: Literal["weak", "strong"]
    point: PredictedPoint
    step_draws_s: tuple[PositiveFloat, ...]
    """The nominal step first. [s]"""
    lost_s: dict[str, float]
    """Cause to the time that its removal alone would save, per step of this scenario. [s]"""
    remarks: tuple[str, ...]
    contrast: Contrast | None
    """None for the first scenario."""


class WhatIfDocument(Document):
    """Scenarios, the first of which the others are compared with."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "what-if"
    made_by: ClassVar[str] = "perfmodel whatif --output writes one"

    provenance: Provenance
    scenarios: Annotated[tuple[ScenarioOutcome, ...], Field(min_length=1)]
    caveats: tuple[str, ...]
