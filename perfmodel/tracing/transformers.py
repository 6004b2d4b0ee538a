"""Transformers as a Hugging Face ``config.json`` describes them, built by ourselves: no network, no weights.

One layer serves all families, with three models around it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfmodel.errors import UsageError
from perfmodel.tracing.huggingface_config import DECODERS, TransformerShape, read_shape, wrong
from perfmodel.tracing.source import (
    ModelSource,
    SampleSize,
    classification_loss,
    images,
    labelled,
    texts,
    token_loss,
)

ENCODERS: Final = ("bert", "vit")


def _gelu_by_hand(inputs: Tensor) -> Tensor:
    """GELU's tanh approximation out of elementary operators, as GPT-2 computes it."""
    inner = (2 / torch.pi) ** 0.5 * (inputs + 0.044715 * torch.pow(inputs, 3.0))
    return 0.5 * inputs * (1.0 + torch.tanh(inner))


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "swish": functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": _gelu_by_hand,
    "gelu_fast": _gelu_by_hand,
}


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in single precision, out of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Same shape as the input."""
        wide = inputs.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        scaled: Tensor = self.weight * (wide * scale).to(inputs.dtype)
        return scaled


class TransposedLinear(nn.Module):
    """A linear layer whose weight is stored ``(in, out)``, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(..., out)`` of ``(..., in)``."""
        flat = torch.addmm(self.bias, inputs.reshape(-1, inputs.shape[-1]), self.weight)
        return flat.view(*inputs.shape[:-1], -1)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions, computed once per step for all layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inverse_frequency: Tensor
        frequency = 10_000.0 ** -(torch.arange(0, width - 1, 2) / width)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors ``(1, 1, tokens, width)`` of hidden states ``(samples, tokens, ...)``."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        angles = positions[:, None].float() * self.inverse_frequency[None]
        both = torch.cat((angles, angles), dim=-1)[None, None]
        return both.cos().to(hidden.dtype), both.sin().to(hidden.dtype)


def _rotated(inputs: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
    """Heads rotated by their position."""
    if turn is None:
        return inputs
    cosines, sines = turn
    first, second = inputs.chunk(2, dim=-1)
    return inputs * cosines + torch.cat((-second, first), dim=-1) * sines


def _spread(tensor: Tensor, groups: int) -> Tensor:
    """Heads of keys or values ``(samples, heads, tokens, width)``, each as often as queries share it."""
    if groups == 1:
        return tensor
    samples, heads, tokens, width = tensor.shape
    spread = tensor[:, :, None].expand(samples, heads, groups, tokens, width)
    return spread.reshape(samples, heads * groups, tokens, width)


class Attention(nn.Module):
    """Attention over groups of heads, with one product or three for query, key and value."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width, family = shape.width, shape.family
        queries = shape.num_heads * shape.head_width
        keys = shape.num_key_value_heads * shape.head_width
        self.fused = family == "gpt2"
        out: nn.Module
        if self.fused:
            self.query_key_value = TransposedLinear(width, 3 * width)
            out = TransposedLinear(queries, width)
        else:
            out_bias = not shape.is_llama
            bias = family != "vit" or shape.qkv_bias
            if shape.is_llama:
                bias, out_bias = shape.attention_bias, shape.attention_bias and family != "qwen2"
            self.q_proj = nn.Linear(width, queries, bias=bias)
            self.k_proj = nn.Linear(width, keys, bias=bias)
            self.v_proj = nn.Linear(width, keys, bias=bias)
            out = nn.Linear(queries, width, bias=out_bias)
        self.out_name = "dense" if self.fused else "o_proj" if shape.is_llama else "out_proj"
        self.add_module(self.out_name, out)
        normalised = family == "qwen3"
        self.q_norm = RMSNorm(shape.head_width) if normalised else nn.Identity()
        self.k_norm = RMSNorm(shape.head_width) if normalised else nn.Identity()
        self.groups = shape.num_heads // shape.num_key_value_heads
        self.head_width = shape.head_width
        self.dropout = shape.attention_dropout
        self.causal = family not in ENCODERS

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """``(samples, tokens, width)`` of the same; ``turn`` rotates queries and keys."""
        if self.fused:
            parts = self.query_key_value(hidden).chunk(3, dim=-1)
            query, key, value = (self._heads(part) for part in parts)
        else:
            query = self._heads(self.q_proj(hidden), self.q_norm)
            key = self._heads(self.k_proj(hidden), self.k_norm)
            value = self._heads(self.v_proj(hidden))
        query, key = _rotated(query, turn), _rotated(key, turn)
        mixed = functional.scaled_dot_product_attention(
            query,
            _spread(key, self.groups),
            _spread(value, self.groups),
            dropout_p=self.dropout,
            is_causal=self.causal,
        )
        outputs: Tensor = self.get_submodule(self.out_name)(mixed.transpose(1, 2).flatten(2))
        return outputs

    def _heads(self, inputs: Tensor, norm: nn.Module | None = None) -> Tensor:
        """``(samples, heads, tokens, head_width)`` of ``(samples, tokens, heads * head_width)``."""
        heads: Tensor = inputs.unflatten(-1, (-1, self.head_width))
        return (heads if norm is None else norm(heads)).transpose(1, 2)


class MLP(nn.Module):
    """Up, activation, down; the Llama family activates a gate beside the up-projection."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner_width
        self.gated = shape.is_llama
        if self.gated:
            self.gate_proj = nn.Linear(width, inner, bias=shape.mlp_bias)
            self.up_proj = nn.Linear(width, inner, bias=shape.mlp_bias)
            self.down_proj = nn.Linear(inner, width, bias=shape.mlp_bias)
        else:
            make = TransposedLinear if shape.family == "gpt2" else nn.Linear
            self.up, self.down = make(width, inner), make(inner, width)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as the input."""
        outputs: Tensor
        if self.gated:
            outputs = self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))
        else:
            outputs = self.down(self.activation(self.up(hidden)))
        return outputs


class EvenExperts(nn.Module):
    """Experts that each get the same number of tokens: where the router sends them only data can say."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(shape) for _ in range(shape.num_experts))
        self.per_token = shape.experts_per_token

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as the input; tokens are sorted by expert, computed, and added back."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores = functional.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.per_token, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(hidden.dtype)
        order = chosen.reshape(-1).argsort()
        source = order // self.per_token
        share = order.shape[0] // len(self.experts)
        result = torch.zeros_like(tokens)
        for expert, places, slots in zip(
            self.experts, source.split(share), order.split(share), strict=True
        ):
            outputs = expert(tokens[places]) * weights.reshape(-1, 1)[slots]
            result = result.index_add(0, places, outputs.to(result.dtype))
        return result.view(hidden.shape)


class Layer(nn.Module):
    """Attention and a feed-forward part, each with a normalisation and beside a residual."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        names = ("attention_norm", "attention", "mlp_norm", "mlp")
        if shape.is_llama:
            names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        experts = shape.is_llama and shape.num_experts
        mlp = EvenExperts(shape) if experts else MLP(shape)
        self.parts = _norm(shape), Attention(shape), _norm(shape), mlp
        # The order in which optimizers see the parameters.
        for at in (1, 0, 3, 2) if shape.family in ENCODERS else range(4):
            self.add_module(names[at], self.parts[at])
        self.dropout = _dropout(shape)
        self.norm_first = shape.family != "bert"

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        attention_norm, attention, mlp_norm, mlp = self.parts
        outputs: Tensor
        if self.norm_first:
            mixed = hidden + self.dropout(attention(attention_norm(hidden), turn))
            outputs = mixed + self.dropout(mlp(mlp_norm(mixed)))
        else:
            hidden = attention_norm(hidden + self.dropout(attention(hidden, turn)))
            outputs = mlp_norm(hidden + self.dropout(mlp(hidden)))
        return outputs


def _norm(shape: TransformerShape) -> nn.Module:
    return RMSNorm(shape.width) if shape.is_llama else nn.LayerNorm(shape.width)


def _dropout(shape: TransformerShape) -> nn.Module:
    return nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()


def _layers(shape: TransformerShape) -> nn.ModuleList:
    return nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))


class CausalLanguageModel(nn.Module):
    """Embeddings, layers, a last normalisation and scores for the next token."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.embed_tokens = nn.Embedding(shape.vocabulary, width)
        self.positions = None if shape.is_llama else nn.Embedding(shape.num_positions, width)
        self.dropout = _dropout(shape)
        self.rotary = Rotary(shape.head_width) if shape.is_llama else None
        self.layers = _layers(shape)
        self.norm = _norm(shape)
        self.lm_head = nn.Linear(width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(samples, tokens, vocabulary)`` of token ids ``(samples, tokens)``."""
        hidden = self.embed_tokens(tokens)
        if self.positions is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            hidden = hidden + self.positions(places[None])
        hidden = self.dropout(hidden)
        turn = None if self.rotary is None else self.rotary(hidden)
        for layer in self.layers:
            hidden = layer(hidden, turn)
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores


class Bert(nn.Module):
    """BERT; without a head the pooled first token is classified by nothing more than its mean."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width, kind = shape.width, shape.architecture
        self.word_embeddings = nn.Embedding(shape.vocabulary, width)
        self.position_embeddings = nn.Embedding(shape.num_positions, width)
        self.token_type_embeddings = nn.Embedding(shape.token_types, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.dropout = _dropout(shape)
        self.layers = _layers(shape)
        self.pooler = None if kind == "BertForMaskedLM" else nn.Linear(width, width)
        labels = {"BertForPreTraining": 2}.get(kind)
        if kind == "BertForSequenceClassification":
            labels = shape.num_labels
        self.classifier = nn.Identity() if labels is None else nn.Linear(width, labels)
        self.classified = labels is not None
        masked = kind in {"BertForMaskedLM", "BertForPreTraining"}
        self.head = MaskedLanguageHead(shape, self.word_embeddings) if masked else None

    def forward(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Scores per token ``(samples, tokens, vocabulary)`` and per sample ``(samples, labels)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        hidden = self.dropout(self.embedding_norm(hidden + self.position_embeddings(places[None])))
        for layer in self.layers:
            hidden = layer(hidden)
        words = None if self.head is None else self.head(hidden)
        if self.pooler is None:
            return words, None
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        return words, self.classifier(self.dropout(pooled)) if self.classified else pooled


class MaskedLanguageHead(nn.Module):
    """Scores over the vocabulary; the product's weight is that of the embedding."""

    def __init__(self, shape: TransformerShape, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.decoder = nn.Linear(shape.width, shape.vocabulary)
        self.activation = ACTIVATIONS[shape.activation]
        if shape.tied:
            self.decoder.weight = embeddings.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """``(samples, tokens, vocabulary)`` of ``(samples, tokens, width)``."""
        scores: Tensor = self.decoder(self.norm(self.activation(self.dense(hidden))))
        return scores


class VisionTransformer(nn.Module):
    """ViT: patches as tokens, a token that is classified."""

    def __init__(self, shape: TransformerShape, *, image_size: int) -> None:
        super().__init__()
        width, patch = shape.width, shape.patch_size
        self.patches = nn.Conv2d(shape.num_channels, width, kernel_size=patch, stride=patch)
        num_patches = (image_size // patch) ** 2
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, num_patches + 1, width))
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = _dropout(shape)
        self.layers = _layers(shape)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, shape.num_labels)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(samples, labels)`` of images ``(samples, channels, pixels, pixels)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(tokens.shape[0], -1, -1)
        hidden = self.dropout(torch.cat((first, tokens), dim=1) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.classifier(self.norm(hidden)[:, 0])
        return scores


_LONGEST_DEFAULT: Final = 2048
#: Standard deviation with which embedding tables begin (``initializer_range``). With torch's 1 a tied
#: head is so sure of itself that every gradient is exactly 0, which no training has.
_TABLE_SPREAD: Final = 0.02


def huggingface_source(path: Path, size: SampleSize) -> ModelSource:
    """The model that a configuration describes, with the loss that it is usually trained with."""
    shape = read_shape(path, families=(*DECODERS, *ENCODERS))
    if shape.activation not in ACTIVATIONS:
        raise wrong(path, "hidden_act", f"one of {', '.join(ACTIVATIONS)}", shape.activation)
    name = shape.name or path.parent.name or path.stem
    if shape.family == "vit":
        size.refuse_except("image_size", text=str(path))
        pixels = size.image_size or shape.image_size
        return _of_any_depth(lambda shape: _image_source(name, shape, pixels), shape)
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
    return _of_any_depth(lambda shape: _text_source(name, shape, num_tokens), shape)


def _of_any_depth(
    source: Callable[[TransformerShape], ModelSource], shape: TransformerShape
) -> ModelSource:
    return replace(
        source(shape),
        depth=shape.num_layers,
        with_depth=lambda depth: source(shape.model_copy(update={"num_layers": depth})),
    )


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
        draw_batch=texts(shape.vocabulary, num_tokens),
        loss=_bert_loss if bert else _next_token_loss,
        caveats=tuple(caveats),
    )


def _image_source(name: str, shape: TransformerShape, pixels: int) -> ModelSource:
    channels = shape.num_channels
    if pixels % shape.patch_size:
        raise UsageError(
            f"--image-size: must be divisible by the patches of {shape.patch_size}, got {pixels}"
        )
    return ModelSource(
        name=name,
        sample=f"{channels}x{pixels}x{pixels} image",
        build=lambda: VisionTransformer(shape, image_size=pixels),
        draw_batch=labelled(images(channels, pixels, pixels), shape.num_labels),
        loss=classification_loss,
    )


def _next_token_loss(scores: Any, targets: Tensor | None) -> Tensor:
    """Cross-entropy over all tokens in single precision."""
    return token_loss(scores.float(), targets)


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
