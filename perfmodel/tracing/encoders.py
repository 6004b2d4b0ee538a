"""Encoders: BERT with the head that its file names, and ViT."""

import torch
from torch import Tensor, nn

from perfmodel.tracing.decoders import PlainMLP, SplitAttention
from perfmodel.tracing.huggingface_config import TransformerShape
from perfmodel.tracing.transformer_layers import ACTIVATIONS


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
