"""Models by what a user types: a name, ``file.py:factory``, or a Hugging Face ``config.json``."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import torch

from perfmodel.errors import UsageError
from perfmodel.tracing.reference import MODELS, ReferenceModel
from perfmodel.tracing.source import (
    Batch,
    ModelSource,
    SampleSize,
    classification_loss,
    refuse_sizes,
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
        from perfmodel.tracing.huggingface import huggingface_source  # noqa: PLC0415 - on demand

        return huggingface_source(Path(text), size)
    if ".py:" in text or text.endswith(".py"):
        from perfmodel.tracing.factory import factory_source  # noqa: PLC0415 - on demand

        refuse_sizes(size, text=text)
        return factory_source(text)
    if text in MODELS:
        refuse_sizes(size, text=text)
        return reference_source(text)
    from perfmodel.tracing.torchvision_models import (  # noqa: PLC0415 - slow to import
        classification_names,
        torchvision_source,
    )

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
