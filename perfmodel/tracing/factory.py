"""Models of the user's own: ``path/to/module.py:factory``.

The factory is called without arguments and returns one of

- ``module``: trained on 3x224x224 images with cross-entropy over its scores;
- ``module, example``: the example is a tensor, a tuple of tensors (positional inputs) or a dictionary
  (keyword inputs), the first dimension of each being the samples;
- ``module, example, loss``: ``loss(outputs)`` returns a scalar.

Without a loss, a scalar output is the loss itself, and so is ``outputs.loss`` or ``outputs["loss"]``;
scores ``(samples, classes)`` are trained with cross-entropy.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.tracing.source import Batch, ModelSource

_PROTOCOL = "must return a module, (module, example) or (module, example, loss)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    module: nn.Module
    example: Any
    loss: Callable[[Any], Tensor] | None


def factory_source(text: str) -> ModelSource:
    """A model source of ``FILE.py:FACTORY``.

    The file is imported and the factory called once, on tensors without content, when the model is
    built.

    Raises
    ------
    UsageError
        If there is no such file or factory.
    UntraceableModel
        If the file or the factory raises, or returns something else.
    """
    file, _, name = text.rpartition(":")
    if not file or not name:
        raise UsageError(f"MODEL: must be FILE.py:FACTORY, got {text!r}")
    factory = _imported(Path(file), name, text=text)
    made: list[_Made] = []

    def build() -> nn.Module:
        made.append(_checked(factory(), text=text))
        return made[-1].module

    return ModelSource(
        name=f"{Path(file).stem}:{name}",
        sample="sample of the factory's example",
        build=build,
        draw_batch=lambda samples: _batch(made[-1].example, samples, text=text),
        loss=lambda outputs, targets: _loss(made[-1], outputs, targets, text=text),
    )


def _imported(file: Path, name: str, *, text: str) -> Callable[[], Any]:
    if not file.is_file():
        raise UsageError(f"{file}: no such file; write FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UntraceableModel(
            f"{file}: importing raised {type(error).__name__}: {error}; mend the file"
        ) from error
    finally:
        sys.path.pop(0)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = sorted(key for key, value in vars(module).items() if callable(value))
        raise UsageError(f"{text}: {file} must define {name}, it defines {', '.join(known)}")
    return factory  # type: ignore[no-any-return]


def _checked(made: Any, *, text: str) -> _Made:
    parts = made if isinstance(made, tuple) else (made,)
    module, example, loss = (*parts, None, None)[:3]
    if len(parts) > 3 or not isinstance(module, nn.Module):
        raise UntraceableModel(f"{text}: {_PROTOCOL}, got {type(module).__name__}")
    if loss is not None and not callable(loss):
        raise UntraceableModel(f"{text}: loss must be callable, got {type(loss).__name__}")
    if example is None:
        example = torch.empty(1, 3, 224, 224)
    return _Made(module=module, example=example, loss=loss)


def _batch(example: Any, samples: int, *, text: str) -> Batch:
    if isinstance(example, dict):
        keyword = {key: _resized(value, samples, text=text) for key, value in example.items()}
        return Batch(positional=(), keyword=keyword, targets=_sample_count(samples))
    items = example if isinstance(example, tuple | list) else (example,)
    positional = tuple(_resized(value, samples, text=text) for value in items)
    return Batch(positional=positional, keyword={}, targets=_sample_count(samples))


def _sample_count(samples: int) -> Tensor:
    return torch.zeros(samples, dtype=torch.int64)


def _resized(value: Any, samples: int, *, text: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        raise UntraceableModel(
            f"{text}: an example must have samples as first dimension, got a scalar"
        )
    # The example over and over: real runs need its values, such as tokens of the vocabulary.
    repeats = math.ceil(samples / max(1, len(value)))
    tiled = value.detach().repeat(repeats, *(1 for _ in value.shape[1:]))[:samples].contiguous()
    return tiled.requires_grad_(value.requires_grad)


def _loss(made: _Made, outputs: Any, targets: Tensor | None, *, text: str) -> Tensor:
    if made.loss is not None:
        return _scalar(made.loss(outputs), text=text)
    own = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return _scalar(own, text=text)
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        return outputs
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and targets is not None:
        return nn.functional.cross_entropy(outputs, targets)
    shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise UntraceableModel(
        f"{text}: without a loss the model must return a scalar, .loss or scores (samples, classes), "
        f"got {shown}; return (module, example, loss) from the factory"
    )


def _scalar(loss: Any, *, text: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise UntraceableModel(f"{text}: loss must be a tensor of one element, got {loss!r:.80}")
