"""Single layers of a grid: which operators they consist of."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.layers import Layer
from perfmodel.tracing.cuda_casts import AsOnCuda
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.step import without_content
from perfmodel.workload.operator import Operator, Phase, TensorSpec

_RGB: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltLayer:
    """A layer with an input for it."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    act: Callable[..., Tensor]
    """From the inputs to a result that gradients start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayer:
    """What a layer runs in a step."""

    layer: Layer
    inputs: tuple[TensorSpec, ...]
    """What its predecessor hands to it, without indices."""
    parameters: tuple[TensorSpec, ...]
    calls: tuple[tuple[Operator, Phase], ...]
    """In order; the backward pass begins with making the gradient of the result."""


@functools.lru_cache(maxsize=256)
def recorded_layer(layer: Layer, device: torch.device) -> RecordedLayer:
    """Trace a layer's forward and backward pass; nothing is computed."""
    with without_content(device.type):
        built = _BUILDERS[layer.kind](layer)
        for tensor in built.inputs:
            # The images of a data set need no gradient.
            is_first = layer.kind == "convolution" and layer.sizes[1] <= _RGB
            tensor.requires_grad_(tensor.is_floating_point() and not is_first)
        recorder = Recorder(ModulePaths(built.module))
        with recorder:
            with AsOnCuda(layer.precision) if layer.precision != "fp32" else nullcontext():
                result = built.act(*built.inputs)
            recorder.phase = Phase.BACKWARD
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
    return RecordedLayer(
        layer=layer,
        inputs=tuple(_spec(t) for t in built.inputs if t.is_floating_point()),
        parameters=tuple(_spec(parameter) for parameter in built.module.parameters()),
        calls=tuple((recorder.operators[c.operator], c.phase) for c in recorder.calls),
    )


def layer_operators(layer: Layer, device: torch.device) -> list[tuple[Operator, Phase]]:
    """Every operator that a layer runs, once."""
    return list(dict.fromkeys(recorded_layer(layer, device).calls))


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _convolution(layer: Layer) -> BuiltLayer:
    samples, channels, side, out, kernel, stride, groups = layer.sizes
    module = nn.Conv2d(
        channels,
        out,
        kernel,
        stride=stride,
        padding=kernel // 2 if kernel % 2 else 0,
        groups=groups,
        bias=out % 16 == 0,
    )
    return BuiltLayer(
        module=module, inputs=(torch.randn(samples, channels, side, side),), act=module
    )


def _channels_last(layer: Layer) -> BuiltLayer:
    """Between layers that work on every pixel by itself."""
    built = _convolution(layer)
    samples, channels, side, *_ = layer.sizes
    return BuiltLayer(
        module=built.module,
        inputs=(torch.randn(samples, side, side, channels),),
        act=lambda pixels: built.module(pixels.permute(0, 3, 1, 2)),
    )


def _linear(layer: Layer) -> BuiltLayer:
    rows, inner, out = layer.sizes
    module = nn.Linear(inner, out, bias=out % 16 == 0)
    return BuiltLayer(module=module, inputs=(torch.randn(rows, inner),), act=module)


def _product(layer: Layer) -> BuiltLayer:
    batch, length, width = layer.sizes

    def act(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query @ key.transpose(-2, -1)) * width**-0.5
        mixed: Tensor = scores.softmax(dim=-1) @ value
        return mixed

    inputs = tuple(torch.randn(batch, length, width) for _ in range(3))
    return BuiltLayer(module=nn.Identity(), inputs=inputs, act=act)


def _attention(layer: Layer) -> BuiltLayer:
    samples, heads, length, width, causal = layer.sizes

    def act(merged: Tensor) -> Tensor:
        split = merged.view(samples, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        query, key, value = split
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=bool(causal))
        return mixed.transpose(1, 2).reshape(samples, length, heads * width)

    return BuiltLayer(
        module=nn.Identity(),
        inputs=(torch.randn(samples, length, 3 * heads * width),),
        act=act,
    )


def _rotate(layer: Layer) -> BuiltLayer:
    """Rotary position embedding: slices, a negation, a concatenation, products."""
    samples, heads, length, width, _ = layer.sizes
    angles = torch.randn(length, width)

    def act(values: Tensor) -> Tensor:
        split = values.view(samples, length, heads, width).transpose(1, 2)
        first, second = split.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return split * angles.cos() + turned * angles.sin()

    return BuiltLayer(
        module=nn.Identity(), inputs=(torch.randn(samples, length, heads * width),), act=act
    )


def _rms_norm(layer: Layer) -> BuiltLayer:
    rows, width = layer.sizes
    weight = nn.Parameter(torch.ones(width))

    def act(values: Tensor) -> Tensor:
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    return BuiltLayer(module=nn.Identity(), inputs=(torch.randn(rows, width),), act=act)


def _norm(layer: Layer) -> BuiltLayer:
    if layer.kind == "batch_norm":
        samples, channels, side = layer.sizes
        module: nn.Module = nn.BatchNorm2d(channels)
        # A single value has no variance.
        shape: tuple[int, ...] = (max(2, samples), channels, side, side)
    elif layer.kind == "channel_norm":
        samples, channels, side = layer.sizes
        module, shape = nn.LayerNorm(channels), (samples, side, side, channels)
    else:
        rows, width = layer.sizes
        module, shape = nn.LayerNorm(width), (rows, width)
    return BuiltLayer(module=module, inputs=(torch.randn(shape),), act=module)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Layer], BuiltLayer]:
    def build(layer: Layer) -> BuiltLayer:
        *shape, last = layer.sizes
        sizes = (*shape, last, last) if len(layer.sizes) == _RGB else layer.sizes
        return BuiltLayer(module=nn.Identity(), inputs=(torch.randn(sizes),), act=function)

    return build


def _residual(layer: Layer) -> BuiltLayer:
    samples, channels, side = layer.sizes
    inputs = tuple(torch.randn(samples, channels, side, side) for _ in range(2))
    return BuiltLayer(module=nn.Identity(), inputs=inputs, act=lambda one, other: (one + other) * 2)


def _scale(layer: Layer) -> BuiltLayer:
    """One factor per channel and sample, as squeeze-and-excitation has it."""
    samples, channels, side = layer.sizes
    inputs = (torch.randn(samples, channels, side, side), torch.randn(samples, channels, 1, 1))
    return BuiltLayer(module=nn.Identity(), inputs=inputs, act=lambda image, factor: image * factor)


def _bias(layer: Layer) -> BuiltLayer:
    rows, width = layer.sizes
    inputs = (torch.randn(rows, width), torch.randn(width))
    return BuiltLayer(module=nn.Identity(), inputs=inputs, act=lambda one, other: one + other)


def _pool(layer: Layer) -> BuiltLayer:
    samples, channels, side, kernel, stride = layer.sizes
    module = (nn.MaxPool2d if layer.kind == "max_pool" else nn.AvgPool2d)(kernel, stride)
    return BuiltLayer(
        module=module, inputs=(torch.randn(samples, channels, side, side),), act=module
    )


def _loss(layer: Layer) -> BuiltLayer:
    rows, width = layer.sizes
    targets = torch.randint(0, width, (rows,))
    return BuiltLayer(
        module=nn.Identity(),
        inputs=(torch.randn(rows, width),),
        act=lambda scores: functional.cross_entropy(scores, targets),
    )


def _embedding(layer: Layer) -> BuiltLayer:
    rows, vocabulary, width = layer.sizes
    module = nn.Embedding(vocabulary, width)
    return BuiltLayer(module=module, inputs=(torch.randint(0, vocabulary, (rows,)),), act=module)


def _concatenate(layer: Layer) -> BuiltLayer:
    samples, channels, side = layer.sizes
    inputs = (
        torch.randn(samples, channels, side, side),
        torch.randn(samples, 32, side, side),
    )
    return BuiltLayer(
        module=nn.Identity(), inputs=inputs, act=lambda one, other: torch.cat((one, other), 1)
    )


def _permute(layer: Layer) -> BuiltLayer:
    """Channels last and a copy, as between convolutions and transformers."""
    samples, channels, side = layer.sizes
    return BuiltLayer(
        module=nn.Identity(),
        inputs=(torch.randn(samples, channels, side, side),),
        act=lambda image: image.permute(0, 2, 3, 1).contiguous() * 2,
    )


def _roll(layer: Layer) -> BuiltLayer:
    samples, channels, side = layer.sizes
    return BuiltLayer(
        module=nn.Identity(),
        inputs=(torch.randn(samples, side, side, channels),),
        act=lambda image: functional.pad(torch.roll(image, (-1, -1), (1, 2)), (0, 0, 0, 1, 0, 1)),
    )


_BUILDERS: Final[dict[str, Callable[[Layer], BuiltLayer]]] = {
    "convolution": _convolution,
    "depthwise": _convolution,
    "depthwise_last": _channels_last,
    "grouped": _convolution,
    "projection": _convolution,
    "linear": _linear,
    "large_linear": _linear,
    "product": _product,
    "attention": _attention,
    "rotate": _rotate,
    "rms_norm": _rms_norm,
    "batch_norm": _norm,
    "layer_norm": _norm,
    "channel_norm": _norm,
    "relu": _elementwise(torch.relu),
    "gelu": _elementwise(functional.gelu),
    "gelu_tanh": _elementwise(lambda values: functional.gelu(values, approximate="tanh")),
    "silu": _elementwise(functional.silu),
    "hardswish": _elementwise(functional.hardswish),
    "sigmoid": _elementwise(torch.sigmoid),
    "softmax": _elementwise(lambda values: values.softmax(dim=-1)),
    "dropout": _elementwise(lambda values: functional.dropout(values, 0.5)),
    "global_pool": _elementwise(lambda values: functional.adaptive_avg_pool2d(values, 1)),
    "adaptive_pool": _elementwise(lambda values: functional.adaptive_avg_pool2d(values, 7)),
    "residual": _residual,
    "scale": _scale,
    "bias": _bias,
    "max_pool": _pool,
    "average_pool": _pool,
    "loss": _loss,
    "embedding": _embedding,
    "concatenate": _concatenate,
    "permute": _permute,
    "roll": _roll,
}
