"""Settings of a training, read from the file of its trainer.

llm-foundry, axolotl, LLaMA-Factory, Lightning and its command line, NeMo, torchtitan.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfmodel.errors import InvalidDocument, UsageError, reading
from perfmodel.files import Unreadable, leaves, parse_toml, read_text
from perfmodel.units import MIB, whole

_LINE: Final = re.compile(r"^(?P<indent> *)(?P<key>[\w.-]+):(?:\s+(?P<value>.*))?$")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*$")
_INTERPOLATED: Final = re.compile(r"^\$\{(?:variables\.)?([\w.]+)\}$")
#: Blocks that hold settings of the block around them.
_WRAPPERS: Final = ("init_args", "config", "config_overrides", "parameters")
_QUOTES: Final = " '\""
#: Mappings inside mappings in one line: each level is read once more.
_MOST_NESTED: Final = 16
_TRUE: Final = ("true", "yes", "on")
_SIZE: Final = re.compile(
    r"(?a)(?<![\w.])(?:(\d{1,4})x)?(\d{1,9}(?:\.\d{1,9})?)\s?([bm])(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What a trainer's file says; None is what it leaves out."""

    name: str
    """Of the run and of the model, as far as they are named."""
    shape: Mapping[str, int] | None = None
    """Width, layers, heads, inner width, vocabulary of a GPT-like model."""
    model: str | None = None
    """By name, where the file has no shape."""
    sequence: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    strategy: str | None = None
    frozen: bool = False
    """Whether adapters alone are trained."""


def read_config(path: Path) -> TrainingConfig:
    """The settings in a trainer's file; ``InvalidDocument`` if it cannot be read."""
    with reading(path, "configuration"):
        text = read_text(path, most=MIB)
        found = _toml(text) if path.suffix == ".toml" else _yaml(path, text)
    get = _Getter(path, found)
    width, layers, heads = (
        get.count(*(f"model.{name}" for name in names))
        for names in (
            ("d_model", "dim", "hidden_size", "n_embd"),
            ("n_layers", "n_layer", "num_hidden_layers", "num_layers"),
            ("n_heads", "n_head", "num_attention_heads"),
        )
    )
    shape = None
    if width and layers and heads:
        ratio = get.count("model.expansion_ratio") or 4
        shape = {
            "hidden": width,
            "layers": layers,
            "heads": heads,
            "feed_forward": get.count("model.intermediate_size", "model.ffn_hidden_size")
            or ratio * width,
            "vocabulary": get.count("model.vocab_size") or 50_368,
        }
    base = get.text("base_model", "model_name_or_path", "model.pretrained_model_name_or_path")
    names = (get.text("run_name"), get.text("name"), base, path.stem)
    flavour = " ".join(filter(None, (get.text("model.name"), get.text("model.flavor"))))
    return TrainingConfig(
        name=" ".join(dict.fromkeys(filter(None, (*names, flavour)))),
        shape=shape,
        model=base or flavour or None,
        sequence=get.count(
            *("max_seq_len", "sequence_len", "cutoff_len", "training.seq_len", "model.max_seq_len"),
            *("model.encoder_seq_length", "model.seq_length"),
        ),
        micro_batch=get.count(
            *("device_train_microbatch_size", "micro_batch_size", "training.local_batch_size"),
            *("per_device_train_batch_size", "model.micro_batch_size"),
            *("training.batch_size", "data.batch_size"),
        ),
        global_batch=get.count(
            *("global_train_batch_size", "training.global_batch_size", "model.global_batch_size")
        ),
        accumulation=get.count("gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
        precision=_precision(get),
        strategy=_strategy(get, found),
        frozen=get.text("adapter", "finetuning_type") in ("lora", "qlora"),
    )


def size_in_name(name: str) -> float | None:
    """Parameters that a name tells, such as 7e9 for ``mpt-7b``; None if it tells none or several."""
    sizes = {
        int(copies or 1) * float(number) * (1e9 if unit in "bB" else 1e6)
        for copies, number, unit in _SIZE.findall(name.replace("_", " ").replace("-", " "))
    }
    return sizes.pop() if len(sizes) == 1 else None


def _yaml(path: Path, text: str) -> dict[str, str]:
    """Scalars by their path. Lists, blocks of text and anchors are left out: no setting needs them."""
    found: dict[str, str] = {}
    seen = set()
    parents: list[tuple[int, str]] = []
    for raw in text.splitlines():
        match = _LINE.match(_COMMENT.sub("", raw).rstrip())
        if match is None:
            continue
        indent = len(match["indent"])
        while parents and parents[-1][0] >= indent:
            parents.pop()
        key = ".".join([*(name for _, name in parents), match["key"]])
        value = (match["value"] or "").strip()
        if not value:
            parents.append((indent, match["key"]))
        elif key in seen:
            raise InvalidDocument(f"{path}: {key} must be given once; remove one")
        else:
            seen.add(key)
            found |= _scalars(key, value)
    if not found:
        raise InvalidDocument(f"{path}: configuration must hold lines KEY: VALUE, got none")
    return found


def _scalars(key: str, value: str, depth: int = 0) -> dict[str, str]:
    """A value by its path, or those of a mapping in one line, such as ``{d_model: 8, attn: {rope: true}}``."""
    if depth > _MOST_NESTED:
        raise Unreadable(f"mappings in one line must be at most {_MOST_NESTED} deep")
    if not (value.startswith("{") and value.endswith("}")):
        whole_key = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        return {whole_key: value.strip("'\"")}
    found: dict[str, str] = {}
    level, begin = 0, 1
    for at, mark in enumerate(value):
        level += (mark in "{[") - (mark in "}]")
        if (mark == "," and level == 1) or level == 0:
            name, _, inner = value[begin:at].partition(":")
            if inner.strip():
                path = f"{key}.{name.strip(_QUOTES)}"
                found |= _scalars(path, inner.strip(), depth + 1)
            begin = at + 1
    return found


def _toml(text: str) -> dict[str, str]:
    found = leaves(parse_toml(text))
    return {path: str(value) for path, value in found if isinstance(value, str | int | float)}


@dataclass(frozen=True, slots=True)
class _Getter:
    """Values by any of their names."""

    path: Path
    found: Mapping[str, str]

    def text(self, *names: str) -> str | None:
        """Of the first name that there is; references to other keys are followed once."""
        for name in names:
            value = self.found.get(name)
            if value is not None and (match := _INTERPOLATED.match(value)):
                value = self.found.get(f"variables.{match[1]}", self.found.get(match[1]))
            if value is not None and value.casefold() not in ("null", "none", "auto", "~"):
                return value
        return None

    def count(self, *names: str) -> int | None:
        """A whole number above 0."""
        text = self.text(*names)
        if text is None:
            return None
        digits = text.replace("_", "")
        name = next(name for name in names if name in self.found)
        try:
            number = whole(digits)
        except ValueError as error:
            raise UsageError(f"{self.path}: {name} {error}") from None
        if number == 0:
            raise UsageError(f"{self.path}: {name} must be a whole number >= 1, got {text!r}")
        return number if number > 0 else None  # -1: the trainer decides


def _precision(get: _Getter) -> str | None:
    text = get.text("precision", "trainer.precision", "training.mixed_precision_param") or ""
    for name in ("bf16", "bfloat16", "fp16", "float16", "16-mixed"):
        if name in text:
            return "bf16"  # both have the same peak
    if (get.text("bf16", "fp16") or "").casefold() in _TRUE:
        return "bf16"
    if (get.text("tf32") or "").casefold() in _TRUE:
        return "tf32"
    return "fp32" if text.startswith(("32", "fp32", "float32")) else None


def _strategy(get: _Getter, found: Mapping[str, str]) -> str | None:
    text = (get.text("trainer.strategy", "strategy") or "").casefold()
    sharding = get.text("fsdp_config.sharding_strategy")
    if sharding is not None:
        return {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp"}.get(sharding)
    if "fsdp" in text or any(key.startswith("fsdp_config") for key in found):
        return "fsdp"
    zero = re.search(
        r"stage_([123])|(?<![a-z])z(?:ero)?[-_]?([123])", f"{text} {get.text('deepspeed') or ''}"
    )
    if zero:
        return f"zero{zero[1] or zero[2]}"
    if "parallelism.data_parallel_shard_degree" in found:
        return "fsdp"
    return "ddp" if "ddp" in text else None
