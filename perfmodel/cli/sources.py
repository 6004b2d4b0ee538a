"""Which files a prediction is made from; apart from their reading, which imports numpy."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a prediction's inputs come from, as typed."""

    profile: Path
    workload: str
    """A name in the profile, or a workload file."""
    validation: Path | None = None
    cluster: Path | None = None
    device: str | None = None
    """Takes its times from data-sheet ratios, where it is not the calibrated one."""
