"""Models by what a user types: a name, ``file.py:factory``, or a Hugging Face ``config.json``."""

import contextlib
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from perfmodel.errors import UntraceableModel, UsageError, did_you_mean
from perfmodel.tracing.reference import MODELS
from perfmodel.tracing.source import (
    OWN_SIZE,
    Batch,
    ModelSource,
    SampleSize,
    classification_loss,
    images,
    labelled,
)


def find_source(
    text: str, size: SampleSize = OWN_SIZE, *, option: str = "MODEL", others: Sequence[str] = ()
) -> ModelSource:
    """The model that a user names.

    A reference model hides a model of torchvision of the same name; ``torchvision:NAME`` reaches that.
    ``option`` is where the user named it, ``others`` are names that it knows besides.
    """
    if text.endswith(".json"):
        from perfmodel.tracing.transformers import huggingface_source  # noqa: PLC0415 - on demand

        return huggingface_source(Path(text), size)
    if ".py:" in text or text.endswith(".py"):
        size.refuse_except(text=text)
        return _factory_source(text)
    if text in MODELS:
        size.refuse_except(text=text)
        return MODELS[text]
    if text.startswith("timm:"):
        size.refuse_except("image_size", text=text)
        return _timm_source(text.removeprefix("timm:"), size.image_size, option=option)
    name, _, heads = text.removeprefix("torchvision:").partition(":")
    if name not in _classification_names() or heads not in {"", _NO_HEADS}:
        known = {*others, *MODELS, *_classification_names()}
        raise UsageError(
            f"{option}: must be a reference model, a classification model of torchvision, timm:NAME, "
            f"FILE.py:FACTORY or a Hugging Face config.json, got {text!r}{did_you_mean(name, known)}"
        )
    size.refuse_except("image_size", text=text)
    return _torchvision_source(name, size.image_size, auxiliary=heads != _NO_HEADS)


_NUM_CLASSES: Final = 1000
#: Pixels along each side that a model is made for, where it is not 224.
_OWN_SIZE: Final = {"inception_v3": 299}
#: Share of the loss of each auxiliary classifier (Szegedy et al. 2014 and 2015, and their reference code).
_AUXILIARY_SHARE: Final = {"googlenet": 0.3, "inception_v3": 0.4}
_NO_HEADS: Final = "no-aux"
_VIT_LAYERS: Final = {"vit_b": 12, "vit_l": 24, "vit_h": 32}


@functools.cache
def _classification_names() -> tuple[str, ...]:
    from torchvision import models  # noqa: PLC0415 - takes seconds, which files of users need not wait for

    return tuple(models.list_models(module=models))


def _torchvision_source(name: str, image_size: int | None, *, auxiliary: bool) -> ModelSource:
    """A classification model for images of a size; ``None`` for the size that it is made for."""
    from torchvision import models  # noqa: PLC0415 - known by name, it is imported already

    pixels = image_size or _OWN_SIZE.get(name, 224)
    share = _AUXILIARY_SHARE.get(name, 0.0)
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = pixels
    if name.startswith("maxvit"):
        options["input_size"] = (pixels, pixels)
    if share:
        # Its normal distribution comes from scipy, value by value.
        options |= {"init_weights": False, "aux_logits": auxiliary}

    def build() -> nn.Module:
        model: nn.Module = models.get_model(name, weights=None, **options)
        return model

    def loss(outputs: Any, targets: Tensor | None) -> Tensor:
        main, *heads = outputs if isinstance(outputs, tuple) else (outputs,)
        total = classification_loss(main, targets)
        for scores in heads:
            if scores is not None:
                total = total + share * classification_loss(scores, targets)
        return total

    def with_layers(num_layers: int) -> ModelSource:
        def shallow() -> nn.Module:
            model = build()
            encoder: Any = model.encoder
            encoder.layers = encoder.layers[:num_layers]
            return model

        return replace(source, build=shallow)

    heads = f"auxiliary classifiers are trained too; torchvision:{name}:{_NO_HEADS} has none"
    source = ModelSource(
        name=f"torchvision:{name}" + ("" if auxiliary else f":{_NO_HEADS}"),
        sample=f"3x{pixels}x{pixels} image",
        build=build,
        draw_batch=labelled(images(3, pixels, pixels), _NUM_CLASSES),
        loss=loss,
        caveats=(heads,) if share and auxiliary else (),
    )
    layers = _VIT_LAYERS.get(name[:5], 0)
    return replace(source, depth=layers, with_depth=with_layers) if layers else source


def _timm_source(name: str, image_size: int | None, *, option: str) -> ModelSource:
    """A classification model of timm, without its weights; ``None`` for the size that it is made for."""
    try:
        import timm  # noqa: PLC0415 - not a dependency
    except ImportError:
        raise UsageError(f"{option}: timm:{name} needs timm, got none; pip install timm") from None
    if not timm.is_model(name):
        meant = did_you_mean(name, timm.list_models())
        raise UsageError(f"{option}: must be a model of timm, got {name!r}{meant}")
    # Names of before are those of today's models; figures were published under them.
    name = timm.models.get_deprecated_models().get(name) or name
    try:
        made_for = timm.get_pretrained_cfg(name)
    except RuntimeError:  # weights by a name of before that timm has no more
        made_for = None
    if made_for is None:
        raise UsageError(
            f"{option}: timm:{name} must have a default configuration, timm knows none"
        )
    if made_for.num_classes < 1:
        raise UsageError(
            f"{option}: timm:{name} must tell classes apart, got a model of features; write a FILE.py:FACTORY "
            "with its head and loss"
        )
    channels, height, width = made_for.input_size
    is_told = image_size is not None and made_for.fixed_input_size
    options = {"img_size": image_size} if is_told else {}
    shape = (channels, image_size or height, image_size or width)
    return ModelSource(
        name=f"timm:{name}",
        sample=f"{'x'.join(map(str, shape))} image",
        build=lambda: timm.create_model(name, pretrained=False, **options),
        draw_batch=labelled(images(*shape), made_for.num_classes),
        loss=classification_loss,
    )


_IMAGE: Final = 1, 3, 224, 224


def _factory_source(text: str) -> ModelSource:
    """A model source of ``FILE.py:FACTORY``.

    The file is imported now. The factory is called once, on tensors without content, when the model
    is built.
    """
    file, _, name = text.rpartition(":")
    if not file or not name:
        raise UsageError(
            f"{text}: must be FILE.py:FACTORY, such as {file or name or 'train.py'}:build, the name of a function "
            "in it that returns the model"
        )
    factory = _imported(Path(file), name, text=text)
    made: tuple[Any, Callable[..., Tensor] | None] = torch.empty(0), None
    has_example = has_targets = False

    def build() -> nn.Module:
        nonlocal made, has_example, has_targets
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise UntraceableModel(
                f"{text}: must be a function without arguments, got one that is {error}; give it a default"
            ) from None
        returned = factory()
        parts = returned if isinstance(returned, tuple) else (returned,)
        module, example, loss = (*parts, None, None)[:3]
        if len(parts) > 3 or not isinstance(module, nn.Module):
            raise UntraceableModel(
                f"{text}: must return a module, (module, example) or (module, example, loss), got "
                f"{type(module).__name__}"
            )
        if loss is not None and not callable(loss):
            raise UntraceableModel(f"{text}: loss must be callable, got {type(loss).__name__}")
        made = torch.empty(_IMAGE) if example is None else example, loss
        has_example = example is not None
        has_targets = isinstance(example, tuple | list) and _ends_in_targets(module, example)
        return module

    def draw_batch(samples: int) -> Batch:
        example = made[0]
        named = example if isinstance(example, dict) else {}
        items = example if isinstance(example, tuple | list) else (example,)
        items = () if isinstance(example, dict) else items
        given = tuple(resized(value, samples, text=text) for value in items)
        return Batch(
            positional=given[:-1] if has_targets else given,
            keyword={key: resized(value, samples, text=text) for key, value in named.items()},
            targets=given[-1] if has_targets else torch.zeros(samples, dtype=torch.int64),
        )

    def loss_of(outputs: Any, targets: Tensor | None) -> Tensor:
        loss = made[1]
        if loss is not None and has_targets:
            return scalar_loss(lambda found: loss(found, targets), outputs, targets, text=text)
        return scalar_loss(loss, outputs, targets, text=text)

    return ModelSource(
        name=f"{Path(file).stem}:{name}",
        build=build,
        draw_batch=draw_batch,
        loss=loss_of,
        own_samples=lambda: samples_of(made[0]) if has_example else None,
    )


def _ends_in_targets(module: nn.Module, example: Sequence[Any]) -> bool:
    """Whether an example is what a loader gives: the arguments of the module, then the targets of the loss."""
    arguments = inspect.signature(module.forward)
    try:
        arguments.bind(*example)
    except TypeError:
        with contextlib.suppress(TypeError):
            arguments.bind(*example[:-1])
            return True
    return False


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
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


def samples_of(example: Any) -> int | None:
    """Samples of the first tensor of an example; None without one."""
    values = example.values() if isinstance(example, dict) else example
    items = (example,) if isinstance(example, Tensor) else values
    tensors = (each for each in items if isinstance(each, Tensor) and each.dim())
    return next((len(each) for each in tensors), None)


def resized(value: Any, samples: int, *, text: str) -> Any:
    """An example with so many samples; what is no tensor stays as it is."""
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


def scalar_loss(
    loss: Callable[[Any], Tensor] | None, outputs: Any, targets: Tensor | None, *, text: str
) -> Tensor:
    """The loss that a user gave, or what stands for it: the model's own, or cross-entropy of scores."""
    own = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    found = own if loss is None else loss(outputs)
    if loss is not None or isinstance(own, Tensor):
        if isinstance(found, Tensor) and found.numel() == 1:
            return found
        raise UntraceableModel(f"{text}: loss must be a tensor of one element, got {found!r:.80}")
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        return outputs
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and targets is not None:
        return nn.functional.cross_entropy(outputs, targets)
    shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise UntraceableModel(
        f"{text}: without a loss the model must return a scalar, .loss or scores (samples, classes), "
        f"got {shown}; give a loss, from a factory as (module, example, loss)"
    )
