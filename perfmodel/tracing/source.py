"""What is traced: how to build a model, one batch for it, its loss and its optimizer."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from perfmodel.errors import UsageError
from perfmodel.workload.step import OPTIMIZERS

_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs and targets of one micro-step."""

    positional: tuple[Any, ...]
    keyword: dict[str, Any]
    targets: Tensor | None = None
    origin: str = ""
    """Where the shapes are from, if the user gave none."""

    @property
    def sample(self) -> str:
        """One sample of the inputs by its shapes, such as "16x8 float32"; nested ones by their keys."""
        leaves = tree_leaves_with_path((self.positional, self.keyword))
        shapes = (
            "".join(f"{key.key}: " for key in path if isinstance(key, MappingKey))
            + ("x".join(str(size) for size in value.shape[1:]) or "1")
            + f" {str(value.dtype).removeprefix('torch.')}"
            for path, value in leaves
            if isinstance(value, Tensor)
        )
        return ", ".join(shapes) + (f" ({self.origin})" if self.origin else "")

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The inputs and the targets of a batch that has one tensor of each."""
        [inputs] = self.positional
        assert self.targets is not None
        return inputs, self.targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that can be built and trained for a step; nothing is built yet."""

    name: str
    build: Callable[[], nn.Module]
    draw_batch: Callable[[int], Batch]
    """A synthetic batch of a number of samples."""
    loss: Callable[[Any, Tensor | None], Tensor]
    """Scalar loss from what the model returns and the targets."""
    sample: str = ""
    """One sample in words, such as "3x224x224 image"; empty: the shapes of a batch tell."""
    caveats: tuple[str, ...] = ()
    """What the trace assumes and a reader must know."""
    depth: int = 0
    """Layers that are alike; 0 if nothing is known of them."""
    with_depth: "Callable[[int], ModelSource] | None" = None
    """The same model with another number of such layers."""
    own_samples: Callable[[], int | None] = lambda: None
    """Samples of the batch that comes with the model, once it is built; None without one."""


def images(*shape: int) -> Callable[[int], Tensor]:
    """Drawer of random images."""
    return lambda samples: torch.randn(samples, *shape)


def tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    """Drawer of random sequences of token ids."""
    return lambda samples: torch.randint(0, vocabulary, (samples, length))


def labelled(draw: Callable[[int], Tensor], num_classes: int) -> Callable[[int], Batch]:
    """Drawer of batches with one random class of each sample."""
    return lambda samples: Batch(
        positional=(draw(samples),), keyword={}, targets=torch.randint(0, num_classes, (samples,))
    )


def texts(vocabulary: int, length: int) -> Callable[[int], Batch]:
    """Drawer of batches of sequences with the next of each of their tokens."""
    draw = tokens(vocabulary, length)
    return lambda samples: Batch(positional=(draw(samples),), keyword={}, targets=draw(samples))


def classification_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy of scores ``(N, classes)`` against labels ``(N,)``."""
    assert targets is not None
    return nn.functional.cross_entropy(outputs, targets)


def token_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy of scores ``(N, tokens, vocabulary)`` against the next tokens ``(N, tokens)``."""
    assert targets is not None
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """The size of one sample, where the model leaves it open."""

    image_size: int | None = None
    """Pixels along each side; ``None`` for the model's own default."""
    sequence_length: int | None = None
    """Tokens; ``None`` for the longest that the model is made for, at most 2,048."""

    def refuse_except(self, *allowed: str, text: str) -> None:
        """Complain about a size that a model does not take."""
        for field in fields(self):
            if getattr(self, field.name) is not None and field.name not in allowed:
                raise UsageError(
                    f"--{field.name.replace('_', '-')}: {text} does not take it; leave it out (where "
                    "names are shared, torchvision:NAME is the model of torchvision)"
                )


#: Of a user who says none.
OWN_SIZE: Final = SampleSize()


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, name: str, implementation: str
) -> torch.optim.Optimizer:
    """An optimizer with its implementation said outright, because the default depends on the device."""
    row = OPTIMIZERS[name]
    if implementation not in row.implementations:
        raise UsageError(
            f"--optimizer-implementation: must be one of {', '.join(row.implementations)} for {name}, got "
            f"{implementation}"
        )
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, row.torch_name)
    flags = {flag: flag == implementation for flag in row.implementations if flag != "loop"}
    arguments: dict[str, Any] = {"lr": _RATE, **flags, **row.arguments}
    return kind(parameters, **arguments)


def default_implementation(device_kind: str) -> str:
    """What torch chooses where a user asks for nothing: "foreach", "fused" or "loop"."""
    # What is neither exists as shapes alone.
    is_real = device_kind in ("cpu", "cuda")
    with nullcontext() if is_real else FakeTensorMode():
        parameter = nn.Parameter(torch.empty(1, device=torch.device(device_kind)))
    fused, foreach = _default_to_fused_or_foreach(
        [parameter], differentiable=False, use_fused=False
    )
    return "fused" if fused else "foreach" if foreach else "loop"
