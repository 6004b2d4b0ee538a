"""A decoder transformer in closed form: parameters, FLOP, bytes, without building it.

The same formulas serve one model and columns of models: every argument is a number or a numpy array.
GPT-like models have two matrices in the feed-forward part, Llama-like ones three (gated).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from perfmodel.errors import check_at_least
from perfmodel.statistics import FloatArray

Number: TypeAlias = float | FloatArray

HALF_BYTES: Final = 2.0
"""Bytes of an activation in bf16 or fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The shape of a decoder transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than ``heads`` with grouped queries."""
    feed_forward: int
    """Width of the inner layer of the feed-forward part."""
    gated: bool
    """Three feed-forward matrices (Llama) instead of two (GPT)."""
    vocabulary: int
    tied: bool
    """Embedding and head are one matrix."""
    fused_attention: bool = True
    """Scores never reach memory (FlashAttention)."""
    experts: int = 1
    """Feed-forward parts per layer, of which each token takes a few; 1: a dense model."""
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary"),
            *("experts", "experts_per_token"),
        ):
            check_at_least(name, getattr(self, name), 1)
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token must be at most experts ({self.experts}), "
                f"got {self.experts_per_token}"
            )
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads ({self.heads}), got {self.hidden}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}"
            )

    @property
    def parameters(self) -> float:
        """Number of parameters, norms, biases and routers left out (below 0.1 %)."""
        tables = (2 - self.tied) * self.vocabulary * self.hidden
        return float(self.layers * self.layer_parameters + tables)

    @property
    def layer_parameters(self) -> float:
        """Parameters of the matrices of one layer."""
        return float(
            attention_parameters(self.hidden, self.kv_heads / self.heads)
            + self.experts
            * feed_forward_parameters(self.hidden, self.feed_forward, float(self.gated))
        )


def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int) -> Transformer:
    """A GPT-like shape: inner width 4 x hidden, embedding and head tied."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        feed_forward=4 * hidden,
        gated=False,
        vocabulary=vocabulary,
        tied=True,
    )


#: Width of a head, width over layers, and vocabulary of Llama 2.
_HEAD, _WIDTH_OF_LAYER, _VOCABULARY = 128, 128, 32_000
_MOST_HEADS: Final = 512
_SMALLEST, _LARGEST = 3e7, 3e12


def llama_of_size(parameters: float) -> Transformer:
    """A Llama-like shape of about that many parameters, 30 M to 3 T; ``ValueError`` beyond.

    parameters = layers 12 hidden^2 + 2 vocabulary hidden,       layers near hidden / 128
    """
    if not _SMALLEST <= parameters <= _LARGEST:
        raise ValueError(f"size must be 30 M to 3 T parameters, got {parameters:.3g}")

    def layers_of(hidden: int) -> float:
        return (parameters - 2 * _VOCABULARY * hidden) / (12 * hidden**2)

    def is_apart(hidden: int) -> float:
        return abs(layers_of(hidden) - hidden / _WIDTH_OF_LAYER) / hidden

    hidden = min(range(_HEAD, _HEAD * _MOST_HEADS, _HEAD), key=is_apart)
    return Transformer(
        layers=round(layers_of(hidden)),
        hidden=hidden,
        heads=hidden // _HEAD,
        kv_heads=hidden // _HEAD,
        feed_forward=round(8 * hidden / 3),
        gated=True,
        vocabulary=_VOCABULARY,
        tied=False,
    )


def attention_parameters(hidden: Number, kv_share: Number) -> Number:
    """Parameters of queries, keys, values and projection of one layer."""
    return 2 * hidden**2 * (1 + kv_share)


def feed_forward_parameters(hidden: Number, inner: Number, gated: Number) -> Number:
    """Parameters of one feed-forward part, or of one expert."""
    return (2 + gated) * hidden * inner


def layer_matmul_flop(tokens: Number, parameters: Number) -> Number:
    """Forward FLOP of the matrices of one layer: two per parameter and token."""
    return 2 * tokens * parameters


def attention_flop(tokens: Number, sequence: Number, hidden: Number) -> Number:
    """Forward FLOP of scores and weighted values of one layer, causal half counted in full.

    4 b s^2 h (FIELD: layer forward 24 b s h^2 + 4 b s^2 h; Narayanan 2021, arXiv 2104.04473).
    """
    return 4 * tokens * sequence * hidden


def shared_bytes(tokens: Number, hidden: Number) -> Number:
    """Memory traffic of norms, dropouts and residuals of one layer forward. [B]

    Two norms read and write, two residual additions read two and write one, in 16 bit. Tensor
    parallelism divides this only together with sequence parallelism.
    """
    return 10 * HALF_BYTES * tokens * hidden


def split_bytes(tokens: Number, hidden: Number, inner: Number, gated: Number) -> Number:
    """Memory traffic of what tensor parallelism always divides, of one layer forward. [B]

    Activation function (reads and writes the inner width), biases and layout changes of heads.
    """
    return HALF_BYTES * tokens * ((3 + gated) * inner + 6 * hidden)


def score_bytes(tokens: Number, sequence: Number, heads: Number) -> Number:
    """Memory traffic of attention scores that are written out, of one layer forward. [B]

    Scale, mask, softmax and dropout read and write tokens x sequence scores of every head.
    """
    return 6 * HALF_BYTES * tokens * sequence * heads


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTransformer:
    """A transformer as it is usually trained."""

    name: str
    shape: Transformer
    sequence: int
    """Tokens per sequence."""


_NAMED: Final = tuple(
    NamedTransformer(
        name=name,
        shape=gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary),
        sequence=sequence,
    )
    # Layers, width, heads, vocabulary, tokens per sequence. GPT-2: Radford 2019; GPT-3: Brown 2020
    # (arXiv 2005.14165), vocabulary padded to 51,200 as in Narayanan 2021 (arXiv 2104.04473).
    for name, layers, hidden, heads, vocabulary, sequence in (
        ("gpt2", 12, 768, 12, 50_257, 1024),
        ("gpt2-medium", 24, 1024, 16, 50_257, 1024),
        ("gpt2-large", 36, 1280, 20, 50_257, 1024),
        ("gpt2-xl", 48, 1600, 25, 50_257, 1024),
        ("gpt3-6.7b", 32, 4096, 32, 51_200, 2048),
        ("gpt3-13b", 40, 5120, 40, 51_200, 2048),
        ("gpt3-175b", 96, 12_288, 96, 51_200, 2048),
    )
) + tuple(
    NamedTransformer(
        name=name,
        shape=Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            feed_forward=inner,
            gated=True,
            vocabulary=vocabulary,
            tied=False,
            experts=8 if name.startswith("mixtral") else 1,
            experts_per_token=2 if name.startswith("mixtral") else 1,
        ),
        sequence=sequence,
    )
    # Layers, width, heads, heads of keys and values, inner width, vocabulary, tokens per sequence.
    # Llama 2: arXiv 2307.09288; Llama 3: arXiv 2407.21783; Mixtral: arXiv 2401.04088 and the config.json
    # of mistralai/Mixtral-8x22B-v0.1.
    for name, layers, hidden, heads, kv_heads, inner, vocabulary, sequence in (
        ("llama2-7b", 32, 4096, 32, 32, 11_008, 32_000, 4096),
        ("llama2-13b", 40, 5120, 40, 40, 13_824, 32_000, 4096),
        ("llama2-70b", 80, 8192, 64, 8, 28_672, 32_000, 4096),
        ("llama3-8b", 32, 4096, 32, 8, 14_336, 128_256, 8192),
        ("llama3-70b", 80, 8192, 64, 8, 28_672, 128_256, 8192),
        ("llama3-405b", 126, 16_384, 128, 8, 53_248, 128_256, 8192),
        ("mixtral-8x7b", 32, 4096, 32, 8, 14_336, 32_000, 4096),
        ("mixtral-8x22b", 56, 6144, 48, 8, 16_384, 32_768, 4096),
    )
)
TRANSFORMERS: Final[Mapping[str, NamedTransformer]] = MappingProxyType(
    {named.name: named for named in _NAMED}
)
