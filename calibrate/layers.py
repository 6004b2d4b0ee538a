"""Which single layers a calibration times: a grid over kinds and shapes; pure, seeded."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from perfmodel.workload.step import OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer and the sizes of its input; what the sizes mean depends on the kind."""

    kind: str
    sizes: tuple[int, ...]
    precision: str = "fp32"
    """Or that of autocast around it."""
    is_channels_last: bool = False
    """Memory format of its images and of its kernels."""


def planned_layers(
    *,
    share: float = 1.0,
    optimizer_share: float | None = None,
    seed: int | str = 0,
    device_kind: str = "cpu",
) -> tuple[Layer, ...]:
    """A draw of the grid, thinned to a share of its points but none of its kinds, in random order.

    Optimizers can be thinned otherwise, down to none. On a GPU layers have more samples, and come in fp32
    and in bf16.
    """
    draw = random.Random(seed)  # noqa: S311 - a grid, not a secret
    weights = {} if device_kind == "cpu" else _GPU_WEIGHTS
    layers = [
        Layer(kind=kind, sizes=drawn(draw))
        for kind, (count, drawn) in _GRID.items()
        if device_kind == "cpu" or kind not in _ON_CPU_ALONE
        for _ in range(max(1, round(share * weights.get(kind, 1.0) * count)))
    ]
    thinned = share if optimizer_share is None else optimizer_share
    for kind, count in _OPTIMIZERS.items():
        number = math.ceil(thinned * count)
        layers += [Layer(kind=kind, sizes=_tensors(draw, at, number)) for at in range(number)]
    if device_kind != "cpu":
        # A kernel in 16 bit tells nothing about that in 32: every layer in both.
        layers = [
            _for_gpu(each, draw, precision, at=2 * at + also)
            for at, each in enumerate(layers, start=draw.randrange(_OFFSETS))
            for also, precision in enumerate(_precisions(each))
        ]
    draw.shuffle(layers)
    return tuple(dict.fromkeys(layers))


def _precisions(layer: Layer) -> tuple[str, ...]:
    is_one = is_optimizer(layer) or layer.kind in _IN_FP32_ALONE
    return ("fp32",) if is_one else ("fp32", "bf16")


def is_optimizer(layer: Layer) -> bool:
    """Whether a point of the grid is an optimizer's step."""
    return layer.kind in _OPTIMIZERS


def _between(draw: random.Random, low: float, high: float) -> int:
    """A whole number, evenly spread on a logarithmic scale."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _width(draw: random.Random, low: float, high: float) -> int:
    """As layers have them: multiples of 8, of the wider ones half multiples of 64."""
    return _rounded(draw, _between(draw, low, high))


def _rounded(draw: random.Random, width: float) -> int:
    step = 64 if width >= 64 and draw.random() < 0.5 else 8
    return max(step, step * round(width / step))


def _image(draw: random.Random) -> tuple[int, int, int]:
    """Samples, channels and pixels along a side of an image with at most 3 million elements."""
    while True:
        samples = _between(draw, 1, 64)
        channels = _width(draw, 8, 2048)
        side = _between(draw, 1, 112)
        if 2e3 <= samples * channels * side**2 <= 3e6:
            return samples, channels, side


def _convolution(draw: random.Random) -> tuple[int, ...]:
    while True:
        samples, channels, side = _image(draw)
        if draw.random() < 0.15:  # the first layer of a network
            channels = draw.choice((1, 3))
            side = draw.choice((28, 64, 96, 128))
        out = _width(draw, 8, 2048)
        kernel = draw.choice((1, 1, 1, 3, 3, 3, 5, 7) if channels <= 3 else (1, 1, 3, 3, 3, 2))
        stride = draw.choice((1, 1, 1, 2)) if kernel != 2 else 2
        if channels <= 3:
            kernel, stride = draw.choice(((3, 1), (3, 2), (7, 2), (4, 4), (5, 1), (16, 16)))
        if side < kernel:
            continue
        flop = 2.0 * samples * channels * out * (kernel * side / stride) ** 2
        if 1e5 <= flop <= 3e9 and samples * out * (side / stride) ** 2 <= 4e6:
            return samples, channels, side, out, kernel, stride, 1


def _depthwise(draw: random.Random, *, groups: Sequence[int] = ()) -> tuple[int, ...]:
    """Channel by channel, or in groups."""
    samples, channels, side = _image(draw)
    kernel, count = draw.choice((3, 3, 5, 7)), draw.choice(groups) if groups else channels
    stride = draw.choice((1, 1, 2)) if side > 2 else 1
    return samples, channels, side, channels, kernel, stride, count


def _linear(draw: random.Random) -> tuple[int, ...]:
    while True:
        rows, inner, out = (
            _between(draw, 1, 4096),
            _width(draw, 16, 16_384),
            _width(draw, 8, 16_384),
        )
        if 1e5 <= 2.0 * rows * inner * out <= 3e9 and inner * out <= 8e7:
            return rows, inner, out


def _product(draw: random.Random) -> tuple[int, ...]:
    """Explicit attention: batch, queries, keys, width of a head."""
    while True:
        batch, length, width = (
            _between(draw, 1, 512),
            _between(draw, 8, 256),
            draw.choice((16, 32, 64)),
        )
        if 1e5 <= 2.0 * batch * length**2 * width <= 1e9 and batch * length**2 <= 4e6:
            return batch, length, width


def _attention(draw: random.Random) -> tuple[int, ...]:
    while True:
        samples, heads, length, width = (
            _between(draw, 1, 16),
            draw.choice((2, 3, 4, 6, 8, 12)),
            _between(draw, 8, 256),
            draw.choice((16, 32, 64, 64)),
        )
        if 1e5 <= 4.0 * samples * heads * length**2 * width <= 1e9:
            causal = draw.choice((0, 1))
            return samples, heads, length, width, causal


def _on_rows(draw: random.Random) -> tuple[int, ...]:
    while True:
        rows, width = _between(draw, 1, 8192), _width(draw, 16, 4096)
        if 1e3 <= rows * width <= 3e6:
            return rows, width


def _pool(draw: random.Random) -> tuple[int, ...]:
    while True:
        samples, channels, side = _image(draw)
        if side >= 4:
            kernel, stride = draw.choice(((2, 2), (3, 2)))
            return samples, channels, side, kernel, stride


def _recurrent(draw: random.Random) -> tuple[int, ...]:
    """Samples, steps, width of the input and of the state."""
    while True:
        samples, length = _between(draw, 1, 256), _between(draw, 8, 64)
        width, hidden = _width(draw, 16, 256), _width(draw, 16, 320)
        if 1e5 <= 8.0 * samples * length * hidden * (width + hidden) <= 3e9:
            return samples, length, width, hidden


def _cells(draw: random.Random) -> tuple[int, ...]:
    """Cells that run step by step; gates: those of a GRU, or the one of a plain network."""
    while True:
        samples, length = _between(draw, 1, 256), _between(draw, 8, 32)
        width, hidden = _width(draw, 16, 256), _width(draw, 16, 320)
        gates = draw.choice((3, 3, 1))
        if 2.0 * gates * samples * length * hidden * (width + hidden) <= 1e9:
            return samples, length, width, hidden, gates


def _bags(draw: random.Random) -> tuple[int, ...]:
    """Bags, rows of each, rows and width of the table, and whether their mean is taken."""
    while True:
        samples, each = _between(draw, 2, 512), _between(draw, 1, 128)
        vocabulary, width = _between(draw, 50, 20_000), _width(draw, 8, 256)
        if samples * each * width <= 1e7 and vocabulary * width <= 5e6:
            return samples, each, vocabulary, width, draw.choice((0, 1))


def _embedding(draw: random.Random) -> tuple[int, ...]:
    return _between(draw, 16, 4096), _between(draw, 500, 20_000), _width(draw, 64, 768)


def _tensors(draw: random.Random, at: int, number: int) -> tuple[int, ...]:
    """An optimizer's tensors: how many, and elements of each; one of a number of draws from biases to tables.

    Most tensors of a model are small: what the first of them takes no large one tells.
    """
    low, high = map(math.log, _TENSOR_ELEMENTS)
    size = round(math.exp(low + (at + draw.random()) / number * (high - low)))
    return _between(draw, 1, min(200, _MODEL_ELEMENTS // size)), size


#: Of one tensor, and of all together.
_TENSOR_ELEMENTS: Final = 16, 3e7
_MODEL_ELEMENTS: Final = 6 * 10**7
_OPTIMIZERS: Final = {
    f"{name} {implementation}": 10 if implementation == "fused" else 16
    for name, row in OPTIMIZERS.items()
    for implementation in row.implementations
}
#: By kind, how many layers a full grid has, more where shapes have more dimensions, and how their sizes are drawn.
_GRID: Final[dict[str, tuple[int, Callable[[random.Random], tuple[int, ...]]]]] = {
    "convolution": (178, _convolution),
    "depthwise": (48, _depthwise),
    "grouped": (24, partial(_depthwise, groups=(2, 4, 8))),
    "linear": (72, _linear),
    "product": (36, _product),
    "attention": (30, _attention),
    "batch_norm": (24, _image),
    "layer_norm": (20, _on_rows),
    "channel_norm": (8, _image),
    "relu": (12, _image),
    "gelu": (16, _on_rows),
    "gelu_tanh": (8, _on_rows),
    "silu": (8, _on_rows),
    "hardswish": (8, _image),
    "sigmoid": (6, _image),
    "elu": (8, _image),
    "residual": (16, _image),
    "scale": (16, _image),
    "max_pool": (12, _pool),
    "average_pool": (10, _pool),
    "global_pool": (10, _image),
    "adaptive_pool": (8, _image),
    "softmax": (16, _on_rows),
    "loss": (10, _on_rows),
    "embedding": (10, _embedding),
    "concatenate": (14, _image),
    "permute": (24, _image),
    "roll": (10, _image),
    "dropout": (8, _on_rows),
    "rms_norm": (12, _on_rows),
    "rotate": (10, _attention),
    "bias": (8, _on_rows),
    "group_norm": (8, _image),
    "recurrent": (24, _recurrent),
    "upsample": (8, _image),
    "cells": (16, _cells),
    "bags": (24, _bags),
}


#: Cells that are one kernel on a GPU, and what its drawn models tell.
_ON_CPU_ALONE: Final = ("cells", "bags")
#: A drawn model times recurrences in 16 bit.
_IN_FP32_ALONE: Final = ("recurrent",)
#: Elements of the largest tensor of a layer on a GPU: smaller ones are shorter than their launch, larger ones no
#: longer per element ...
_GPU_ELEMENTS: Final = 1e6, 3e8
#: ... and work of its products. [FLOP]
_GPU_FLOP: Final = 1e9, 1e12
#: Kinds with more than two sizes that are no images.
_OF_SEQUENCES: Final = frozenset(
    {"linear", "product", "attention", "rotate", "embedding", "recurrent"}
)
#: Layers as networks have them: samples, pixels along a side, and channels times that side, which varies less than
#: either. Every other layer of images is one; the others have more samples of fewer channels.
_BODY_SAMPLES: Final = 16, 256
_BODY_SIDES: Final = 7, 112
_BODY_CHANNELS: Final = 1800, 20_000
_MOST_CHANNELS: Final = 2048
_GPU_SAMPLES: Final = 8, 65_536
_GPU_SIDES: Final = 4, 112
#: Channels, samples and pixels along a side of convolutions that draws of all sizes hold too few of: those that do most
#: of the work, and narrow ones of many samples, whose gradients are slow.
_WIDE: Final = (96, 512), (32, 512), (14, 56)
_NARROW: Final = (8, 32), (1024, 65_536), (4, 56)
#: Of six convolutions in a row; None is a layer in the body of a network.
_DENSE: Final = _NARROW, None, _WIDE, None, _WIDE, _NARROW
#: Kernels and strides of convolutions, dense and by channel, as often as networks spend time on them.
_BODY_KERNELS: Final = {"convolution": (1, 1, 3, 3), "depthwise": (3, 3, 3, 5, 7), "grouped": (3,)}
_BODY_STRIDES: Final = 1, 1, 1, 2
#: Channels of one of several groups.
_BODY_GROUPS: Final = 4, 64
#: Widths of products in networks.
_BODY_WIDTHS: Final = 64, 4096
#: Functions that convolutional networks apply to images, transformers to rows.
_FUNCTIONS: Final = frozenset({"gelu", "gelu_tanh", "silu"})
#: Share of layers that stay small: they tell what the shortest kernels take.
_AS_DRAWN: Final = 0.15
#: Kinds whose kernels differ between memory formats, and which of five in a row have their channels side by side:
#: chance would leave formats out.
_OF_IMAGES: Final = frozenset(
    {
        *("convolution", "depthwise", "grouped", "batch_norm"),
        *("max_pool", "average_pool", "global_pool", "adaptive_pool"),
    }
)
_CHANNELS_LAST: Final = 1, 3
_ROUND: Final = 5
#: Layers of networks fill the ranges of samples, sides and channels evenly, however few they are, from one of several
#: offsets: an additive recurrence in three dimensions (Roberts 2018).
_STEPS: Final = 0.8192, 0.6711, 0.5497
_OFFSETS: Final = 1000
#: Share of products of odd width, as vocabularies have it: matrix units want multiples of 8.
_UNALIGNED: Final = 0.2
#: How many times as many classes a loss has: vocabularies.
_GPU_CLASSES: Final = 1, 4, 16
#: How many layers more or less than on a CPU: which of its kernels are one there, and whose time rests on more sizes.
_GPU_WEIGHTS: Final = {
    **dict.fromkeys(("depthwise", "grouped"), 2.1),
    **dict.fromkeys(("layer_norm", "gelu", "loss"), 2.0),
    **dict.fromkeys(("attention", "convolution"), 1.3),
    "linear": 1.5,
    "batch_norm": 4.0,
}
#: Widths of heads.
_GPU_HEADS: Final = 32, 64, 64, 128
#: How many times as long the sequences are.
_GPU_LENGTHS: Final = 1, 4, 8, 16


def _dense(draw: random.Random, widths: tuple[int, int], sides: tuple[int, int]) -> tuple[int, ...]:
    """Sizes of a dense convolution, by its fewest and most channels and pixels along a side."""
    channels, out = (_width(draw, *widths) for _ in range(2))
    return 1, channels, _between(draw, *sides), out, 3, 1, 1


def _spread(at: int, axis: int, low: float, high: float) -> float:
    """A point of a range on a logarithmic scale; those of all ``at`` fill it evenly."""
    return low * math.exp(at * _STEPS[axis] % 1 * math.log(high / low))


def _body(
    draw: random.Random, kind: str, sizes: tuple[int, ...], at: int
) -> tuple[tuple[int, ...], float]:
    """Sizes of a layer in the body of a network, and its samples."""
    samples, side = _spread(at, 0, *_BODY_SAMPLES), round(_spread(at, 1, *_BODY_SIDES))
    low, high = (min(_MOST_CHANNELS, each / side) for each in _BODY_CHANNELS)
    channels = out = _rounded(draw, _spread(at, 2, low, high))
    if kind not in _BODY_KERNELS:
        return (1, channels, side, *sizes[3:]), samples
    kernel, stride = draw.choice(_BODY_KERNELS[kind]), draw.choice(_BODY_STRIDES)
    groups = channels if kind == "depthwise" else 1
    if kind == "convolution":
        out = _width(draw, max(16, channels / 4), min(_MOST_CHANNELS, 4 * channels))
    elif kind == "grouped":
        groups = max(2, channels // _width(draw, *_BODY_GROUPS))
        channels = out = groups * max(1, channels // groups)
    return (1, channels, side, out, kernel, stride, groups), samples


def _of_images(
    draw: random.Random, kind: str, sizes: tuple[int, ...], at: int
) -> tuple[tuple[int, ...], float]:
    """Sizes of a layer of images, and its samples; ``at``: which layer of the grid."""
    row = at // 2
    if kind == "convolution" and (dense := _DENSE[row % len(_DENSE)]):
        widths, samples, sides = dense
        return _dense(draw, widths, sides), _between(draw, *samples)
    if row % 4 or kind in _BODY_KERNELS:
        return _body(draw, kind, sizes, at)
    side = max(sizes[2], _between(draw, *_GPU_SIDES))
    return (*sizes[:2], side, *sizes[3:]), _between(draw, *_GPU_SAMPLES)


def _of_sequences(
    draw: random.Random, kind: str, sizes: tuple[int, ...], row: int
) -> tuple[int, ...]:
    """Sizes of a layer of rows or sequences; ``row``: as above."""
    match kind:
        case "linear":
            inner, out = (_width(draw, *_BODY_WIDTHS) for _ in range(2)) if row % 4 else sizes[1:]
            return sizes[0], inner, out - (draw.random() < _UNALIGNED)
        case "product":
            length = sizes[1] * draw.choice(_GPU_LENGTHS[:2])
            length = 8 * math.ceil(length / 8) if draw.random() >= _UNALIGNED else length
            return sizes[0], length, draw.choice(_GPU_HEADS)
        case "loss":
            return sizes[0], sizes[1] * draw.choice(_GPU_CLASSES)
        case "attention":
            length, width = sizes[2] * draw.choice(_GPU_LENGTHS), draw.choice(_GPU_HEADS)
            return *sizes[:2], length, width, sizes[4]
    return sizes


def _for_gpu(layer: Layer, draw: random.Random, precision: str, *, at: int) -> Layer:
    """The layer with as many rows or indices, or samples and pixels, as keep a GPU busy; ``at``: which in a row."""
    if is_optimizer(layer):
        return layer
    kind, row = layer.kind, at // 2
    is_last = kind in _OF_IMAGES and at % _ROUND in _CHANNELS_LAST
    layer = replace(layer, precision=precision, is_channels_last=is_last)
    if draw.random() < _AS_DRAWN and not (kind == "convolution" and _DENSE[row % len(_DENSE)]):
        return layer
    low, high = _GPU_ELEMENTS
    is_image = len(layer.sizes) > 2 and kind not in _OF_SEQUENCES
    if is_image or (kind in _FUNCTIONS and row % 2):
        sizes, number = _of_images(draw, kind, layer.sizes, at)
        elements, flop = _per_sample(kind, sizes[1:])
    else:
        sizes = _of_sequences(draw, kind, layer.sizes, row)
        elements, flop = _per_sample(kind, sizes[1:])
        number = max(_between(draw, low, high) / elements, _GPU_FLOP[0] / flop if flop else 0.0)
    number = min(number, high / elements, _GPU_FLOP[1] / flop if flop else math.inf)
    return replace(layer, sizes=(max(1, round(number)), *sizes[1:]))


def _per_sample(kind: str, sizes: Sequence[int]) -> tuple[float, float]:
    """Elements of the largest tensor and FLOP of the forward pass, per sample, row or index."""
    flop = 0.0
    match kind, sizes:
        case "linear", (inner, out):
            elements, flop = max(inner, out), 2.0 * inner * out
        case "product", (length, width):
            elements, flop = length * max(length, width), 4.0 * length**2 * width
        case (("attention" | "rotate"), (heads, length, width, _)):
            elements = heads * length * max(length, width)
            flop = 4.0 * heads * length**2 * width if kind == "attention" else 0.0
        case _, (channels, side, out, kernel, stride, groups):
            elements = max(channels, out) * side**2
            flop = 2.0 * channels * out / groups * (kernel * side / stride) ** 2
        case "recurrent", (length, width, hidden):
            elements, flop = length * max(width, hidden), 8.0 * length * hidden * (width + hidden)
        case "embedding", (_, width):
            elements = width
        case "upsample", (channels, side):
            elements = 4 * channels * side**2
        case _, (channels, side, *_):
            elements = channels * side**2
        case _:
            elements = sizes[0]
    return elements, flop
