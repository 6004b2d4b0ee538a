"""What a training step runs on: what every machine says, however its costs were found."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: Of machines for large models, where nobody says it: boards hold eight.
DEVICES_PER_NODE: Final = 8


class Evidence(enum.StrEnum):
    """Where a term comes from, from the best to the weakest."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    INFERRED = "inferred"
    """From runs of others; no part of a step was measured alone."""
    ASSUMED = "assumed"

    @classmethod
    def weakest(cls, found: Iterable["Evidence"]) -> "Evidence":
        """The weakest of some; of none, the weakest there is."""
        return max(found, key=list(cls).index, default=cls.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file that a machine was read from."""

    digest: str = ""
    """SHA-256 of what the file says; the same data fitted again gives the same."""
    fingerprint: str = ""
    """Of the host that was measured."""
    made_utc: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """A machine; a what-if is ``dataclasses.replace`` of one. Equal only to itself."""

    device_name: str
    origin: Origin = Origin()
    """Kept by ``replace``: variants of one machine share their draws. Never in a file."""

    @property
    def digest(self) -> str:
        """SHA-256 of what the file says that the machine was read from."""
        return self.origin.digest
