"""Optimizers: what each keeps, moves and runs per parameter. A new one is a new row of ``OPTIMIZERS``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One update rule of ``torch.optim``."""

    torch_name: str
    """Its class there."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Beside parameters and learning rate."""
    states: int
    """Elements that it keeps per parameter."""
    passes: int
    """Elements that it reads and writes per parameter and step."""
    implementations: tuple[str, ...] = ("loop", "foreach", "fused")


#: Each reads parameter, gradient and its states, and writes all but the gradient.
OPTIMIZERS: Final[Mapping[str, Optimizer]] = MappingProxyType(
    {
        "sgd": Optimizer(torch_name="SGD", arguments={"momentum": 0.9}, states=1, passes=5),
        "adamw": Optimizer(torch_name="AdamW", states=2, passes=7),
    }
)
ADAMW: Final = OPTIMIZERS["adamw"]
IMPLEMENTATIONS: Final = tuple(
    dict.fromkeys(each for row in OPTIMIZERS.values() for each in row.implementations)
)
#: In place of one of them: whatever torch chooses on the device for a loop that asks for nothing.
DEFAULT: Final = "default"
#: What it chooses on a GPU.
CUDA_DEFAULT: Final = "foreach"
