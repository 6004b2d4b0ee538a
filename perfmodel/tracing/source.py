"""What is traced: how to build a model, one batch for it, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from perfmodel.errors import UsageError


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
    caveats: tuple[str, ...] = ()
    """What the trace assumes and a reader must know."""


def classification_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy of scores ``(N, classes)`` against labels ``(N,)``."""
    assert targets is not None
    return nn.functional.cross_entropy(outputs, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """What one sample measures, where the model leaves it open."""

    image_size: int | None = None
    """Pixels along each side; ``None`` for the model's own default."""
    sequence_length: int | None = None
    """Tokens; ``None`` for the longest that the model is made for, at most 2,048."""


def refuse_sizes(size: SampleSize, *allowed: str, text: str) -> None:
    """Complain about a size that a model does not take.

    Raises
    ------
    UsageError
        If a size is given that is not among the allowed ones.
    """
    for field in fields(size):
        flag = "--" + field.name.replace("_", "-")
        if getattr(size, field.name) is not None and field.name not in allowed:
            raise UsageError(
                f"{flag}: {text} does not take it; leave it out (where names are shared, "
                "torchvision:NAME is the model of torchvision)"
            )
