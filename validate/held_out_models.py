"""Models that no fit has ever seen, at sizes that a CPU core trains in a fraction of a second."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from calibrate.task import Trainee
from perfmodel.parallelism.strategy import Setting, Synchronisation
from validate.language_models import (
    NO_DROPOUT,
    Config,
    bert,
    config_path,
    gpt2,
    llama,
    write_config,
)

Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutModel:
    """A model, and the micro-batches at which it is run."""

    model: str
    micro_batches: tuple[int, ...]
    image_size: int | None = None
    optimizers: tuple[Optimizer, ...] = ("sgd",)
    """The first serves every micro-batch, the others the first micro-batch."""
    on_two_ranks: bool = False
    config: Config | None = None
    """Of a model that has no name elsewhere; it is read from a file."""

    def label(self, optimizer: Optimizer) -> str:
        """A name that is unique among the held-out workloads."""
        size = f" {self.image_size}px" if self.image_size else ""
        return f"{self.model.rpartition(':')[2]}{size} {optimizer}"

    def trainee(self, optimizer: Optimizer, folder: Path) -> Trainee:
        """What the worker builds; the folder holds the configurations."""
        model = self.model if self.config is None else str(config_path(folder, self.model))
        return Trainee(model=model, image_size=self.image_size, optimizer=optimizer)


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

    setting: Setting
    trainee: Trainee


def write_configs(folder: Path) -> None:
    """Write the configurations that the trainees are built from."""
    for model in HELD_OUT:
        if model.config is not None:
            write_config(folder, model.model, model.config)


def held_out_settings(world_size: int, folder: Path) -> tuple[HeldOutSetting, ...]:
    """Every held-out run: all models on one rank, some under DDP on all ranks."""
    runs = []
    for model in HELD_OUT:
        for index, optimizer in enumerate(model.optimizers):
            batches = model.micro_batches if index == 0 else model.micro_batches[:1]
            runs += [_single(model, optimizer, micro_batch, folder) for micro_batch in batches]
        if model.on_two_ranks and world_size > 1:
            runs += [
                _parallel(model, model.optimizers[0], micro_batch, world_size, folder)
                for micro_batch in model.micro_batches
            ]
    return tuple(runs)


def _single(
    model: HeldOutModel, optimizer: Optimizer, micro_batch: int, folder: Path
) -> HeldOutSetting:
    setting = Setting(
        workload=model.label(optimizer),
        world_size=1,
        micro_batch=micro_batch,
        synchronisation=Synchronisation.NONE,
    )
    return HeldOutSetting(setting=setting, trainee=model.trainee(optimizer, folder))


def _parallel(
    model: HeldOutModel, optimizer: Optimizer, micro_batch: int, world_size: int, folder: Path
) -> HeldOutSetting:
    setting = Setting(
        workload=model.label(optimizer), world_size=world_size, micro_batch=micro_batch
    )
    return HeldOutSetting(setting=setting, trainee=model.trainee(optimizer, folder))
