"""Classification models of torchvision, without weights."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torchvision import models
from torchvision.models import regnet

from perfmodel.tracing.source import Batch, ModelSource

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
