"""Parts of transformers, with the operators that the models of Hugging Face run."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfmodel.tracing.huggingface_config import TransformerShape


def gelu_by_hand(inputs: Tensor) -> Tensor:
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
    "gelu_new": gelu_by_hand,
    "gelu_fast": gelu_by_hand,
}


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in single precision, out of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.ones_(self.weight)

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
        self.bias = nn.Parameter(torch.empty(outputs))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(..., out)`` of ``(..., in)``."""
        flat = torch.addmm(self.bias, inputs.reshape(-1, inputs.shape[-1]), self.weight)
        return flat.view(*inputs.shape[:-1], -1)


def split_heads(inputs: Tensor, head_width: int) -> Tensor:
    """``(samples, heads, tokens, head_width)`` of ``(samples, tokens, heads * head_width)``."""
    heads: Tensor = inputs.unflatten(-1, (-1, head_width))
    return heads.transpose(1, 2)


def merge_heads(inputs: Tensor) -> Tensor:
    """The inverse of ``split_heads``."""
    return inputs.transpose(1, 2).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: float) -> Tensor:
    """Attention with grouped keys and values spread to all heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (_spread(tensor, groups) for tensor in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal
    )


def _spread(tensor: Tensor, groups: int) -> Tensor:
    samples, heads, tokens, width = tensor.shape
    spread = tensor[:, :, None].expand(samples, heads, groups, tokens, width)
    return spread.reshape(samples, heads * groups, tokens, width)


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


def rotate(inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads rotated by their position; what lies beyond the rotated width stays."""
    width = cosines.shape[-1]
    turned, rest = inputs[..., :width], inputs[..., width:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class GatedMLP(nn.Module):
    """Down-projection of an activated gate times an up-projection."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner_width, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.inner_width, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.inner_width, shape.width, bias=shape.mlp_bias)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as the input."""
        outputs: Tensor = self.down_proj(
            self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return outputs


class EvenExperts(nn.Module):
    """Experts that each get the same number of tokens: where the router sends them only data can say."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(shape) for _ in range(shape.num_experts))
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
