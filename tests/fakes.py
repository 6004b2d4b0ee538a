"""Stand-ins for the ports of the product: same signatures, no processes, no clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

from calibrate.launch import Launch


def _finish(_launch: Launch) -> None:
    """Every rank ends well and says nothing."""


@dataclass(slots=True, kw_only=True)
class FakeLauncher:
    """Records launches; ``behave`` plays the ranks: writes lines, or raises as the real one does."""

    behave: Callable[[Launch], None] = _finish
    calls: list[Launch] = field(default_factory=list)

    def run(self, launch: Launch) -> None:
        self.calls.append(launch)
        self.behave(launch)
