"""What commands that judge a profile are asked."""

from dataclasses import dataclass
from pathlib import Path

from perfmodel.machine.measured import MeasuredMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for: the profile that is judged, how thoroughly, and where runs are kept."""

    profile: MeasuredMachine
    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False
