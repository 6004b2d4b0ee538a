"""How far the law of collectives was off real collectives on this machine."""

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat

from perfmodel.documents.base import Document, Provenance, Record
from perfmodel.documents.published import PublishedSeries
from perfmodel.documents.validation import ErrorSummary, Gate


class ErrorsBySize(Record):
    """All collectives over the same links, by the size of their arrays."""

    name: str
    errors: ErrorSummary
    noise: NonNegativeFloat
    """MAPE that a law without errors would show, by the spread of the rounds."""


class NetworkVerdict(Document):
    """Verdict on every collective, each predicted from a part of what was measured."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "network verdict"

    provenance: Provenance
    series: Annotated[tuple[PublishedSeries, ...], Field(min_length=1)]
    by_size: tuple[ErrorsBySize, ...] = ()
    """Absent from early verdicts."""
    gates: tuple[Gate, ...]
    passed: bool
