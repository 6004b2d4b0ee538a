"""Transformers by name: shapes that their makers published."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from perfmodel.workload.transformer import Transformer, gpt


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTransformer:
    """A transformer as it is usually trained."""

    name: str
    shape: Transformer
    sequence: int
    """Tokens per sequence."""


def _llama(  # noqa: PLR0913 - a shape has as many numbers
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    vocabulary: int,
    experts: int = 1,
    experts_per_token: int = 1,
) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=feed_forward,
        gated=True,
        vocabulary=vocabulary,
        tied=False,
        experts=experts,
        experts_per_token=experts_per_token,
    )


#: GPT-2: Radford 2019; GPT-3: Brown 2020 (arXiv 2005.14165), vocabulary padded to 51,200 as in
#: Narayanan 2021 (arXiv 2104.04473); Llama 2: arXiv 2307.09288; Llama 3: arXiv 2407.21783; Mixtral:
#: arXiv 2401.04088 and the config.json of mistralai/Mixtral-8x22B-v0.1.
_SHAPES: Final[Mapping[str, tuple[Transformer, int]]] = {
    "gpt2": (gpt(layers=12, hidden=768, heads=12, vocabulary=50_257), 1024),
    "gpt2-xl": (gpt(layers=48, hidden=1600, heads=25, vocabulary=50_257), 1024),
    "gpt3-6.7b": (gpt(layers=32, hidden=4096, heads=32, vocabulary=51_200), 2048),
    "gpt3-13b": (gpt(layers=40, hidden=5120, heads=40, vocabulary=51_200), 2048),
    "gpt3-175b": (gpt(layers=96, hidden=12_288, heads=96, vocabulary=51_200), 2048),
    "llama2-7b": (
        _llama(
            layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11_008, vocabulary=32_000
        ),
        4096,
    ),
    "llama2-13b": (
        _llama(
            layers=40, hidden=5120, heads=40, kv_heads=40, feed_forward=13_824, vocabulary=32_000
        ),
        4096,
    ),
    "llama2-70b": (
        _llama(
            layers=80, hidden=8192, heads=64, kv_heads=8, feed_forward=28_672, vocabulary=32_000
        ),
        4096,
    ),
    "llama3-8b": (
        _llama(
            layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14_336, vocabulary=128_256
        ),
        8192,
    ),
    "llama3-70b": (
        _llama(
            layers=80, hidden=8192, heads=64, kv_heads=8, feed_forward=28_672, vocabulary=128_256
        ),
        8192,
    ),
    "llama3-405b": (
        _llama(
            layers=126,
            hidden=16_384,
            heads=128,
            kv_heads=8,
            feed_forward=53_248,
            vocabulary=128_256,
        ),
        8192,
    ),
    "mixtral-8x7b": (
        _llama(
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            feed_forward=14_336,
            vocabulary=32_000,
            experts=8,
            experts_per_token=2,
        ),
        4096,
    ),
    "mixtral-8x22b": (
        _llama(
            layers=56,
            hidden=6144,
            heads=48,
            kv_heads=8,
            feed_forward=16_384,
            vocabulary=32_768,
            experts=8,
            experts_per_token=2,
        ),
        4096,
    ),
}
TRANSFORMERS: Final[Mapping[str, NamedTransformer]] = MappingProxyType(
    {
        name: NamedTransformer(name=name, shape=shape, sequence=sequence)
        for name, (shape, sequence) in _SHAPES.items()
    }
)
