"""Causal language models: Llama and its relatives, GPT-2, GPT-NeoX, OPT."""

import torch
from torch import Tensor, nn

from perfmodel.tracing.huggingface_config import LLAMA_FAMILY, TransformerShape
from perfmodel.tracing.transformer_layers import (
    ACTIVATIONS,
    EvenExperts,
    GatedMLP,
    RMSNorm,
    Rotary,
    TransposedLinear,
    attend,
    merge_heads,
    rotate,
    split_heads,
)


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
