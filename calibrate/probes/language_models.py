"""Small language models in the manner of GPT-2, BERT and Llama, as factories for the tracer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LENGTH = 64


class _Attention(nn.Module):
    """Self-attention; grouped keys and rotary positions if asked for."""

    def __init__(
        self, width: int, heads: int, *, key_heads: int, causal: bool, rotary: bool, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.causal, self.rotary = causal, rotary
        self.query = nn.Linear(width, heads * self.size, bias=bias)
        self.key = nn.Linear(width, key_heads * self.size, bias=bias)
        self.value = nn.Linear(width, key_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.register_buffer("angles", torch.zeros(_LENGTH, self.size), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mixed tokens of shape ``(N, T, width)``."""
        samples, length, width = hidden.shape
        query = self.query(hidden).view(samples, length, self.heads, self.size).transpose(1, 2)
        key = self.key(hidden).view(samples, length, self.key_heads, self.size).transpose(1, 2)
        value = self.value(hidden).view(samples, length, self.key_heads, self.size).transpose(1, 2)
        if self.rotary:
            query, key = self._turned(query), self._turned(key)
        repeats = self.heads // self.key_heads
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return result

    def _turned(self, values: Tensor) -> Tensor:
        angles: Any = self.angles
        first, second = values.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        result: Tensor = values * angles.cos() + turned * angles.sin()
        return result


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (hidden * scale)


class _GatedFeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


class _Block(nn.Module):
    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        *,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.first, self.second = norms
        self.norm_first = norm_first

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm_first:
            hidden = hidden + self.attention(self.first(hidden))
            summed: Tensor = hidden + self.feed_forward(self.second(hidden))
            return summed
        hidden = self.first(hidden + self.attention(hidden))
        merged: Tensor = self.second(hidden + self.feed_forward(hidden))
        return merged


class _LanguageModel(nn.Module):
    def __init__(
        self,
        blocks: list[nn.Module],
        norm: nn.Module,
        *,
        width: int,
        vocabulary: int,
        has_positions: bool,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(_LENGTH, width) if has_positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.embed, self.positions):
            if table is not None:
                # As GPT-2, BERT and Llama begin. With torch's 1 a tied head is so sure of itself that
                # every gradient is exactly 0, which no training has and which is slow to take roots of.
                nn.init.normal_(table.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        scores: Tensor = self.head(self.norm(self.blocks(hidden)))
        # The next token of each position; which one does not matter to the cost.
        loss: Tensor = functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        return loss


def _example(vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (2, _LENGTH))


def _mlp(width: int, approximate: str) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(approximate=approximate), nn.Linear(4 * width, width)
    )


def gpt2_like() -> tuple[nn.Module, Tensor]:
    """Six pre-norm blocks of width 384, learned positions, tied head."""
    width, heads, vocabulary = 384, 6, 8000
    blocks: list[nn.Module] = [
        _Block(
            _Attention(width, heads, key_heads=heads, causal=True, rotary=False, bias=True),
            _mlp(width, "tanh"),
            (nn.LayerNorm(width), nn.LayerNorm(width)),
            norm_first=True,
        )
        for _ in range(6)
    ]
    module = _LanguageModel(
        blocks,
        nn.LayerNorm(width),
        width=width,
        vocabulary=vocabulary,
        has_positions=True,
        tied=True,
    )
    return module, _example(vocabulary)


def bert_like() -> tuple[nn.Module, Tensor]:
    """Six post-norm blocks of width 320, attention in both directions."""
    width, heads, vocabulary = 320, 5, 6000
    blocks: list[nn.Module] = [
        _Block(
            _Attention(width, heads, key_heads=heads, causal=False, rotary=False, bias=True),
            _mlp(width, "none"),
            (nn.LayerNorm(width), nn.LayerNorm(width)),
            norm_first=False,
        )
        for _ in range(6)
    ]
    module = _LanguageModel(
        blocks,
        nn.LayerNorm(width),
        width=width,
        vocabulary=vocabulary,
        has_positions=True,
        tied=False,
    )
    return module, _example(vocabulary)


def llama_like() -> tuple[nn.Module, Tensor]:
    """Four blocks of width 512: RMS norms, rotary positions, grouped keys, a gated feed-forward."""
    width, heads, vocabulary = 512, 8, 8000
    blocks: list[nn.Module] = [
        _Block(
            _Attention(width, heads, key_heads=2, causal=True, rotary=True, bias=False),
            _GatedFeedForward(width, 1376),
            (_RmsNorm(width), _RmsNorm(width)),
            norm_first=True,
        )
        for _ in range(4)
    ]
    module = _LanguageModel(
        blocks, _RmsNorm(width), width=width, vocabulary=vocabulary, has_positions=False, tied=False
    )
    return module, _example(vocabulary)
