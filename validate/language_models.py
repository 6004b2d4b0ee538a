"""Small language models in the manner of GPT-2, BERT and Llama, as configurations for the tracer; pure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.documents.base import write_atomically

Config = Mapping[str, Any]

NO_DROPOUT: Final[Config] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def gpt2(*, width: int, heads: int, tokens: int, vocabulary: int, **others: Any) -> Config:
    """Six pre-norm blocks, learned positions, tied head."""
    common = _common("gpt2", layers=6, width=width, heads=heads, tokens=tokens)
    return {**common, "vocab_size": vocabulary, **others}


def bert(*, width: int, heads: int, tokens: int, vocabulary: int, **others: Any) -> Config:
    """Six post-norm blocks, attention in both directions, scores for every token."""
    return {
        **_common("bert", layers=6, width=width, heads=heads, tokens=tokens),
        "architectures": ["BertForMaskedLM"],
        "intermediate_size": 4 * width,
        "vocab_size": vocabulary,
        **others,
    }


def llama(*, layers: int, key_heads: int, tokens: int, vocabulary: int, **others: Any) -> Config:
    """Blocks of width 512: RMS norms, rotary positions, grouped keys, a gated feed-forward."""
    return {
        **_common("llama", layers=layers, width=512, heads=8, tokens=tokens),
        "intermediate_size": 1376,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        **others,
    }


def _common(family: str, *, layers: int, width: int, heads: int, tokens: int) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": tokens,
    }


def config_path(folder: Path, name: str) -> Path:
    """Where the configuration of a model is kept; absolute, for processes started elsewhere."""
    return folder.resolve() / "models" / f"{name}.json"


def write_config(folder: Path, name: str, config: Config) -> Path:
    """Write a configuration as the tracer reads it; its name is that of the model."""
    path = config_path(folder, name)
    write_atomically(path, json.dumps({"_name_or_path": name, **config}, indent=1) + "\n")
    return path
