"""Reading a Hugging Face ``config.json``: the shape of a transformer, whatever its keys are called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import UntraceableModel, why
from perfmodel.files import read_json

LLAMA_FAMILY: Final = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Norms without mean, rotary positions, a gated feed-forward part."""
DECODERS: Final = (*LLAMA_FAMILY, "gpt2")
_ABSENT: Final = object()
#: Keys that mean the same, by family and version of transformers.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx"),
    "hidden_act": ("hidden_act", "activation_function"),
    "hidden_dropout": ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
    "num_experts": ("num_local_experts", "num_experts"),
}
#: Defaults of transformers' own configuration classes, where a file leaves a key out.
_ACTIVATIONS: Final = {"gpt2": "gelu_new", "bert": "gelu", "vit": "gelu"}
_DROPOUTS: Final = {"gpt2": 0.1, "bert": 0.1}


class Config:
    """A configuration with the file's name, so that every complaint says where."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Read a file."""
        try:
            values = read_json(path)
        except (OSError, ValueError) as error:
            raise UntraceableModel(
                f"{path}: cannot be read as JSON: {why(error)}; copy config.json of the model again"
            ) from error
        if not isinstance(values, dict):
            raise UntraceableModel(f"{path}: must hold a JSON object, got {values!r:.40}")
        return cls(path, values)

    def get(self, key: str, default: Any = _ABSENT) -> Any:
        """Value of a key or of one of its other names; ``null`` counts as absent."""
        names = _ALIASES.get(key, (key,))
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is _ABSENT:
            none = "none" if len(names) == 1 else "neither"
            raise UntraceableModel(
                f"{self.path}: must have {' or '.join(names)}, got {none}; a config.json of Hugging Face has it"
            )
        return default

    def count(self, key: str, default: Any = _ABSENT, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number >= {least}", value)
        return value

    def share(self, key: str, default: float) -> float:
        """A number in [0, 1]."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self.wrong(key, "in [0, 1]", value)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Yes or no."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def wrong(self, key: str, rule: str, value: Any) -> UntraceableModel:
        """The complaint about a value."""
        present = next((name for name in _ALIASES.get(key, (key,)) if name in self._values), key)
        return UntraceableModel(
            f"{self.path}: {present}: must be {rule}, got {value!r}; correct it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What decides the operators of a transformer."""

    family: str
    """``model_type`` of the file, such as "llama"."""
    architecture: str
    """Class that the file was saved from, such as "BertForMaskedLM"; empty if it does not say."""
    width: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    inner_width: int
    vocabulary: int
    """Tokens; 0 for images."""
    num_positions: int
    activation: str
    hidden_dropout: float
    attention_dropout: float
    tied: bool
    attention_bias: bool
    num_experts: int
    experts_per_token: int
    window: int | None
    """Tokens that attention looks back, if limited."""
    raw: Config
    """Everything else, for what only one family has."""

    @property
    def is_llama(self) -> bool:
        """Whether it is Llama or one of its relatives."""
        return self.family in LLAMA_FAMILY


def read_shape(config: Config, *, families: tuple[str, ...]) -> TransformerShape:
    """The shape that a configuration describes."""
    family = config.get("model_type")
    if family not in families:
        raise config.wrong("model_type", f"one of {', '.join(families)}", family)
    width = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    if config.get("head_dim", None) is None and width % heads:
        raise config.wrong("hidden_size", f"divisible by the {heads} attention heads", width)
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        rule = f"a divisor of the {heads} attention heads"
        raise config.wrong("num_key_value_heads", rule, kv_heads)
    architectures = config.get("architectures", [])
    llama, dropout = family in LLAMA_FAMILY, _DROPOUTS.get(family, 0.0)
    # Qwen writes a window that is switched off.
    limited = config.get("use_sliding_window", True) is not False and config.get(
        "sliding_window", None
    )
    return TransformerShape(
        family=family,
        architecture=str(architectures[0]) if architectures else "",
        width=width,
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        head_width=config.count("head_dim", width // heads),
        inner_width=config.count("intermediate_size", 4 * width if family == "gpt2" else _ABSENT),
        vocabulary=0 if family == "vit" else config.count("vocab_size"),
        num_positions=0 if family == "vit" else config.count("max_position_embeddings"),
        activation=str(config.get("hidden_act", _ACTIVATIONS.get(family, "silu"))),
        hidden_dropout=0.0 if llama else config.share("hidden_dropout", dropout),
        attention_dropout=config.share("attention_dropout", dropout),
        tied=config.flag("tie_word_embeddings", default=family in {"gpt2", "bert"}),
        attention_bias=config.flag("attention_bias", default=family == "qwen2"),
        num_experts=config.count("num_experts", 8 if family == "mixtral" else 0, least=0),
        experts_per_token=config.count("num_experts_per_tok", 2),
        window=config.count("sliding_window") if limited else None,
        raw=config,
    )
