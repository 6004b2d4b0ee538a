"""How far the law of collectives was off real collectives on this machine."""

from typing import Annotated, ClassVar

from pydantic import Field

from perfmodel.documents.base import Document, Provenance
from perfmodel.documents.published import PublishedSeries
from perfmodel.documents.validation import Gate


class NetworkVerdict(Document):
    """Verdict on every collective, each predicted from a part of what was measured."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "network verdict"

    provenance: Provenance
    series: Annotated[tuple[PublishedSeries, ...], Field(min_length=1)]
    gates: tuple[Gate, ...]
    passed: bool
