"""Models described by a Hugging Face ``config.json``, built by ourselves: no network, no weights."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from perfmodel.errors import UsageError
from perfmodel.tracing.huggingface_config import DECODERS, Config, TransformerShape, read_shape
from perfmodel.tracing.source import Batch, ModelSource, SampleSize, classification_loss
from perfmodel.tracing.transformers import (
    ACTIVATIONS,
    ENCODERS,
    Bert,
    CausalLanguageModel,
    VisionTransformer,
    num_labels,
)

_LONGEST_DEFAULT: Final = 2048
#: Standard deviation with which embedding tables begin (``initializer_range``). With torch's 1 a tied
#: head is so sure of itself that every gradient is exactly 0, which no training has.
_TABLE_SPREAD: Final = 0.02


def huggingface_source(path: Path, size: SampleSize) -> ModelSource:
    """The model that a configuration describes, with the loss that it is usually trained with."""
    config = Config.read(path)
    shape = read_shape(config, families=(*DECODERS, *ENCODERS))
    if shape.activation not in ACTIVATIONS:
        raise config.wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}", shape.activation)
    name = str(config.get("_name_or_path", "") or path.parent.name or path.stem)
    if shape.family == "vit":
        size.refuse_except("image_size", text=str(path))
        return _image_source(name, shape, size.image_size or config.count("image_size", 224))
    size.refuse_except("sequence_length", text=str(path))
    num_tokens = size.sequence_length or min(shape.num_positions, _LONGEST_DEFAULT)
    if num_tokens > shape.num_positions:
        raise UsageError(
            f"--sequence-length: must be <= {shape.num_positions} for {path}, got {num_tokens}"
        )
    assignments = num_tokens * shape.experts_per_token
    if shape.num_experts and assignments % shape.num_experts:
        raise UsageError(
            f"--sequence-length: times {shape.experts_per_token} experts per token must be divisible by "
            f"{shape.num_experts} experts, got {num_tokens}"
        )
    return _text_source(name, shape, num_tokens)


def _text_source(name: str, shape: TransformerShape, num_tokens: int) -> ModelSource:
    bert = shape.family == "bert"

    def build() -> nn.Module:
        model = Bert(shape) if bert else CausalLanguageModel(shape)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_TABLE_SPREAD)
        return model

    caveats = []
    if bert and not shape.architecture.removeprefix("Bert").startswith("For"):
        caveats.append("no head is named: the pooled output is trained as if it were scores")
    if shape.num_experts:
        caveats.append(
            f"each of {shape.num_experts} experts gets the same number of tokens; real routers are uneven"
        )
    if shape.window is not None and shape.window < num_tokens:
        caveats.append(
            f"attention looks back {shape.window} tokens but is counted over all {num_tokens}"
        )
    return ModelSource(
        name=name,
        sample=f"{num_tokens} tokens",
        build=build,
        draw_batch=lambda samples: Batch(
            positional=(torch.randint(0, shape.vocabulary, (samples, num_tokens)),),
            keyword={},
            targets=torch.randint(0, shape.vocabulary, (samples, num_tokens)),
        ),
        loss=_bert_loss if bert else _next_token_loss,
        caveats=tuple(caveats),
    )


def _image_source(name: str, shape: TransformerShape, pixels: int) -> ModelSource:
    channels = shape.raw.count("num_channels", 3)
    patch = shape.raw.count("patch_size", 16)
    if pixels % patch:
        raise UsageError(f"--image-size: must be divisible by the patches of {patch}, got {pixels}")
    labels = num_labels(shape, default=1000)
    return ModelSource(
        name=name,
        sample=f"{channels}x{pixels}x{pixels} image",
        build=lambda: VisionTransformer(shape, image_size=pixels),
        draw_batch=lambda samples: Batch(
            positional=(torch.randn(samples, channels, pixels, pixels),),
            keyword={},
            targets=torch.randint(0, labels, (samples,)),
        ),
        loss=classification_loss,
    )


def _next_token_loss(scores: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy over all tokens in single precision."""
    assert targets is not None
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def _bert_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy over all tokens, and over the scores of each sample, as far as there are heads."""
    assert targets is not None
    words, pooled = outputs
    losses = []
    if words is not None:
        losses.append(_next_token_loss(words, targets))
    if pooled is not None:
        losses.append(nn.functional.cross_entropy(pooled.float(), targets[:, 0]))
    return sum(losses[1:], start=losses[0])
