"""What the what-if page asks; limits stand here, because anybody may ask."""

from typing import Annotated, Literal

from pydantic import Field

from perfmodel.documents import Record
from perfmodel.layout import MOST_BATCH

_Text = Annotated[str, Field(min_length=1, max_length=200)]
_Value = Annotated[str, Field(min_length=1, max_length=40)]
_Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]


class LoggedSpeed(Record):
    """What a training of the same setting logged, of all devices."""

    value: Annotated[float, Field(gt=0, le=1e12)]
    unit: Literal["ms", "s", "samples/s", "tokens/s"]


class PageQuestion(Record):
    """A workload under a layout on a machine of the page."""

    profile: _Text
    """Name on the page, never a path."""
    workload: _Text
    """The same; on a machine inferred from runs a transformer."""
    layout: _Text
    """In the grammar of ``--layout``; on a calibrated machine ``dp=DEVICES``."""
    scaling: Literal["weak", "strong"] = "weak"
    """On a calibrated machine."""
    batch: _Batch | None = None
    """Weak: of each device; strong, or on a machine inferred from runs: of all devices."""
    changes: Annotated[dict[_Text, _Value], Field(max_length=16)] = Field(default_factory=dict)
    """Fields of ``perfmodel whatif --set`` on a calibrated machine, values as typed there."""
    cluster: _Text | None = None
    """Name on the page, never a path; None: as the machine has it."""
    capacity_bytes: Annotated[int, Field(ge=1, le=2**60)] | None = None
    """Memory of one device. [B]"""
    logged: LoggedSpeed | None = None
