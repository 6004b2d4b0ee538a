"""Times that techniques of one device rest on: phases of a step, and transfers from and to the host."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from perfmodel import checks
from perfmodel.units import Bytes, BytesPerSecond, Seconds
from perfmodel.workload.memory import Block

#: An AdamW update reads parameter, gradient and two moments, and writes all but the gradient.
_UPDATE_PASSES: Final = 7


class Basis(enum.StrEnum):
    """What a figure of a technique rests on, from the best to the weakest."""

    MEASURED = "measured"
    DERIVED = "derived from the trace"
    SCALED = "scaled"
    DATA_SHEET = "data-sheet"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Time of the phases of a step. [s]"""

    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    basis: Basis
    fused_s: Seconds | None = None
    """The optimizer's phase if it were fused, where curves tell. [s]"""
    mixed_s: Seconds | None = None
    """The step under autocast to bf16, where rates of both precisions tell. [s]"""
    mixed_basis: Basis = Basis.ASSUMED
    graphed_s: Seconds | None = None
    """The step if the host had nothing to issue, on devices that run behind it. [s]"""

    @property
    def step_s(self) -> Seconds:
        """All phases. [s]"""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Between device and host memory, and host memory itself."""

    to_device_bytes_per_s: BytesPerSecond
    to_host_bytes_per_s: BytesPerSecond
    host_memory_bytes_per_s: BytesPerSecond
    basis: Basis = Basis.ASSUMED

    def __post_init__(self) -> None:
        """Refuse links that carry nothing."""
        checks.positive("to_device_bytes_per_s", self.to_device_bytes_per_s)
        checks.positive("to_host_bytes_per_s", self.to_host_bytes_per_s)
        checks.positive("host_memory_bytes_per_s", self.host_memory_bytes_per_s)


def offload_s(parameter_bytes: Bytes, link: HostLink) -> Seconds:
    """Gradients to the host, the update there, parameters back, one after the other. [s]"""
    return (
        parameter_bytes / link.to_host_bytes_per_s
        + _UPDATE_PASSES * parameter_bytes / link.host_memory_bytes_per_s
        + parameter_bytes / link.to_device_bytes_per_s
    )


def streaming_s(
    blocks: Sequence[Block], shares: Mapping[str, float], times: StepTimes, link: HostLink
) -> Seconds:
    """A step whose blocks come from host memory while their neighbours compute. [s]

    Per block a pass takes the longer of its compute and its transfers; the two directions of the
    link work at once; the host updates a block while others are computed backward, and is waited for.
    """
    forward_s = backward_s = 0.0
    for block in blocks:
        share = shares.get(block.path, 0.0)
        arrive_s = block.parameter_bytes / link.to_device_bytes_per_s
        leave_s = block.parameter_bytes / link.to_host_bytes_per_s
        forward_s += max(share * times.forward_s, arrive_s)
        backward_s += max(share * times.backward_s, arrive_s, leave_s)
    outside = max(0.0, 1.0 - sum(shares.get(block.path, 0.0) for block in blocks))
    streamed = sum(block.parameter_bytes for block in blocks)
    update_s = _UPDATE_PASSES * streamed / link.host_memory_bytes_per_s
    first_s = blocks[0].parameter_bytes / link.to_device_bytes_per_s if blocks else 0.0
    return (
        first_s
        + forward_s
        + max(backward_s, update_s)
        + outside * (times.forward_s + times.backward_s)
    )
