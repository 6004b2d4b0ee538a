"""Reading a Hugging Face ``config.json``: the shape of a transformer, whatever its keys are called."""

from pathlib import Path
from typing import Any, Final

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from perfmodel.errors import UntraceableModel, why
from perfmodel.files import read_json

LLAMA_FAMILY: Final = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Norms without mean, rotary positions, a gated feed-forward part."""
DECODERS: Final = (*LLAMA_FAMILY, "gpt2")
#: Defaults of transformers' own configuration classes; an image has no tokens, and 1 stands for them.
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gpt2": {"activation": "gelu_new", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bert": {"activation": "gelu", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "vit": {"activation": "gelu", "vocabulary": 1, "num_positions": 1, "num_labels": 1000},
    "mixtral": {"num_experts": 8},
    "qwen2": {"attention_bias": True},
}
_TIED: Final = ("gpt2", "bert")
#: Fields that only these families have; what files of others say there is of no account.
_OWN: Final[dict[str, tuple[str, ...]]] = {
    "architecture": (),
    "vocabulary": (*DECODERS, "bert"),
    "num_positions": (*DECODERS, "bert"),
    "mlp_bias": LLAMA_FAMILY,
    "token_types": ("bert",),
    "num_labels": ("bert", "vit"),
    **dict.fromkeys(("image_size", "patch_size", "num_channels", "qkv_bias"), ("vit",)),
}


def _keys(*names: str, **others: Any) -> Any:
    """A field by its keys in files of several families and versions."""
    return Field(validation_alias=AliasChoices(*names), **others)


class TransformerShape(BaseModel):
    """What decides the operators of a transformer."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    name: str = _keys("_name_or_path", default="")
    family: str = _keys("model_type")
    """Such as "llama"."""
    architecture: str = ""
    """Class that the file was saved from, such as "BertForMaskedLM"; empty if it does not say."""
    width: PositiveInt = _keys("hidden_size", "n_embd")
    num_layers: PositiveInt = _keys("num_hidden_layers", "n_layer")
    num_heads: PositiveInt = _keys("num_attention_heads", "n_head")
    num_key_value_heads: PositiveInt = _keys("num_key_value_heads")
    head_width: PositiveInt = _keys("head_dim")
    inner_width: PositiveInt = _keys("intermediate_size", "n_inner")
    vocabulary: PositiveInt = _keys("vocab_size")
    """Tokens."""
    num_positions: PositiveInt = _keys("max_position_embeddings", "n_positions", "n_ctx")
    activation: str = _keys("hidden_act", "activation_function", default="silu")
    hidden_dropout: float = _keys(
        "hidden_dropout_prob", "hidden_dropout", "resid_pdrop", default=0.0, ge=0, le=1
    )
    attention_dropout: float = _keys(
        *("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
        default=0.0,
        ge=0,
        le=1,
    )
    tied: bool = _keys("tie_word_embeddings", default=False)
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = True
    num_experts: NonNegativeInt = _keys("num_local_experts", "num_experts", default=0)
    experts_per_token: PositiveInt = _keys("num_experts_per_tok", default=2)
    window: PositiveInt | None = _keys("sliding_window", default=None)
    """Tokens that attention looks back, if limited."""
    token_types: PositiveInt = _keys("type_vocab_size", default=2)
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    num_channels: PositiveInt = 3
    num_labels: PositiveInt = 2

    @property
    def is_llama(self) -> bool:
        """Whether it is Llama or one of its relatives."""
        return self.family in LLAMA_FAMILY


def read_shape(path: Path, *, families: tuple[str, ...]) -> TransformerShape:
    """The shape that a file describes; ``UntraceableModel`` with key, rule and value if it breaks one."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise UntraceableModel(
            f"{path}: cannot be read as JSON: {why(error)}; copy config.json of the model again"
        ) from error
    if not isinstance(values, dict):
        raise UntraceableModel(f"{path}: must hold a JSON object, got {values!r:.40}")
    return shape_of(values, path=path, families=families)


def shape_of(
    values: dict[str, Any], *, path: Path, families: tuple[str, ...] = DECODERS
) -> TransformerShape:
    """The shape that the content of a file describes; ``null`` counts as absent."""
    family = values.get("model_type")
    if family is None:
        raise _missing(path, "family")
    if family not in families:
        raise wrong(path, "model_type", f"one of {', '.join(families)}", family)
    foreign = {key for name, own in _OWN.items() if family not in own for key in _keys_of(name)}
    said = {key: values[key] for key in values.keys() - foreign if values[key] is not None}
    heads: Any = said.get("num_attention_heads", said.get("n_head"))
    width: Any = said.get("hidden_size", said.get("n_embd"))
    divides = type(width) is type(heads) is int and heads > 0
    if divides and "head_dim" not in said and width % heads:
        raise wrong(path, "hidden_size", f"divisible by the {heads} attention heads", width)
    defaults = {"tied": family in _TIED, **_DEFAULTS.get(family, {})}
    if divides:
        defaults |= {"num_key_value_heads": heads, "head_width": width // heads}
        defaults |= {"inner_width": 4 * width} if family == "gpt2" else {}
    for name, value in defaults.items():
        keys = _keys_of(name)
        if not said.keys() & keys:
            said[keys[0]] = value
    _settle(said)
    try:
        shape = TransformerShape.model_validate(said)
    except ValidationError as error:
        raise _complaint(path, error) from error
    if heads % shape.num_key_value_heads:
        rule = f"a divisor of the {heads} attention heads"
        raise wrong(path, "num_key_value_heads", rule, shape.num_key_value_heads)
    return shape


def _settle(said: dict[str, Any]) -> None:
    """What files write in another way, as fields."""
    if said["model_type"] in LLAMA_FAMILY:
        said["hidden_dropout_prob"] = 0.0
    # Qwen writes a window that is switched off; elsewhere 0 stands for none.
    if said.get("use_sliding_window") is False or not said.get("sliding_window"):
        said.pop("sliding_window", None)
    if isinstance(named := said.get("id2label"), dict) and named:
        said["num_labels"] = len(named)
    if isinstance(known := said.get("architectures"), list) and known:
        said["architecture"] = str(known[0])


#: By the type of a field.
_RULES: Final[dict[Any, str]] = {
    str: "a text",
    bool: "true or false",
    float: "in [0, 1]",
    NonNegativeInt: "a whole number >= 0",
    **dict.fromkeys((PositiveInt, PositiveInt | None), "a whole number >= 1"),
}


def _complaint(path: Path, error: ValidationError) -> UntraceableModel:
    """The first rule that a file breaks, by its key."""
    problem = error.errors(include_url=False)[0]
    key = str(problem["loc"][0])
    name = next(name for name in TransformerShape.model_fields if key in _keys_of(name))
    if problem["type"] != "missing":
        return wrong(path, key, _RULES[TransformerShape.__annotations__[name]], problem["input"])
    return _missing(path, name)


def _missing(path: Path, name: str) -> UntraceableModel:
    """The complaint about a field that a file does not hold."""
    keys = " or ".join(_keys_of(name))
    return UntraceableModel(
        f"{path}: must have {keys}, got none; a config.json of Hugging Face has it"
    )


def wrong(path: Path, key: str, rule: str, value: Any) -> UntraceableModel:
    """The complaint about a value."""
    return UntraceableModel(f"{path}: {key}: must be {rule}, got {value!r:.80}; correct it")


def _keys_of(name: str) -> list[str]:
    alias = TransformerShape.model_fields[name].validation_alias
    return [str(key) for key in alias.choices] if isinstance(alias, AliasChoices) else [name]
