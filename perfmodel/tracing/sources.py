"""Models by what a user types: a name, ``file.py:factory``, or a Hugging Face ``config.json``."""

import contextlib
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from perfmodel.errors import UntraceableModel, UsageError, described, did_you_mean
from perfmodel.tracing import users_code
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
    with users_code():
        factory = _imported(Path(file), name, text=text)
    made: tuple[Any, Tensor | None, Callable[..., Tensor] | None] = (), None, None
    origin = ""
    unplaced: nn.Module | None = None
    placed: dict[str, Tensor] = {}

    def build() -> nn.Module:
        nonlocal made, origin, unplaced
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise UntraceableModel(
                f"{text}: must be a function without arguments, got one that is {error}; give it a default"
            ) from None
        with users_code():
            module, example, loss = _parts(factory(), text=text)
        if example is None:
            example, origin = torch.empty(_IMAGE), f"assumed: {name} returns no batch"
        if isinstance(example, tuple | list) and _ends_in_targets(module, example):
            made = tuple(example[:-1]), example[-1], loss
        else:
            made = example, None, loss
        unplaced = loss if isinstance(loss, nn.Module) else None
        return module

    def draw_batch(samples: int) -> Batch:
        nonlocal placed
        inputs, targets, loss = made
        # Before anything is recorded, and beside the file's own: these may have no content.
        placed = _placed(loss, torch.get_default_device())
        batch = resized_batch(inputs, targets, samples, text=text)
        # Of one class alone, the loss of a training would end at 0, by numbers too small for a processor's speed.
        implied = torch.randint(2, (samples,)) if targets is None else batch.targets
        return replace(batch, targets=implied, origin=origin)

    def loss_of(outputs: Any, drawn: Tensor | None) -> Tensor:
        nonlocal unplaced
        _, targets, loss = made
        if isinstance(loss, nn.Module) and placed:
            loss = functools.partial(_called_with, loss, placed)
        elif unplaced is not None:
            # The model and a batch that was drawn on the processor have moved to the GPU that trains.
            leaves = tree_leaves((outputs, drawn))
            unplaced.to(next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None))
            unplaced = None
        return scalar_loss(loss, outputs, drawn, is_judged=targets is not None, text=text)

    return ModelSource(
        name=f"{Path(file).stem}:{name}",
        build=build,
        draw_batch=draw_batch,
        loss=loss_of,
        own_samples=lambda: batch_rows(made[0], text=text) if not origin else None,
    )


def _placed(loss: Any, device: torch.device) -> dict[str, Tensor]:
    """By name, on a device, those tensors of a loss that are elsewhere, such as weights of classes."""
    if not isinstance(loss, nn.Module):
        return {}
    return {
        name: tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        for name, tensor in (*loss.named_parameters(), *loss.named_buffers())
        if tensor.device != device
    }


def _called_with(loss: nn.Module, tensors: dict[str, Tensor], *given: Any) -> Any:
    return functional_call(loss, tensors, given)


def _parts(returned: Any, *, text: str) -> tuple[nn.Module, Any, Callable[..., Tensor] | None]:
    """Module, example and loss of what a factory returned; None for what it leaves out."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    module, example, loss = (*parts, None, None, None)[:3]
    if len(parts) > 3 or not isinstance(module, nn.Module):
        raise UntraceableModel(
            f"{text}: must return a module, (module, example) or (module, example, loss), got "
            f"{type(module).__name__}"
        )
    if loss is not None and not callable(loss):
        raise UntraceableModel(f"{text}: loss must be callable, got {type(loss).__name__}")
    return module, example, loss


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
    folder = str(file.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UntraceableModel(
            f"{file}: importing raised {described(error)}; mend the file"
        ) from error
    finally:
        # It may have put others before this one, or left none.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = sorted(key for key, value in vars(module).items() if callable(value))
        raise UsageError(f"{text}: {file} must define {name}, it defines {', '.join(known)}")
    return factory  # type: ignore[no-any-return]


def batch_rows(inputs: Any, *, text: str = "inputs") -> int:
    """Samples of a batch.

    Raises ``UsageError`` if nothing in it is a tensor of samples.
    """
    for leaf in tree_leaves(_plain(inputs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise UsageError(
        f"{text}: must hold a tensor whose first dimension is the batch, got {inputs!r:.80}"
    )


def resized_batch(inputs: Any, targets: Any, samples: int, *, text: str = "inputs") -> Batch:
    """A batch of ``samples`` samples, made from one that a loop passes: a tensor, a tuple of arguments or keywords.

    Tensors with as many rows as the first one hold samples, however deep they lie; others, such as masks,
    stay as they are.
    """
    rows = batch_rows(inputs, text=text)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided:
            raise UntraceableModel(f"{text}: batches must be dense tensors, got {leaf.layout}")
        found = _resized(leaf, samples) if leaf.dim() and len(leaf) == rows else leaf
        return found.to(torch.get_default_device())

    batch = tree_map(one, _plain(inputs))
    keyword = batch if isinstance(batch, dict) else {}
    items = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return Batch(
        positional=() if keyword else items, keyword=keyword, targets=tree_map(one, targets)
    )


def _plain(inputs: Any) -> Any:
    """A batch as torch's trees know it: what tokenizers return is a mapping, but no ``dict``."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _resized(value: Tensor, samples: int) -> Tensor:
    # The example over and over: real runs need its values, such as tokens of the vocabulary.
    repeats = math.ceil(samples / max(1, len(value)))
    tiled = value.detach().repeat(repeats, *(1 for _ in value.shape[1:]))[:samples].contiguous()
    return tiled.requires_grad_(value.requires_grad)


def scalar_loss(
    loss: Callable[..., Tensor] | None,
    outputs: Any,
    targets: Tensor | None,
    *,
    is_judged: bool,
    text: str,
) -> Tensor:
    """The loss that a user gave, or what stands for it: the model's own, or cross-entropy of scores.

    ``is_judged``: Whether the user's loss takes the targets, too.
    """
    own = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    found = own if loss is None else loss(outputs, *([targets] if is_judged else []))
    if loss is not None or isinstance(own, Tensor):
        if isinstance(found, Tensor) and found.numel() == 1:
            return found
        raise UntraceableModel(
            f"{text}: loss must be a tensor of one element, got {_described(found)}"
        )
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        return outputs
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and targets is not None:
        drawn = targets if outputs.shape[1] > 1 else torch.zeros_like(targets)
        return nn.functional.cross_entropy(outputs, drawn)
    raise UntraceableModel(
        f"{text}: without a loss the model must return a scalar, .loss or scores (samples, classes), "
        f"got {_described(outputs)}; give a loss, from a factory as (module, example, loss)"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
