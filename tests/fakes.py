"""Stand-ins for the ports of the product: same signatures, no processes, no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from calibrate.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCall:
    """One call of ``Launcher.run``."""

    arguments: tuple[str, ...]
    topology: Topology
    conditions: Mapping[str, str]
    on_line: Callable[[str], None]
    last_progress: Callable[[], float]
    stall_timeout_s: float


def _finish(_call: LaunchCall) -> None:
    """Every rank ends well and says nothing."""


@dataclass(slots=True, kw_only=True)
class FakeLauncher:
    """Records calls; ``behave`` plays the ranks: writes lines, or raises as the real one does."""

    behave: Callable[[LaunchCall], None] = _finish
    calls: list[LaunchCall] = field(default_factory=list)

    def run(
        self,
        arguments: Sequence[str],
        *,
        topology: Topology,
        conditions: Mapping[str, str],
        on_line: Callable[[str], None],
        last_progress: Callable[[], float],
        stall_timeout_s: float,
    ) -> None:
        call = LaunchCall(
            arguments=tuple(arguments),
            topology=topology,
            conditions=conditions,
            on_line=on_line,
            last_progress=last_progress,
            stall_timeout_s=stall_timeout_s,
        )
        self.calls.append(call)
        self.behave(call)
