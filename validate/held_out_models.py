"""Models that no fit has ever seen, at sizes that a CPU core trains in a fraction of a second."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from calibrate.task import ModelSpec
from perfmodel.documents.base import write_atomically
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutModel:
    """A model, and the micro-batches at which it is run."""

    model: str
    micro_batches: tuple[int, ...]
    image_size: int | None = None
    optimizers: tuple[str, ...] = ("sgd",)
    """The first serves every micro-batch, the others the first micro-batch."""
    on_two_ranks: bool = False
    config: Config | None = None
    """Of a model that has no name elsewhere; it is read from a file."""

    def label(self, optimizer: str) -> str:
        """A name that is unique among the held-out workloads."""
        size = f" {self.image_size}px" if self.image_size else ""
        return f"{self.model.rpartition(':')[2]}{size} {optimizer}"

    def model_spec(self, optimizer: str, folder: Path) -> ModelSpec:
        """What the worker builds; the folder holds the configurations."""
        model = self.model if self.config is None else str(config_path(folder, self.model))
        return ModelSpec(model=model, image_size=self.image_size, optimizer=optimizer)


def _vision(
    name: str, size: int, *batches: int, two: bool = False, adamw: bool = False
) -> HeldOutModel:
    return HeldOutModel(
        model=f"torchvision:{name}",
        micro_batches=batches,
        image_size=size,
        optimizers=("sgd", "adamw") if adamw else ("sgd",),
        on_two_ranks=two,
    )


HELD_OUT: Final = (
    _vision("resnet50", 64, 2, 8, two=True, adamw=True),
    _vision("resnet152", 64, 2, adamw=True),
    _vision("vgg16", 64, 2, 4),
    _vision("mobilenet_v3_large", 96, 2, 8, two=True, adamw=True),
    _vision("efficientnet_b0", 96, 2, 6),
    _vision("densenet121", 64, 2, 6),
    _vision("convnext_tiny", 64, 2, 6, adamw=True),
    _vision("vit_b_16", 64, 2, 6, two=True),
    _vision("swin_t", 64, 2, 6),
    HeldOutModel(
        model="gpt2_like",
        micro_batches=(1, 4),
        optimizers=("adamw", "sgd"),
        on_two_ranks=True,
        config=gpt2(
            width=384,
            heads=6,
            tokens=64,
            vocabulary=8000,
            hidden_act="gelu_pytorch_tanh",
            **NO_DROPOUT,
        ),
    ),
    HeldOutModel(
        model="bert_like",
        micro_batches=(1, 4),
        optimizers=("adamw",),
        config=bert(
            width=320,
            heads=5,
            tokens=64,
            vocabulary=6000,
            tie_word_embeddings=False,
            **NO_DROPOUT,
        ),
    ),
    HeldOutModel(
        model="llama_like",
        micro_batches=(1, 4),
        optimizers=("adamw", "sgd"),
        config=llama(layers=4, key_heads=2, tokens=64, vocabulary=8000),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSetting:
    """One run: a setting and what is trained in it."""

    setting: RunSetting
    model_spec: ModelSpec


def write_configs(folder: Path) -> None:
    """Write the configurations that the model_specs are built from."""
    for model in HELD_OUT:
        if model.config is not None:
            write_config(folder, model.model, model.config)


def held_out_settings(world_size: int, folder: Path) -> tuple[HeldOutSetting, ...]:
    """Every held-out run: all models on one rank, some under DDP on all ranks."""
    runs = []
    for model in HELD_OUT:
        for index, optimizer in enumerate(model.optimizers):
            several = model.on_two_ranks and world_size > 1 and index == 0
            batches = model.micro_batches if index == 0 else model.micro_batches[:1]
            model_spec = model.model_spec(optimizer, folder)
            for ranks in (1, world_size) if several else (1,):
                mode = Synchronisation.DDP if ranks > 1 else Synchronisation.NONE
                runs += [
                    HeldOutSetting(
                        setting=RunSetting(
                            workload=model.label(optimizer),
                            world_size=ranks,
                            micro_batch=micro_batch,
                            synchronisation=mode,
                        ),
                        model_spec=model_spec,
                    )
                    for micro_batch in batches
                ]
    return tuple(runs)
