"""Causal language models: Llama and its relatives, GPT-2, GPT-NeoX, OPT."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfmodel.trace.huggingface_config import LLAMA_FAMILY, TransformerShape


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


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        queries = shape.num_heads * shape.head_width
        keys = shape.num_key_value_heads * shape.head_width
        bias = shape.attention_bias
        self.q_proj = nn.Linear(shape.width, queries, bias=bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.width, bias=bias and shape.family != "qwen2")
        if shape.family == "qwen3":
            self.q_norm: nn.Module = RMSNorm(shape.head_width)
            self.k_norm: nn.Module = RMSNorm(shape.head_width)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.head_width = shape.head_width
        self.dropout = shape.attention_dropout

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_width)))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_width)))
        value = split_heads(self.v_proj(hidden), self.head_width)
        query, key = (rotate(heads.transpose(1, 2), *turn) for heads in (query, key))
        mixed = attend(query, key, value, causal=True, dropout=self.dropout)
        outputs: Tensor = self.o_proj(merge_heads(mixed))
        return outputs


class LlamaLayer(nn.Module):
    """Attention and a gated MLP (or experts), each after a normalisation and beside a residual."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = EvenExperts(shape) if shape.num_experts else GatedMLP(shape)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn)
        outputs: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return outputs


class FusedAttention(nn.Module):
    """Attention with one product for query, key and value: GPT-2 and GPT-NeoX."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        if shape.family == "gpt2":
            self.query_key_value: nn.Module = TransposedLinear(width, 3 * width)
            self.dense: nn.Module = TransposedLinear(width, width)
        else:
            self.query_key_value = nn.Linear(width, 3 * width, bias=shape.attention_bias)
            self.dense = nn.Linear(width, width, bias=shape.attention_bias)
        self.head_width = shape.head_width
        self.dropout = shape.attention_dropout

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        parts = self.query_key_value(hidden).chunk(3, dim=-1)
        query, key, value = (split_heads(part, self.head_width) for part in parts)
        if turn is not None:
            query, key = rotate(query, *turn), rotate(key, *turn)
        mixed = attend(query, key, value, causal=True, dropout=self.dropout)
        outputs: Tensor = self.dense(merge_heads(mixed))
        return outputs


class SplitAttention(nn.Module):
    """Attention with a product each for query, key and value, all with bias: OPT, BERT, ViT."""

    def __init__(self, shape: TransformerShape, *, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.width, shape.width, bias=bias)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=bias)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=bias)
        self.out_proj = nn.Linear(shape.width, shape.width)
        self.head_width = shape.head_width
        self.dropout = shape.attention_dropout
        self.causal = causal

    def forward(self, hidden: Tensor, _turn: None = None) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        query, key, value = (
            split_heads(project(hidden), self.head_width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(query, key, value, causal=self.causal, dropout=self.dropout)
        outputs: Tensor = self.out_proj(merge_heads(mixed))
        return outputs


class PlainMLP(nn.Module):
    """Up, activation, down."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        make = TransposedLinear if shape.family == "gpt2" else nn.Linear
        self.up = make(shape.width, shape.inner_width)
        self.down = make(shape.inner_width, shape.width)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as the input."""
        outputs: Tensor = self.down(self.activation(self.up(hidden)))
        return outputs


class ClassicLayer(nn.Module):
    """A layer of GPT-2, GPT-NeoX (attention and MLP side by side) or OPT."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention: nn.Module = (
            SplitAttention(shape, causal=True) if shape.family == "opt" else FusedAttention(shape)
        )
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = PlainMLP(shape)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()
        self.norm_first = shape.raw.flag("do_layer_norm_before", default=True)
        self.side_by_side = shape.family == "gpt_neox" and shape.parallel_residual

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        if not self.norm_first:
            hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, turn)))
            outputs: Tensor = self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))
            return outputs
        mixed: Tensor = self.dropout(self.attention(self.attention_norm(hidden), turn))
        if self.side_by_side:
            return hidden + mixed + self._transformed(hidden)
        hidden = hidden + mixed
        return hidden + self._transformed(hidden)

    def _transformed(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return outputs


class CausalLanguageModel(nn.Module):
    """Embeddings, layers, a last normalisation and scores for the next token."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        llama = shape.family in LLAMA_FAMILY
        embedding_width = shape.width
        if shape.family == "opt":
            embedding_width = shape.raw.count("word_embed_proj_dim", shape.width)
        self.embed_tokens = nn.Embedding(shape.vocabulary, embedding_width)
        self.positions = _learned_positions(shape)
        narrow = embedding_width != shape.width
        self.project_in = nn.Linear(embedding_width, shape.width, bias=False) if narrow else None
        self.project_out = nn.Linear(shape.width, embedding_width, bias=False) if narrow else None
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()
        rotated = llama or shape.family == "gpt_neox"
        self.rotary = Rotary(int(shape.head_width * shape.rotary_fraction)) if rotated else None
        make = LlamaLayer if llama else ClassicLayer
        self.layers = nn.ModuleList(make(shape) for _ in range(shape.num_layers))
        self.norm = _last_norm(shape)
        self.lm_head = nn.Linear(embedding_width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(samples, tokens, vocabulary)`` of token ids ``(samples, tokens)``."""
        hidden = self.embed_tokens(tokens)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.positions is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            hidden = hidden + self.positions(places[None])
        hidden = self.dropout(hidden)
        turn = None if self.rotary is None else self.rotary(hidden)
        for layer in self.layers:
            hidden = layer(hidden, turn)
        hidden = self.norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        scores: Tensor = self.lm_head(hidden)
        return scores


def _learned_positions(shape: TransformerShape) -> nn.Embedding | None:
    """GPT-2 and OPT; the latter keeps two rows that no token uses."""
    spare = {"gpt2": 0, "opt": 2}.get(shape.family)
    return None if spare is None else nn.Embedding(shape.num_positions + spare, shape.width)


def _last_norm(shape: TransformerShape) -> nn.Module:
    if shape.family in LLAMA_FAMILY:
        return RMSNorm(shape.width)
    if shape.family == "opt" and not shape.raw.flag("do_layer_norm_before", default=True):
        return nn.Identity()
    return nn.LayerNorm(shape.width)


class EncoderLayer(nn.Module):
    """A layer of BERT (normalisation after the residual) or ViT (before the parts)."""

    def __init__(self, shape: TransformerShape, *, norm_first: bool, bias: bool = True) -> None:
        super().__init__()
        self.attention = SplitAttention(shape, causal=False, bias=bias)
        self.attention_norm = nn.LayerNorm(shape.width)
        self.mlp = PlainMLP(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()
        self.norm_first = norm_first

    def forward(self, hidden: Tensor) -> Tensor:
        """``(samples, tokens, width)`` of the same."""
        if self.norm_first:
            hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
            outputs: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
            return outputs
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden)))
        outputs = self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))
        return outputs  # noqa: RET504 - named for its type


class Bert(nn.Module):
    """BERT; without a head the pooled first token is classified by nothing more than its mean."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.num_positions, shape.width)
        self.token_type_embeddings = nn.Embedding(
            shape.raw.count("type_vocab_size", 2), shape.width
        )
        self.embedding_norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()
        self.layers = nn.ModuleList(
            EncoderLayer(shape, norm_first=False) for _ in range(shape.num_layers)
        )
        masked = shape.architecture in {"BertForMaskedLM", "BertForPreTraining"}
        pooled = shape.architecture != "BertForMaskedLM"
        self.pooler = nn.Linear(shape.width, shape.width) if pooled else None
        self.classifier = _classifier(shape)
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
        return words, pooled if self.classifier is None else self.classifier(self.dropout(pooled))


def _classifier(shape: TransformerShape) -> nn.Linear | None:
    if shape.architecture == "BertForPreTraining":
        return nn.Linear(shape.width, 2)
    if shape.architecture == "BertForSequenceClassification":
        return nn.Linear(shape.width, num_labels(shape, default=2))
    return None


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
        patch = shape.raw.count("patch_size", 16)
        channels = shape.raw.count("num_channels", 3)
        self.patches = nn.Conv2d(channels, shape.width, kernel_size=patch, stride=patch)
        num_patches = (image_size // patch) ** 2
        self.class_token = nn.Parameter(torch.empty(1, 1, shape.width))
        self.positions = nn.Parameter(torch.empty(1, num_patches + 1, shape.width))
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()
        bias = shape.raw.flag("qkv_bias", default=True)
        self.layers = nn.ModuleList(
            EncoderLayer(shape, norm_first=True, bias=bias) for _ in range(shape.num_layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.classifier = nn.Linear(shape.width, num_labels(shape, default=1000))

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(samples, labels)`` of images ``(samples, channels, pixels, pixels)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(tokens.shape[0], -1, -1)
        hidden = self.dropout(torch.cat((first, tokens), dim=1) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.classifier(self.norm(hidden)[:, 0])
        return scores


def num_labels(shape: TransformerShape, *, default: int) -> int:
    """Classes that a file names, or counts."""
    named = shape.raw.get("id2label", None)
    return (
        len(named) if isinstance(named, dict) and named else shape.raw.count("num_labels", default)
    )
