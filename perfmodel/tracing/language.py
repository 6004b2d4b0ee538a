"""Small language models of the three common kinds, for checks: GPT-2-like, BERT-like, Llama-like."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfmodel.tracing.source import Batch, ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageShape:
    """Sizes of a transformer over tokens."""

    width: int
    num_layers: int
    num_heads: int
    vocabulary: int
    num_tokens: int
    causal: bool
    gated: bool
    """Root-mean-square norms, rotary positions and a gated feed-forward network, as in Llama."""


class RotaryAttention(nn.Module):
    """Attention with one fused projection; positions are rotated where the shape says so."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.shape = shape
        self.project = nn.Linear(shape.width, 3 * shape.width, bias=not shape.gated)
        self.merge = nn.Linear(shape.width, shape.width, bias=not shape.gated)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mixed tokens of shape ``(N, tokens, width)``."""
        samples, tokens, width = hidden.shape
        heads = self.shape.num_heads
        query, key, value = (
            part.view(samples, tokens, heads, width // heads).transpose(1, 2)
            for part in self.project(hidden).split(width, dim=-1)
        )
        if self.shape.gated:
            query, key = rotated(query), rotated(key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.shape.causal
        )
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return merged


def rotated(heads: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of shape ``(N, heads, tokens, features)``."""
    tokens, features = heads.shape[-2:]
    rates = torch.exp(torch.arange(0, features, 2) * (-math.log(1e4) / features))
    angles = torch.arange(tokens)[:, None] * rates[None, :]
    cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    one, other = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-other, one), dim=-1) * sine


class FeedForward(nn.Module):
    """Two layers with GELU, or three with a gate."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        inner = 4 * shape.width if not shape.gated else 8 * shape.width // 3
        self.gate = nn.Linear(shape.width, inner, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.width, inner, bias=not shape.gated)
        self.down = nn.Linear(inner, shape.width, bias=not shape.gated)

    def forward(self, hidden: Tensor) -> Tensor:
        """Features of the same shape."""
        inner = self.up(hidden)
        if self.gate is None:
            inner = functional.gelu(inner)
        else:
            inner = functional.silu(self.gate(hidden)) * inner
        down: Tensor = self.down(inner)
        return down


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.before_attention = norm(shape.width)
        self.attention = RotaryAttention(shape)
        self.before_feed_forward = norm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens of the same shape."""
        hidden = hidden + self.attention(self.before_attention(hidden))
        mixed: Tensor = hidden + self.feed_forward(self.before_feed_forward(hidden))
        return mixed


class LanguageModel(nn.Module):
    """Embedding, layers, and scores over the vocabulary (tied to the embedding unless gated)."""

    def __init__(self, shape: LanguageShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.num_tokens, shape.width) if not shape.gated else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width) if shape.gated else nn.LayerNorm(shape.width)
        self.score = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.gated:
            self.score.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape ``(N, tokens, vocabulary)``."""
        hidden = self.embed(tokens)
        if self.position is not None:
            hidden = hidden + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.score(self.norm(hidden))
        return scores


SHAPES = {
    "gpt2-like": LanguageShape(
        width=512,
        num_layers=6,
        num_heads=8,
        vocabulary=16384,
        num_tokens=128,
        causal=True,
        gated=False,
    ),
    "bert-like": LanguageShape(
        width=384,
        num_layers=8,
        num_heads=6,
        vocabulary=8192,
        num_tokens=128,
        causal=False,
        gated=False,
    ),
    "llama-like": LanguageShape(
        width=512,
        num_layers=6,
        num_heads=8,
        vocabulary=8192,
        num_tokens=256,
        causal=True,
        gated=True,
    ),
}


def language_source(name: str) -> ModelSource:
    """A language model by name, trained on the next (or masked) token."""
    shape = SHAPES[name]

    def draw(samples: int) -> Batch:
        tokens = torch.randint(0, shape.vocabulary, (samples, shape.num_tokens))
        targets = torch.randint(0, shape.vocabulary, (samples, shape.num_tokens))
        return Batch(positional=(tokens,), keyword={}, targets=targets)

    return ModelSource(
        name=name,
        sample=f"{shape.num_tokens} tokens",
        build=lambda: LanguageModel(shape),
        draw_batch=draw,
        loss=_token_loss,
    )


def _token_loss(outputs: Any, targets: Tensor | None) -> Tensor:
    assert targets is not None
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
