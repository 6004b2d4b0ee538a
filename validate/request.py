"""What commands that judge a profile are asked."""

from dataclasses import dataclass
from pathlib import Path

from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for: the profile that is judged, how thoroughly, and where runs are kept."""

    profile: MeasuredMachine
    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
    patience_s: Seconds = 0.0
    """How long to wait, in all, for other guests of the host to give processors back."""
