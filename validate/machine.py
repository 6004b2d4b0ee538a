"""A profile is judged on the machine that it describes."""

from dataclasses import dataclass
from pathlib import Path

from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import CalibrationUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for: the profile that is judged, how thoroughly, and where runs are kept."""

    profile: ProfileDocument
    folder: Path
    budget: str = "standard"
    seed: int = 1
    resume: bool = False


def refuse_other_machine(profile: ProfileDocument, fingerprint: str) -> None:
    """Compare the fingerprint of this machine with that in the profile.

    Raises
    ------
    CalibrationUnavailable
        If they differ.
    """
    found = profile.provenance.host_fingerprint
    if found != fingerprint:
        raise CalibrationUnavailable(
            f"--profile: must describe this machine (fingerprint {fingerprint[:12]}), got "
            f"{found[:12]} ({profile.device_name}); run perfmodel calibrate here"
        )
