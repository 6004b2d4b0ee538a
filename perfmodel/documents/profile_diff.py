"""What changed between two profiles, beyond what measuring them twice would change."""

from typing import Annotated, ClassVar

from pydantic import Field

from perfmodel.documents.base import Document, Record, Share
from perfmodel.documents.prediction import Interval


class Difference(Record):
    """One parameter in both profiles."""

    what: str
    unit: str
    old: float
    new: float
    error: Annotated[float, Field(ge=0)]
    """Standard error of the difference: in log, or in the unit if ``is_additive``."""
    is_additive: bool
    """Whether the values are compared by difference; by ratio otherwise."""
    z: float
    """Difference over its standard error; positive: more than before."""
    adjusted_p: Share
    """Smallest false discovery rate at which this counts as a change."""
    is_change: bool


class MovedPrediction(Record):
    """One question, answered with both profiles."""

    what: str
    old_step_s: Interval
    new_step_s: Interval
    ratio: Interval
    """New step over old step."""
    is_moved: bool
    """Whether the 90 % interval of the ratio leaves out 1."""


class ProfileDiffDocument(Document):
    """Two profiles side by side."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "profile difference"

    command_line: tuple[str, ...]
    old_digest: str
    new_digest: str
    false_discovery_rate: Share
    facts: dict[str, tuple[str, str]]
    """Facts of the environment that differ: old and new."""
    differences: tuple[Difference, ...]
    """The least likely by chance first."""
    missing: tuple[str, ...]
    """Parameters that only one of the two holds."""
    predictions: tuple[MovedPrediction, ...]
    caveats: tuple[str, ...]
