"""What random models are made of: blocks of convnets, transformers and recommenders, as people write them."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Draw = random.Random


def width_between(chance: Draw, low: float, high: float, *, step: int = 8) -> int:
    """Multiples of a step, evenly spread on a logarithmic scale."""
    return max(step, step * round(math.exp(chance.uniform(math.log(low), math.log(high))) / step))


ACTIVATIONS: Final = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
}


def image_norm(kind: str, channels: int) -> nn.Module:
    """Of images: batch norm, group norm, layer norm over all channels (one group), or none."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(channels, 8), channels)
    return nn.GroupNorm(1, channels) if kind == "layer" else nn.Identity()


class Residual(nn.Module):
    """A block with a way around it, as wide as it leaves."""

    def __init__(self, body: nn.Module, around: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.around = body, around or nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        """What goes through, and what goes around."""
        return self.body(values) + self.around(values)


class SqueezeExcite(nn.Module):
    """Scales every channel by what its mean tells (Hu et al. 2018)."""

    def __init__(self, channels: int, gate: str) -> None:
        super().__init__()
        inner = max(4, channels // 8)
        self.scores = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Hardsigmoid() if gate == "hard" else nn.Sigmoid(),
        )

    def forward(self, image: Tensor) -> Tensor:
        """The image scaled."""
        return image * self.scores(image)


class UNet(nn.Module):
    """Down and up again, with a skip at every level or without any (an autoencoder)."""

    def __init__(
        self, colours: int, widths: Sequence[int], *, norm: str, act: str, up: str, skips: bool
    ) -> None:
        super().__init__()
        self.skips = skips
        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.pool = nn.MaxPool2d(2)

        def double(channels: int, out: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, padding=1), image_norm(norm, out), ACTIVATIONS[act](),
                nn.Conv2d(out, out, 3, padding=1), image_norm(norm, out), ACTIVATIONS[act](),
            )  # fmt: skip

        channels = colours
        for width in widths:
            self.down.append(double(channels, width))
            channels = width
        for width in reversed(widths[:-1]):
            self.up.append(
                nn.ConvTranspose2d(channels, width, 2, stride=2)
                if up == "transposed"
                else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, width, 1))
            )
            self.merge.append(double(2 * width if skips else width, width))
            channels = width

    def forward(self, image: Tensor) -> Tensor:
        """Features of the size of the image."""
        kept = []
        for at, block in enumerate(self.down):
            image = block(image)
            if at < len(self.down) - 1:
                kept.append(image)
                image = self.pool(image)
        for up, merge in zip(self.up, self.merge, strict=True):
            image = up(image)
            skipped = kept.pop()
            image = merge(torch.cat((skipped, image), 1) if self.skips else image)
        return image


class RMSNorm(nn.Module):
    """As language models write it, not as torch fuses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor) -> Tensor:
        """Values over their root mean square."""
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Queries in groups that share keys and values; to itself or to another sequence."""

    def __init__(
        self, width: int, heads: int, key_heads: int, *, causal: bool, fused: bool
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = heads, key_heads, width // heads
        self.causal, self.fused = causal, fused
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * key_heads * self.head)

    def forward(self, values: Tensor, others: Tensor | None = None) -> Tensor:
        """Values mixed, of the shape that they had."""
        read = values if others is None else others
        batch, length, width = values.shape
        query = self.query(values).view(batch, length, self.heads, self.head).transpose(1, 2)
        both = self.keys(read).view(batch, read.shape[1], 2, self.key_heads, self.head)
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        if self.key_heads < self.heads:
            groups = self.heads // self.key_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = self.causal and others is None
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(self.head)
            if causal:
                future = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """Feed-forward with a gate (Shazeer 2020)."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.up, self.gate = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down, self.act = nn.Linear(inner, width, bias=False), ACTIVATIONS[act]()

    def forward(self, values: Tensor) -> Tensor:
        """Of the width that they had."""
        return self.down(self.act(self.gate(values)) * self.up(values))


class Experts(nn.Module):
    """A few feed-forwards; each takes the same number of tokens (expert choice, Zhou et al. 2022)."""

    def __init__(self, width: int, inner: int, experts: int, act: str) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            feed_forward("plain", width, inner, act) for _ in range(experts)
        )

    def forward(self, values: Tensor) -> Tensor:
        """Every expert's share of the tokens, weighted and added up."""
        tokens = values.reshape(-1, values.shape[-1])
        shares = self.router(tokens).softmax(-1)
        taken = 2 * tokens.shape[0] // len(self.experts)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            weight, rows = shares[:, number].topk(min(taken, tokens.shape[0]))
            result = result.index_add(0, rows, expert(tokens[rows]) * weight[:, None])
        return result.view_as(values)


def feed_forward(kind: str, width: int, inner: int, act: str, experts: int = 4) -> nn.Module:
    """Plain, gated, or one out of a few experts per token."""
    if kind == "gated":
        return Gated(width, inner, act)
    if kind == "experts":
        return Experts(width, inner, experts, act)
    return nn.Sequential(nn.Linear(width, inner), ACTIVATIONS[act](), nn.Linear(inner, width))


class Block(nn.Module):
    """A transformer's block: norms before, a look at another sequence where there is one."""

    def __init__(self, style: "Style", *, causal: bool, crosses: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(style.norm() for _ in range(3 if crosses else 2))
        self.mix = style.attention(causal=causal)
        self.cross = style.attention(causal=False) if crosses else None
        self.feed = feed_forward(style.feed, style.width, style.inner, style.act, style.experts)
        self.drop = nn.Dropout(style.dropout) if style.dropout else nn.Identity()

    def forward(self, values: Tensor, others: Tensor | None = None) -> Tensor:
        """Values after the block."""
        values = values + self.drop(self.mix(self.norms[0](values)))
        if self.cross is not None:
            values = values + self.drop(self.cross(self.norms[1](values), others))
        return values + self.drop(self.feed(self.norms[-1](values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What the blocks of one transformer have in common."""

    width: int
    heads: int
    key_heads: int
    inner: int
    act: str
    feed: str
    experts: int
    rms: bool
    fused: bool
    dropout: float

    @classmethod
    def drawn(cls, chance: Draw, *, feeds: Sequence[str] = ("plain", "plain", "gated")) -> "Style":
        """At random."""
        heads = chance.choice((1, 2, 4, 4, 6, 8))
        width = heads * chance.choice((16, 32, 32, 64))
        return cls(
            width=width,
            heads=heads,
            key_heads=chance.choice([n for n in (1, 2, 4, heads, heads) if heads % n == 0]),
            inner=width * chance.choice((2, 3, 4)),
            act=chance.choice(("gelu", "relu", "silu")),
            feed=chance.choice(feeds),
            experts=chance.choice((2, 4, 8)),
            rms=chance.random() < 0.3,
            fused=chance.random() < 0.7,
            dropout=chance.choice((0.0, 0.0, 0.1)),
        )

    def norm(self) -> nn.Module:
        """Of a vector."""
        return RMSNorm(self.width) if self.rms else nn.LayerNorm(self.width)

    def attention(self, *, causal: bool) -> nn.Module:
        """Of a block."""
        return Attention(self.width, self.heads, self.key_heads, causal=causal, fused=self.fused)


class Tokens(nn.Module):
    """Token and learned position embeddings."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embedded tokens."""
        return self.token(tokens) + self.position


class Translator(nn.Module):
    """Encoder and decoder."""

    def __init__(self, style: Style, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.source, self.target = (Tokens(vocabulary, length, style.width) for _ in range(2))
        self.encoder = nn.ModuleList(Block(style, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(style, causal=True, crosses=True) for _ in range(layers))
        self.scores = nn.Linear(style.width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next tokens of the target."""
        read, written = self.source(source), self.target(target)
        for block in self.encoder:
            read = block(read)
        for block in self.decoder:
            written = block(written, read)
        return self.scores(written)


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, values: Tensor) -> Tensor:
        """One vector per sample."""
        return values.mean(1)


class Patches(nn.Module):
    """An image as a row of embedded patches."""

    def __init__(self, colours: int, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(colours, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros((side // patch) ** 2, width))

    def forward(self, image: Tensor) -> Tensor:
        """Patches by samples and places."""
        return self.embed(image).flatten(2).transpose(1, 2) + self.position


class Mixing(nn.Module):
    """A feed-forward over places instead of channels (Tolstikhin et al. 2021)."""

    def __init__(self, width: int, places: int, inner: int) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), feed_forward("plain", places, inner, "gelu")

    def forward(self, values: Tensor) -> Tensor:
        """Values mixed over places."""
        return self.feed(self.norm(values).transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """Tokens or features through LSTM, GRU or a plain RNN; scores of the last place or of every one."""

    def __init__(self, embed: nn.Module, cell: nn.Module, scores: nn.Module, *, tags: bool) -> None:
        super().__init__()
        self.embed, self.cell, self.scores, self.tags = embed, cell, scores, tags

    def forward(self, values: Tensor) -> Tensor:
        """Scores."""
        hidden, _ = self.cell(self.embed(values))
        return self.scores(hidden if self.tags else hidden[:, -1])


def mlp(widths: Sequence[int], act: str, *, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    """Linear layers; the last one ends it."""
    parts: list[nn.Module] = []
    for at, (width, out) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(width, out))
        if at < len(widths) - 2:
            parts += [nn.BatchNorm1d(out)] if norm else []
            parts += [ACTIVATIONS[act](), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*parts)


class Recommender(nn.Module):
    """Bags of categories, features, and products of all pairs (DLRM, Naumov et al. 2019)."""

    def __init__(
        self, rows: Sequence[int], width: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        self.bottom, self.top = mlp((*bottom, width), "relu"), mlp(top, "relu")

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        """A score per sample."""
        vectors = [self.bottom(features)]
        vectors += [bag(categories[:, at]) for at, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, 1)
        pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)
        return self.top(torch.cat((vectors[0], pairs), 1)).squeeze(1)
