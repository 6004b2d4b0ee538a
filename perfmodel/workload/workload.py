"""What is trained: parameters in gradient-ready order, buffers, and the work of one sample."""

from dataclasses import dataclass

from perfmodel import checks
from perfmodel.units import Bytes, Flop


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One trainable tensor."""

    name: str
    num_elements: int
    element_bytes: int = 4
    ready_fraction: float = 1.0
    """When its gradient is ready, as a fraction of the backward pass (0 = start, 1 = end)."""

    def __post_init__(self) -> None:
        """Refuse empty tensors and times outside the backward pass."""
        checks.at_least("num_elements", self.num_elements, 1)
        checks.at_least("element_bytes", self.element_bytes, 1)
        if not 0 <= self.ready_fraction <= 1:
            raise ValueError(f"ready_fraction must be in [0, 1], got {self.ready_fraction}")

    @property
    def size_bytes(self) -> Bytes:
        """Bytes of the parameter, and of its gradient."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its loss, independent of any machine."""

    name: str
    sample: str
    """What one sample is, such as "1x28x28 image"."""
    parameters: tuple[Parameter, ...]
    """In the order in which backward produces their gradients."""
    buffer_bytes: tuple[Bytes, ...] = ()
    """Buffers that DDP broadcasts before a forward pass, one figure per data type. [B]"""
    forward_flop: Flop
    """Floating point operations of one forward pass per sample. [FLOP/sample]"""
    backward_flop: Flop
    num_operators: int
    """Operators dispatched in one forward and backward pass, whatever the batch."""

    def __post_init__(self) -> None:
        """Refuse workloads without parameters or with times out of order."""
        if not self.parameters:
            raise ValueError(f"parameters of {self.name} must not be empty")
        fractions = [parameter.ready_fraction for parameter in self.parameters]
        if fractions != sorted(fractions):
            raise ValueError(f"parameters of {self.name} must be in gradient-ready order")
        checks.non_negative("forward_flop", self.forward_flop)
        checks.non_negative("backward_flop", self.backward_flop)
        checks.at_least("num_operators", self.num_operators, 0)

    @property
    def num_parameters(self) -> int:
        """Trainable elements."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def gradient_bytes(self) -> Bytes:
        """Bytes of all gradients."""
        return sum(parameter.size_bytes for parameter in self.parameters)


def is_model(workload: str) -> bool:
    """Whether a workload is neither a name in the profile nor a file, but a model to be traced."""
    return ".py:" in workload or workload.startswith(("torchvision:", "timm:"))
