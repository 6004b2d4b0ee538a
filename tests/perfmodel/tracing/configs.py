"""Configurations as published with well-known models, and their published parameter counts."""

from typing import Any, Final


def _config(model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """From width, inner width, layers, heads, and either vocabulary and positions or nothing."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = ("vocab_size", "max_position_embeddings")
    return {"model_type": model_type, **dict(zip((*names, *text), sizes, strict=False))} | others


def llama_config(*sizes: int) -> dict[str, Any]:
    """From width, inner width, layers, heads, vocabulary and positions."""
    return _config("llama", *sizes)


def _llama(model_type: str, *sizes: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    others = {"hidden_act": "silu", "tie_word_embeddings": False} | others
    return _config(model_type, *sizes, num_key_value_heads=kv_heads, **others)


#: Name: configuration, trainable parameters.
CONFIGS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "llama-2-7b": (
        _llama("llama", 4096, 11008, 32, 32, 32000, 4096, kv_heads=32, torch_dtype="float16"),
        6_738_415_616,
    ),
    "llama-3-8b": (
        _llama("llama", 4096, 14336, 32, 32, 128256, 8192, kv_heads=8, rope_theta=500000.0),
        8_030_261_248,
    ),
    "llama-3-70b": (
        _llama("llama", 8192, 28672, 80, 64, 128256, 8192, kv_heads=8)
        | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        70_553_706_496,
    ),
    "mistral-7b": (
        _llama("mistral", 4096, 14336, 32, 32, 32000, 32768, kv_heads=8, sliding_window=4096),
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        _llama("mixtral", 4096, 14336, 32, 32, 32000, 32768, kv_heads=8)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        46_702_792_704,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        | {"vocab_size": 50257, "activation_function": "gelu_new"}
        | {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
        124_439_808,
    ),
    "bert-base-uncased": (
        _config("bert", 768, 3072, 12, 12, 30522, 512, type_vocab_size=2, hidden_act="gelu")
        | {"architectures": ["BertModel"]},
        109_482_240,
    ),
    "vit-base-patch16-224": (
        _config("vit", 768, 3072, 12, 12, image_size=224, patch_size=16, num_labels=1000)
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        86_567_656,
    ),
    "qwen2-7b": (
        _llama("qwen2", 3584, 18944, 28, 28, 152064, 131072, kv_heads=4)
        | {"sliding_window": 131072, "use_sliding_window": False},
        7_615_616_512,
    ),
    "qwen3-8b": (
        _llama("qwen3", 4096, 12288, 36, 32, 151936, 40960, kv_heads=8, head_dim=128),
        8_190_735_360,
    ),
}
