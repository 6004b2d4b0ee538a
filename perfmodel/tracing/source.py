"""What is traced: how to build a model, one batch for it, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs and targets of one micro-step."""

    positional: tuple[Any, ...]
    keyword: dict[str, Any]
    targets: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that can be built and trained for a step; nothing is built yet."""

    name: str
    sample: str
    """What one sample is, such as "3x224x224 image"."""
    build: Callable[[], nn.Module]
    draw_batch: Callable[[int], Batch]
    """A synthetic batch of so many samples."""
    loss: Callable[[Any, Tensor | None], Tensor]
    """Scalar loss from what the model returns and the targets."""


def classification_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy of scores ``(N, classes)`` against labels ``(N,)``."""
    assert targets is not None
    return nn.functional.cross_entropy(outputs, targets)
