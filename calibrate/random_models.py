"""Architectures drawn at random, the same for the same seed and index; seeds below 0 are the calibration's.

A family (the table at the end) draws a model from small blocks. The batch follows from its work, so that a
step takes between a millisecond and about a second on one core.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models as vision

from calibrate.random_blocks import (
    ACTIVATIONS,
    Block,
    Mean,
    Mixing,
    Patches,
    Recommender,
    Recurrent,
    Residual,
    SqueezeExcite,
    Style,
    Tokens,
    Translator,
    UNet,
    feed_forward,
    image_norm,
    mlp,
    width_between,
)
from perfmodel.files import write_atomically
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.workload.step import StepMethod

Draw = random.Random
Builder = Callable[[], nn.Module]
Loss = Callable[[Any, Tensor], Tensor]
Flags = Literal["default", "foreach", "fused"]

_BATCHES: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Work of the forward pass of a step [FLOP], and batches that reach it."""

    least_flop: float
    most_flop: float
    batches: tuple[int, ...]


_ON_CPU: Final = Limits(least_flop=3e6, most_flop=4e9, batches=_BATCHES)
#: The largest ones are for bags of words, which reach the least work with no smaller batch.
_LARGE_BATCHES: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_ON_GPU: Final = Limits(least_flop=1e9, most_flop=1e12, batches=(*_BATCHES, *_LARGE_BATCHES))
_MOST_PARAMETERS: Final = 6e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One sample: floats of a shape, or indices below a limit."""

    shape: tuple[int, ...]
    below: int | None = None
    is_share: bool = False
    """Whether the floats lie between 0 and 1: a loss that expects shares has no minimum with others."""

    def draw(self, samples: int) -> Tensor:
        """A batch of samples."""
        if self.below is not None:
            return torch.randint(0, self.below, (samples, *self.shape))
        return (torch.rand if self.is_share else torch.randn)(samples, *self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What a family draws: how to build a model, what it reads and what it is to answer."""

    build: Builder
    inputs: tuple[Inputs, ...]
    targets: Inputs
    loss: Loss
    published: tuple[str, str, int] | None = None
    """Package, name and pixels of a model that is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """A model with its batch and optimizer."""

    seed: int
    index: int
    family: str
    sketch: Sketch
    micro_batch: int
    optimizer: Literal["sgd", "adamw"]
    flags: Flags
    """Implementation that the user asks of the optimizer."""
    on_gpu: bool
    """Whether it was drawn for a GPU."""
    with_timm: bool
    """Whether one of timm could have been drawn."""
    precision: str

    @property
    def name(self) -> str:
        """Unique among all models that can be drawn."""
        return f"{self.seed}-{self.index} {self.family}"

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """As a user writes it."""
        asked: dict[str, Any] = {} if self.flags == "default" else {self.flags: True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **asked)
        return torch.optim.AdamW(parameters, lr=1e-4, **asked)

    def factory(self) -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]:
        """Module, example and loss, as ``perfmodel trace FILE.py:FACTORY`` takes them."""
        drawn = (*self.sketch.inputs, self.sketch.targets)
        example = tuple(entry.draw(self.micro_batch) for entry in drawn)
        return _WithTargets(self.sketch.build()), example, lambda pair: self.sketch.loss(*pair)

    def write_file(self, folder: Path) -> str:
        """Write a file with the factory; return it as ``perfmodel`` commands take models."""
        path = folder.resolve() / "models" / f"random_{self.seed}_{self.index}.py"
        how = f"on_gpu={self.on_gpu}" + ("" if self.with_timm else ", with_timm=False")
        write_atomically(
            path,
            f'"""{self.name}, micro-batch {self.micro_batch}, {self.optimizer}."""\n\n'
            "from calibrate.random_models import draw\n\n"
            f"DRAWN = draw({self.seed}, {self.index}, {how})\n\n\n"
            "def model():\n"
            "    return DRAWN.factory()\n",
        )
        return f"{path}:model"

    def traced(self, folder: Path, device_kind: str) -> TracedModel:
        """As a user traces it; ``folder`` takes its file. ``PerfModelError`` if that cannot be done."""
        method = StepMethod(
            optimizer=self.optimizer,
            optimizer_implementation=self.flags,
            precision=self.precision,
            checkpointing="none",
            device_kind=device_kind,
        )
        source = find_source(self.write_file(folder))
        return trace_model(source, method, micro_batch=self.micro_batch)


class _WithTargets(nn.Module):
    """A model that is handed its targets, too: the loop copies them as it does its inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> tuple[Any, Tensor]:
        """What the model returns, and the targets."""
        *inputs, targets = batch
        return self.model(*inputs), targets


@lru_cache(maxsize=1)
def draw(seed: int, index: int, *, on_gpu: bool = False, with_timm: bool = True) -> RandomModel:
    """The model of a seed and an index; families take turns, so that few models hold many of them.

    On a GPU a step has more work, half of them in bf16. ``with_timm``: Draw models of timm, too, where it is installed.
    """
    order = list(FAMILIES)
    Draw(f"{seed} families {index // len(order)}").shuffle(order)
    family = order[index % len(order)]
    if family == "timm" and not (with_timm and find_spec("timm")):
        family = "torchvision"
    chance = Draw(f"{seed}-{index}")
    while True:
        sketch = FAMILIES[family](chance)
        micro_batch = _affordable_batch(sketch, chance, _ON_GPU if on_gpu else _ON_CPU)
        if micro_batch is not None:
            break
    return RandomModel(
        seed=seed,
        index=index,
        family=family if sketch.published is None else " ".join(sketch.published[:2]),
        sketch=sketch,
        micro_batch=micro_batch,
        optimizer=chance.choice(("sgd", "sgd", "adamw")),
        flags=chance.choice(("default",) * 6 + ("foreach", "fused")),
        on_gpu=on_gpu,
        with_timm=with_timm,
        precision=chance.choice(("fp32", "bf16")) if on_gpu else "fp32",
    )


def _affordable_batch(sketch: Sketch, chance: Draw, limits: Limits) -> int | None:
    """A batch whose work lies between the limits; None if the model is too large or too light."""
    # Some models of torchvision compute with values while they are built.
    module = sketch.build().to("meta")
    if sum(parameter.numel() for parameter in module.parameters()) > _MOST_PARAMETERS:
        return None
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module(*(entry.draw(2) for entry in sketch.inputs))
    # Recurrent and light models are not counted by their FLOP alone.
    flop = counter.get_total_flops() / 2 + sum(math.prod(e.shape) for e in sketch.inputs) * 1e2
    least, most = limits.least_flop, limits.most_flop
    wanted = math.exp(chance.uniform(math.log(least), math.log(most)))
    fitting = [batch for batch in limits.batches if least <= batch * flop <= most]
    return min(fitting, key=lambda batch: abs(math.log(batch * flop / wanted)), default=None)


def classify(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of scores in the last dimension."""
    return functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def _chain(parts: Sequence[nn.Module]) -> nn.Module:
    return nn.Sequential(*parts)


_USUAL: Final = ("relu", "relu", "relu", "gelu", "silu", "leaky", "hardswish", "elu")


def _image_block(
    style: str, widths: tuple[int, int], *, stride: int, norm: str, act: str, chance: Draw
) -> Builder:
    """A block of a convnet from one width to another."""
    channels, out = widths
    kernel = chance.choice((3, 3, 3, 5)) if style != "dilated" else 3
    groups = {"grouped": math.gcd(math.gcd(channels, out), chance.choice((2, 4, 8, 16)))}.get(
        style, 1
    )
    dilation = chance.choice((2, 3)) if style == "dilated" else 1
    squeezes, gate = chance.random() < 0.3, chance.choice(("hard", "soft"))
    inner = channels * chance.choice((2, 4, 6)) if style == "depthwise" else max(8, out // 4)

    def step(
        a: int, b: int, k: int, *, s: int = 1, g: int = 1, acts: bool = True
    ) -> list[nn.Module]:
        spread = dilation if k > 1 else 1
        convolution = nn.Conv2d(
            a,
            b,
            k,
            stride=s,
            padding=spread * (k // 2),
            groups=g,
            dilation=spread,
            bias=norm == "none",
        )
        return [convolution, image_norm(norm, b), *([ACTIVATIONS[act]()] if acts else [])]

    def build() -> nn.Module:
        excite = [SqueezeExcite(inner if style == "depthwise" else out, gate)] if squeezes else []
        around = (
            nn.Identity()
            if (channels, stride) == (out, 1)
            else _chain(step(channels, out, 1, s=stride, acts=False))
        )
        if style == "depthwise":
            body = [
                *step(channels, inner, 1),
                *step(inner, inner, kernel, s=stride, g=inner),
                *excite,
                *step(inner, out, 1, acts=False),
            ]
            return Residual(_chain(body)) if (channels, stride) == (out, 1) else _chain(body)
        if style == "bottleneck":
            g = math.gcd(inner, 8) if squeezes else 1
            body = [
                *step(channels, inner, 1),
                *step(inner, inner, kernel, s=stride, g=g),
                *step(inner, out, 1, acts=False),
            ]
            return _chain([Residual(_chain(body), around), ACTIVATIONS[act]()])
        if style == "residual":
            body = [
                *step(channels, out, kernel, s=stride),
                *step(out, out, kernel, acts=False),
                *excite,
            ]
            return _chain([Residual(_chain(body), around), ACTIVATIONS[act]()])
        return _chain([*step(channels, out, kernel, s=stride, g=groups), *excite])

    return build


def _convnet(
    chance: Draw, *, styles: tuple[str, ...], sides: tuple[int, ...], wide: float = 1.0
) -> Sketch:
    """A convnet whose blocks are of one of the styles."""
    pixels, colours, classes = chance.choice(sides), chance.choice((1, 3)), chance.choice((10, 100))
    norm = chance.choice(("batch", "batch", "batch", "group", "layer", "none"))
    act, style = chance.choice(_USUAL), chance.choice(styles)
    channels = width = width_between(chance, 16 * wide, 64 * wide)
    pool = chance.choice((nn.MaxPool2d, nn.AvgPool2d, None, None))
    kernel, dropout = chance.choice((3, 3, 5, 7)), chance.choice((0.0, 0.0, 0.2, 0.5))
    blocks: list[Builder] = []
    side = pixels
    for stage in range(chance.randint(2, 4) if side > 8 else chance.randint(1, 2)):
        out = min(512, width_between(chance, width, 1 + width * 2**stage))
        for block in range(chance.randint(1, 3)):
            stride = 2 if stage and not block and pool is None and side > 2 else 1
            blocks.append(
                _image_block(
                    style, (channels, out), stride=stride, norm=norm, act=act, chance=chance
                )
            )
            channels, side = out, -(-side // stride)
        if pool is not None and side >= 4:
            blocks.append(partial(pool, 2))
            side //= 2

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(colours, width, kernel, padding=kernel // 2),
            *(make() for make in blocks),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(channels, classes),
        )

    return _classifier(build, Inputs(shape=(colours, pixels, pixels)), classes)


def _classifier(build: Builder, inputs: Inputs, classes: int) -> Sketch:
    return Sketch(
        build=build, inputs=(inputs,), targets=Inputs(shape=(), below=classes), loss=classify
    )


def _dense(chance: Draw) -> Sketch:
    """Segmentation by a U-Net, or an image made again by an autoencoder."""
    side, colours, classes = (
        chance.choice((16, 32, 48, 64)),
        chance.choice((1, 3)),
        chance.randint(2, 12),
    )
    base, depth = width_between(chance, 8, 40), chance.randint(2, 3)
    widths = tuple(base * 2**level for level in range(depth))
    norm, act = chance.choice(("batch", "batch", "group", "none")), chance.choice(_USUAL)
    up, skips = chance.choice(("transposed", "transposed", "nearest")), chance.random() < 0.6
    out = classes if skips else colours

    def build() -> nn.Module:
        body = UNet(colours, widths, norm=norm, act=act, up=up, skips=skips)
        return nn.Sequential(body, nn.Conv2d(base, out, 1))

    image = Inputs(shape=(colours, side, side))
    return Sketch(
        build=build,
        inputs=(image,),
        targets=Inputs(shape=(side, side), below=classes) if skips else image,
        loss=functional.cross_entropy if skips else functional.mse_loss,
    )


def _language_model(
    chance: Draw, *, feeds: tuple[str, ...] = ("plain", "plain", "gated")
) -> Sketch:
    style, layers = Style.drawn(chance, feeds=feeds), chance.randint(1, 5)
    length, vocabulary = chance.choice((16, 32, 64, 128)), chance.choice((200, 1000, 4000))
    causal = chance.random() < 0.7

    def build() -> nn.Module:
        return nn.Sequential(
            Tokens(vocabulary, length, style.width),
            *(Block(style, causal=causal) for _ in range(layers)),
            style.norm(),
            nn.Linear(style.width, vocabulary, bias=False),
        )

    tokens = Inputs(shape=(length,), below=vocabulary)
    return Sketch(build=build, inputs=(tokens,), targets=tokens, loss=classify)


def _encoder_decoder(chance: Draw) -> Sketch:
    style, layers = Style.drawn(chance), chance.randint(1, 3)
    length, vocabulary = chance.choice((12, 24, 48)), chance.choice((200, 1000, 4000))
    tokens = Inputs(shape=(length,), below=vocabulary)
    return Sketch(
        build=partial(Translator, style, layers, length, vocabulary),
        inputs=(tokens, tokens),
        targets=tokens,
        loss=classify,
    )


def _patched(chance: Draw, *, mixes: bool) -> Sketch:
    """A vision transformer, or an MLP mixer."""
    style, layers, classes = Style.drawn(chance), chance.randint(1, 6), chance.choice((10, 100))
    patch, side = chance.choice(((4, 32), (8, 32), (8, 64), (16, 96), (4, 28)))
    places, width = (side // patch) ** 2, style.width

    def block() -> nn.Module:
        if not mixes:
            return Block(style, causal=False)
        channels = [style.norm(), feed_forward(style.feed, width, style.inner, style.act)]
        return nn.Sequential(
            Residual(Mixing(width, places, 2 * places)), Residual(_chain(channels))
        )

    def build() -> nn.Module:
        return nn.Sequential(
            Patches(3, side, patch, width),
            *(block() for _ in range(layers)),
            Mean(),
            nn.Linear(width, classes),
        )

    return _classifier(build, Inputs(shape=(3, side, side)), classes)


def _recurrent(chance: Draw) -> Sketch:
    kind = chance.choice((nn.LSTM, nn.LSTM, nn.GRU, nn.GRU, nn.RNN))
    length, width, hidden = (
        chance.choice((8, 16, 32, 64)),
        width_between(chance, 16, 256),
        width_between(chance, 16, 320),
    )
    layers, both, tags = chance.randint(1, 3), chance.random() < 0.3, chance.random() < 0.4
    vocabulary, classes = chance.choice((None, 500, 2000, 8000)), chance.randint(2, 40)

    def build() -> nn.Module:
        embed = nn.Identity() if vocabulary is None else nn.Embedding(vocabulary, width)
        cell = kind(width, hidden, layers, batch_first=True, bidirectional=both)
        scores = nn.Linear(hidden * (2 if both else 1), classes)
        return Recurrent(embed, cell, scores, tags=tags)

    shape = (length, width) if vocabulary is None else (length,)
    targets = Inputs(shape=(length,) if tags else (), below=classes)
    inputs = (Inputs(shape=shape, below=vocabulary),)
    return Sketch(build=build, inputs=inputs, targets=targets, loss=classify)


def _perceptron(chance: Draw) -> Sketch:
    features, classes = width_between(chance, 16, 1024), chance.choice((2, 10, 100))
    widths = (
        features,
        *(width_between(chance, 32, 1536) for _ in range(chance.randint(1, 5))),
        classes,
    )
    act, norm = chance.choice((*_USUAL, "sigmoid", "tanh")), chance.random() < 0.4
    build = partial(mlp, widths, act, norm=norm, dropout=chance.choice((0.0, 0.2, 0.5)))
    return _classifier(build, Inputs(shape=(features,)), classes)


def _recommender(chance: Draw) -> Sketch:
    tables, width = chance.randint(2, 8), chance.choice((8, 16, 32, 64))
    fewest, features, bag = (
        50 * chance.choice((1, 4, 20, 100)),
        chance.choice((4, 13, 32)),
        chance.randint(1, 8),
    )
    rows = [fewest * chance.randint(1, 4) for _ in range(tables)]
    bottom = (features, width_between(chance, 32, 256))
    top = (
        width + (tables + 1) ** 2,
        width_between(chance, 32, 512),
        width_between(chance, 16, 256),
        1,
    )
    return Sketch(
        build=partial(Recommender, rows, width, bottom, top),
        inputs=(Inputs(shape=(features,)), Inputs(shape=(tables, bag), below=fewest)),
        targets=Inputs(shape=(), is_share=True),
        loss=functional.binary_cross_entropy_with_logits,
    )


def _bag_of_words(chance: Draw) -> Sketch:
    vocabulary, width, classes = (
        chance.choice((1000, 5000, 20_000)),
        width_between(chance, 16, 256),
        chance.randint(2, 20),
    )
    mode, inner = chance.choice(("mean", "sum")), width_between(chance, 16, 256)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.EmbeddingBag(vocabulary, width, mode=mode), nn.Linear(width, inner), nn.ReLU(),
            nn.Linear(inner, classes),
        )  # fmt: skip

    return _classifier(
        build, Inputs(shape=(chance.choice((8, 32, 128)),), below=vocabulary), classes
    )


_PIXELS: Final = (32, 64, 64, 96, 128)


def _torchvision(chance: Draw) -> Sketch:
    """Any classification model of torchvision, without auxiliary classifiers, on small images."""
    names = [
        name
        for name in sorted(vision.list_models(module=vision))
        if not name.startswith(("maxvit", "inception"))
        and vision.get_model_weights(name).DEFAULT.meta["num_params"] <= _MOST_PARAMETERS
    ]
    name, side = chance.choice(names), chance.choice(_PIXELS)
    options: dict[str, Any] = {"image_size": side} if name.startswith("vit_") else {}
    if name == "googlenet":
        options = {"aux_logits": False, "init_weights": False}
    build = partial(vision.get_model, name, weights=None, **options)
    return _published("torchvision", name, side, build)


def _timm(chance: Draw) -> Sketch:
    """Any model of timm, with a classifier, on small images that it takes; of torchvision if timm has none."""
    import timm  # noqa: PLC0415 - not a dependency

    names = timm.list_models()
    for name in chance.sample(names, len(names)):
        side = chance.choice(_PIXELS)
        made_for = timm.get_pretrained_cfg(name)
        is_told = made_for is not None and made_for.fixed_input_size
        options = {"img_size": side} if is_told else {}
        build = partial(timm.create_model, name, num_classes=1000, **options)
        # A model that does not fit this machine is never built on it.
        with suppress(Exception), torch.device("meta"):
            module = build()
            if sum(parameter.numel() for parameter in module.parameters()) <= _MOST_PARAMETERS:
                module(torch.empty(2, 3, side, side))
                return _published("timm", name, side, build)
    return _torchvision(chance)


def _published(package: str, name: str, side: int, build: Builder) -> Sketch:
    sketch = _classifier(build, Inputs(shape=(3, side, side)), 1000)
    return replace(sketch, published=(package, name, side))


_SIDES: Final = (16, 24, 28, 32, 48, 64)
FAMILIES: Final[dict[str, Callable[[Draw], Sketch]]] = {
    "plain": partial(_convnet, styles=("plain",), sides=_SIDES),
    "residual": partial(_convnet, styles=("residual", "bottleneck"), sides=_SIDES),
    "grouped": partial(_convnet, styles=("grouped",), sides=_SIDES),
    "depthwise": partial(_convnet, styles=("depthwise",), sides=_SIDES),
    "dilated": partial(_convnet, styles=("dilated",), sides=_SIDES),
    "tiny maps": partial(
        _convnet,
        styles=("plain", "residual", "bottleneck", "depthwise"),
        sides=(4, 5, 7, 8),
        wide=4,
    ),
    "dense": _dense,
    "language": _language_model,
    "experts": partial(_language_model, feeds=("experts",)),
    "encoder-decoder": _encoder_decoder,
    "vision transformer": partial(_patched, mixes=False),
    "mixer": partial(_patched, mixes=True),
    "recurrent": _recurrent,
    "perceptron": _perceptron,
    "recommender": _recommender,
    "bag of words": _bag_of_words,
    "torchvision": _torchvision,
    "timm": _timm,
}
