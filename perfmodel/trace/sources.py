"""Models by what a user types: a name, ``file.py:factory``, or a Hugging Face ``config.json``."""

import difflib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torchvision import models
from torchvision.models import regnet

from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.trace.reference import MODELS, ReferenceModel


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


def find_source(
    text: str, size: SampleSize, *, option: str = "MODEL", others: Sequence[str] = ()
) -> ModelSource:
    """The model that a user names.

    A reference model hides a model of torchvision of the same name; ``torchvision:NAME`` reaches that.

    Parameters
    ----------
    option
        Where the user named it, for the error.
    others
        Names that the option knows besides.

    Raises
    ------
    UsageError
        If there is no such model or file; a name brings the nearest ones.
    UntraceableModel
        If a factory or a configuration cannot be read.
    """
    if text.endswith(".json"):
        from perfmodel.trace.huggingface import huggingface_source  # noqa: PLC0415 - on demand

        return huggingface_source(Path(text), size)
    if ".py:" in text or text.endswith(".py"):
        refuse_sizes(size, text=text)
        return factory_source(text)
    if text in MODELS:
        refuse_sizes(size, text=text)
        return reference_source(text)

    name = text.removeprefix("torchvision:")
    if name not in classification_names():
        raise UsageError(_unknown(text, option, [*others, *MODELS, *classification_names()]))
    refuse_sizes(size, "image_size", text=text)
    return torchvision_source(name, size.image_size)


def _unknown(text: str, option: str, known: list[str]) -> str:
    name = text.removeprefix("torchvision:")
    near = difflib.get_close_matches(name, set(known), n=3, cutoff=0.5)
    meant = f"; did you mean {', '.join(near)}?" if near else ""
    return (
        f"{option}: must be a reference model, a classification model of torchvision, FILE.py:FACTORY or a "
        f"Hugging Face config.json, got {text!r}{meant}"
    )


def reference_source(name: str) -> ModelSource:
    """One of the reference models."""
    reference = MODELS[name]
    return ModelSource(
        name=name,
        sample=reference.sample,
        build=reference.build,
        draw_batch=lambda samples: _reference_batch(reference, samples),
        loss=classification_loss,
    )


def _reference_batch(reference: ReferenceModel, samples: int) -> Batch:
    return Batch(
        positional=(reference.draw_inputs(samples),),
        keyword={},
        targets=torch.randint(0, reference.num_classes, (samples,)),
    )


_NUM_CLASSES: Final = 1000
#: Pixels along each side that a model is made for, where it is not 224.
_OWN_SIZE: Final = {"inception_v3": 299}
#: Share of the loss of each auxiliary classifier (Szegedy et al. 2014 and 2015, and their reference code).
_AUXILIARY_SHARE: Final = {"googlenet": 0.3, "inception_v3": 0.4}


@functools.cache
def classification_names() -> tuple[str, ...]:
    """Names of all classification models."""
    return tuple(models.list_models(module=models))


def torchvision_source(name: str, image_size: int | None) -> ModelSource:
    """A classification model for images of a size; ``None`` for the size that it is made for."""
    pixels = image_size or _OWN_SIZE.get(name, 224)
    share = _AUXILIARY_SHARE.get(name, 0.0)
    return ModelSource(
        name=f"torchvision:{name}",
        sample=f"3x{pixels}x{pixels} image",
        build=lambda: _build(name, pixels),
        draw_batch=lambda samples: Batch(
            positional=(torch.randn(samples, 3, pixels, pixels),),
            keyword={},
            targets=torch.randint(0, _NUM_CLASSES, (samples,)),
        ),
        loss=lambda outputs, targets: _loss(outputs, targets, share),
    )


def _build(name: str, pixels: int) -> nn.Module:
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = pixels
    if name.startswith("maxvit"):
        options["input_size"] = (pixels, pixels)
    if name in _AUXILIARY_SHARE:
        options["init_weights"] = False  # its normal distribution comes from scipy, value by value
        options["aux_logits"] = True
    with _counted_blocks() if name.startswith("regnet_") else nullcontext():
        model: nn.Module = models.get_model(name, weights=None, **options)
    return model


@contextmanager
def _counted_blocks() -> Iterator[None]:
    """RegNets count their blocks with tensors, which must have a content while they do."""
    original = vars(regnet.BlockParams)["from_init_params"]

    def counted(kind: type, *sizes: Any, **others: Any) -> Any:
        with unset_fake_temporarily(), torch.device("cpu"):
            return original.__func__(kind, *sizes, **others)

    regnet.BlockParams.from_init_params = classmethod(counted)
    try:
        yield
    finally:
        regnet.BlockParams.from_init_params = original


def _loss(outputs: Any, targets: Tensor | None, share: float) -> Tensor:
    """Cross-entropy, with the auxiliary classifiers that some models have while they train."""
    assert targets is not None
    main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = nn.functional.cross_entropy(main, targets)
    for scores in auxiliary:
        loss = loss + share * nn.functional.cross_entropy(scores, targets)
    return loss


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
        loss=lambda outputs, targets: _loss_factory(made[-1], outputs, targets, text=text),
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


def _loss_factory(made: _Made, outputs: Any, targets: Tensor | None, *, text: str) -> Tensor:
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


_MOMENTUM = 0.9
_RATE = 1e-3


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, name: str, implementation: str
) -> torch.optim.Optimizer:
    """An optimizer with its implementation said outright, because the default depends on the device."""
    foreach, fused = implementation == "foreach", implementation == "fused"
    if name == "sgd":
        return torch.optim.SGD(
            parameters, lr=_RATE, momentum=_MOMENTUM, foreach=foreach, fused=fused
        )
    return torch.optim.AdamW(parameters, lr=_RATE, foreach=foreach, fused=fused)
