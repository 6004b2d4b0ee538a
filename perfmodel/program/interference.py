"""How compute and communication slow each other down while both run on a device."""

from dataclasses import dataclass

from perfmodel import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Speed of each side while both are busy, as a fraction of its speed alone.

    Fractions of 1 mean free overlap; two fractions that add up to 1 mean that the two share one
    resource and overlap gains nothing, as on a CPU whose cores also move the bytes.
    """

    compute_speed: float = 1.0
    comm_speed: float = 1.0

    def __post_init__(self) -> None:
        """Refuse speeds outside (0, 1]."""
        checks.fraction("compute_speed", self.compute_speed)
        checks.fraction("comm_speed", self.comm_speed)

    @property
    def is_none(self) -> bool:
        """Whether overlap costs nothing."""
        return self.compute_speed == 1.0 and self.comm_speed == 1.0
