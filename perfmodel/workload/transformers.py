"""Transformers by name: shapes that their makers published."""

from collections.abc import Iterator, Mapping
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


#: Layers, width, heads, vocabulary, tokens per sequence. GPT-2: Radford 2019; GPT-3: Brown 2020
#: (arXiv 2005.14165), vocabulary padded to 51,200 as in Narayanan 2021 (arXiv 2104.04473).
_GPT: Final[Mapping[str, tuple[int, int, int, int, int]]] = {
    "gpt2": (12, 768, 12, 50_257, 1024),
    "gpt2-xl": (48, 1600, 25, 50_257, 1024),
    "gpt3-6.7b": (32, 4096, 32, 51_200, 2048),
    "gpt3-13b": (40, 5120, 40, 51_200, 2048),
    "gpt3-175b": (96, 12_288, 96, 51_200, 2048),
}
#: Layers, width, heads, heads of keys and values, inner width, vocabulary, tokens per sequence. Llama 2:
#: arXiv 2307.09288; Llama 3: arXiv 2407.21783; Mixtral: arXiv 2401.04088 and the config.json of
#: mistralai/Mixtral-8x22B-v0.1.
_LLAMA: Final[Mapping[str, tuple[int, int, int, int, int, int, int]]] = {
    "llama2-7b": (32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama2-13b": (40, 5120, 40, 40, 13_824, 32_000, 4096),
    "llama2-70b": (80, 8192, 64, 8, 28_672, 32_000, 4096),
    "llama3-8b": (32, 4096, 32, 8, 14_336, 128_256, 8192),
    "llama3-70b": (80, 8192, 64, 8, 28_672, 128_256, 8192),
    "llama3-405b": (126, 16_384, 128, 8, 53_248, 128_256, 8192),
    "mixtral-8x7b": (32, 4096, 32, 8, 14_336, 32_000, 4096),
    "mixtral-8x22b": (56, 6144, 48, 8, 16_384, 32_768, 4096),
}
#: Experts per layer, and those that a token visits; one of one in all others.
_EXPERTS: Final[Mapping[str, tuple[int, int]]] = {"mixtral-8x7b": (8, 2), "mixtral-8x22b": (8, 2)}


def _gpts() -> Iterator[NamedTransformer]:
    for name, (layers, hidden, heads, vocabulary, sequence) in _GPT.items():
        shape = gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary)
        yield NamedTransformer(name=name, shape=shape, sequence=sequence)


def _llamas() -> Iterator[NamedTransformer]:
    for name, (layers, hidden, heads, kv_heads, inner, vocabulary, sequence) in _LLAMA.items():
        experts, experts_per_token = _EXPERTS.get(name, (1, 1))
        shape = Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            feed_forward=inner,
            gated=True,
            vocabulary=vocabulary,
            tied=False,
            experts=experts,
            experts_per_token=experts_per_token,
        )
        yield NamedTransformer(name=name, shape=shape, sequence=sequence)


TRANSFORMERS: Final[Mapping[str, NamedTransformer]] = MappingProxyType(
    {named.name: named for named in (*_gpts(), *_llamas())}
)
