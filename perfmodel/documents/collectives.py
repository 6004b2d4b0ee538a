"""Measured collectives of one system, from our own runs or imported from nccl-tests."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record
from perfmodel.documents.profile import Curve

Library = Literal["gloo", "nccl", "unknown"]


class MeasuredCollective(Record):
    """One collective in one group, over the size of the whole array."""

    collective: str
    world_size: Annotated[int, Field(ge=2)]
    num_nodes: PositiveInt
    points: Curve
    """Time over the size in bytes, ascending; the size counts as in nccl-tests (whole array)."""


class CollectivesDocument(Document):
    """What collectives cost on one system."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "collectives file"

    provenance: Provenance
    system: str
    library: Library
    ranks_per_node: PositiveInt | None
    """None if the source does not say."""
    collectives: Annotated[tuple[MeasuredCollective, ...], Field(min_length=1)]
    notes: tuple[str, ...]
    """What a reader must know: assumptions of an import, what was dropped."""
