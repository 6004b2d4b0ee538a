"""What a training step runs on: what every machine says, however its costs were found."""

from dataclasses import dataclass


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
