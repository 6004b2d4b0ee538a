"""Operators of single layers timed inside a made-up step: forward through all layers, then back.

An operator that is repeated on its own finds its data in the caches and its result in memory that it
has just given back; with the caches emptied it finds nothing. In a step it is neither: what its
predecessor made was just written, parameters and saved activations were last touched a whole pass
ago, and results lie in memory that is newly allocated. So layers of all kinds stand in a row, and each
operator is timed where it stands.
"""

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.layers import Layer, is_optimizer
from calibrate.probes import LONG_S, Session
from calibrate.probes.compute import Evictor, measure_optimizer
from calibrate.probes.replay import Passes, without_denormals
from calibrate.task import LayersTask
from perfmodel.documents.observation import IsolatedOperator, OperatorsObservation
from perfmodel.tracing.cuda import AsOnCuda
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.step import without_content
from perfmodel.units import GIB, MIB, Bytes, Seconds
from perfmodel.workload import Call, Operator, Phase, TensorSpec
from perfmodel.workload.step import Segment, StepMethod, TracedParameter, TracedStep

# Single layers of a grid: which operators they consist of.
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
        if layer.precision != "fp32":
            # As layers hand them on under autocast; what residuals are added to stays in fp32.
            stream = built.inputs[:1] if layer.kind == "residual" else ()
            others = built.inputs[len(stream) :]
            halves = (t.bfloat16() if t.is_floating_point() else t for t in others)
            built = replace(built, inputs=(*stream, *halves))
        if layer.is_channels_last:
            built = replace(built, inputs=tuple(map(_channels_side_by_side, built.inputs)))
            for parameter in built.module.parameters():
                parameter.data = _channels_side_by_side(parameter.data)
        for tensor in built.inputs:
            # The images of a data set need no gradient.
            is_first = layer.kind == "convolution" and layer.sizes[1] <= _RGB
            tensor.requires_grad_(tensor.is_floating_point() and not is_first)
        recorder = Recorder(ModulePaths(built.module))
        with recorder:
            with AsOnCuda(layer.precision) if layer.precision != "fp32" else nullcontext():
                result = built.act(*built.inputs)
            recorder.phase = Phase.BACKWARD
            # Products of equal numbers take a GPU less power, and less time.
            made = torch.ones_like if device.type == "cpu" else torch.randn_like
            result.backward(made(result))  # type: ignore[no-untyped-call]
    return RecordedLayer(
        layer=layer,
        inputs=tuple(_spec(t) for t in built.inputs if t.is_floating_point()),
        parameters=tuple(_spec(parameter) for parameter in built.module.parameters()),
        calls=tuple((recorder.operators[c.operator], c.phase) for c in recorder.calls),
    )


def _channels_side_by_side(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stride=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _module(module: nn.Module, *shape: int) -> BuiltLayer:
    return BuiltLayer(module=module, inputs=(torch.randn(shape),), act=module)


def _function(act: Callable[..., Tensor], *shapes: Sequence[int]) -> BuiltLayer:
    """What has no parameters."""
    inputs = tuple(torch.randn(tuple(shape)) for shape in shapes)
    return BuiltLayer(module=nn.Identity(), inputs=inputs, act=act)


def _square(layer: Layer) -> tuple[int, ...]:
    """Of an image: samples, channels, height, width."""
    samples, channels, side, *_ = layer.sizes
    return samples, channels, side, side


def _pixels(layer: Layer) -> tuple[int, ...]:
    """The same, channels last."""
    samples, channels, side, *_ = layer.sizes
    return samples, side, side, channels


def _convolution(layer: Layer) -> BuiltLayer:
    _, channels, _, out, kernel, stride, groups = layer.sizes
    module = nn.Conv2d(
        channels,
        out,
        kernel,
        stride=stride,
        padding=kernel // 2 if kernel % 2 else 0,
        groups=groups,
        bias=out % 16 == 0,
    )
    return _module(module, *_square(layer))


def _linear(layer: Layer) -> BuiltLayer:
    rows, inner, out = layer.sizes
    return _module(nn.Linear(inner, out, bias=out % 16 == 0), rows, inner)


def _product(layer: Layer) -> BuiltLayer:
    def act(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query @ key.transpose(-2, -1)) * layer.sizes[-1] ** -0.5
        return scores.softmax(dim=-1) @ value

    return _function(act, *(layer.sizes,) * 3)


def _attention(layer: Layer) -> BuiltLayer:
    samples, heads, length, width, causal = layer.sizes

    def act(merged: Tensor) -> Tensor:
        split = merged.view(samples, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        query, key, value = split
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=bool(causal))
        return mixed.transpose(1, 2).reshape(samples, length, heads * width)

    return _function(act, (samples, length, 3 * heads * width))


def _rotate(layer: Layer) -> BuiltLayer:
    """Rotary position embedding: slices, a negation, a concatenation, products."""
    samples, heads, length, width, _ = layer.sizes
    angles = torch.randn(length, width)

    def act(values: Tensor) -> Tensor:
        split = values.view(samples, length, heads, width).transpose(1, 2)
        first, second = split.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return split * angles.cos() + turned * angles.sin()

    return _function(act, (samples, length, heads * width))


def _rms_norm(layer: Layer) -> BuiltLayer:
    weight = nn.Parameter(torch.ones(layer.sizes[1]))

    def act(values: Tensor) -> Tensor:
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    return _function(act, layer.sizes)


def _batch_norm(layer: Layer) -> BuiltLayer:
    samples, *image = _square(layer)
    # A single value has no variance.
    return _module(nn.BatchNorm2d(image[0]), max(2, samples), *image)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Layer], BuiltLayer]:
    """On rows, or on images."""
    return lambda layer: _function(
        function, _square(layer) if len(layer.sizes) == _RGB else layer.sizes
    )


def _scale(layer: Layer) -> BuiltLayer:
    """One factor per channel and sample, as squeeze-and-excitation has it."""
    return _function(torch.mul, _square(layer), (*layer.sizes[:2], 1, 1))


def _pool(layer: Layer) -> BuiltLayer:
    kind = nn.MaxPool2d if layer.kind == "max_pool" else nn.AvgPool2d
    kernel, stride = layer.sizes[3:]
    return _module(kind(kernel, stride), *_square(layer))


def _loss(layer: Layer) -> BuiltLayer:
    targets = torch.randint(0, layer.sizes[1], (layer.sizes[0],))
    return _function(lambda scores: functional.cross_entropy(scores, targets), layer.sizes)


def _embedding(layer: Layer) -> BuiltLayer:
    rows, vocabulary, width = layer.sizes
    module = nn.Embedding(vocabulary, width)
    return BuiltLayer(module=module, inputs=(torch.randint(0, vocabulary, (rows,)),), act=module)


def _recurrent(layer: Layer) -> BuiltLayer:
    samples, length, width, hidden = layer.sizes
    module = nn.LSTM(width, hidden, batch_first=True)
    inputs = (torch.randn(samples, length, width),)
    return BuiltLayer(module=module, inputs=inputs, act=lambda values: module(values)[0])


def _cells(layer: Layer) -> BuiltLayer:
    samples, length, width, hidden, gates = layer.sizes
    module = (nn.RNN if gates == 1 else nn.GRU)(width, hidden, batch_first=True)
    inputs = (torch.randn(samples, length, width),)
    return BuiltLayer(module=module, inputs=inputs, act=lambda values: module(values)[0])


def _bags(layer: Layer) -> BuiltLayer:
    samples, each, vocabulary, width, takes_mean = layer.sizes
    module = nn.EmbeddingBag(vocabulary, width, mode="mean" if takes_mean else "sum")
    indices = torch.randint(0, vocabulary, (samples, each))
    return BuiltLayer(module=module, inputs=(indices,), act=module)


def _concatenate(layer: Layer) -> BuiltLayer:
    samples, _, *image = _square(layer)
    shapes = _square(layer), (samples, 32, *image)
    return _function(lambda one, other: torch.cat((one, other), 1), *shapes)


def _roll(layer: Layer) -> BuiltLayer:
    def act(image: Tensor) -> Tensor:
        return functional.pad(torch.roll(image, (-1, -1), (1, 2)), (0, 0, 0, 1, 0, 1))

    return _function(act, _pixels(layer))


_BUILDERS: Final[dict[str, Callable[[Layer], BuiltLayer]]] = {
    **dict.fromkeys(("convolution", "depthwise", "grouped"), _convolution),
    "linear": _linear,
    "product": _product,
    "attention": _attention,
    "rotate": _rotate,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "group_norm": lambda layer: _module(nn.GroupNorm(8, layer.sizes[1]), *_square(layer)),
    "layer_norm": lambda layer: _module(nn.LayerNorm(layer.sizes[1]), *layer.sizes),
    "channel_norm": lambda layer: _module(nn.LayerNorm(layer.sizes[1]), *_pixels(layer)),
    "relu": _elementwise(torch.relu),
    "gelu": _elementwise(functional.gelu),
    "gelu_tanh": _elementwise(lambda values: functional.gelu(values, approximate="tanh")),
    "silu": _elementwise(functional.silu),
    "hardswish": _elementwise(functional.hardswish),
    "sigmoid": _elementwise(torch.sigmoid),
    "elu": _elementwise(functional.elu),
    "softmax": _elementwise(lambda values: values.softmax(dim=-1)),
    "dropout": _elementwise(lambda values: functional.dropout(values, 0.5)),
    "global_pool": _elementwise(lambda values: functional.adaptive_avg_pool2d(values, 1)),
    "adaptive_pool": _elementwise(lambda values: functional.adaptive_avg_pool2d(values, 7)),
    "residual": lambda layer: _function(lambda a, b: (a + b) * 2, *(_square(layer),) * 2),
    "scale": _scale,
    "upsample": _elementwise(
        lambda image: functional.interpolate(image, scale_factor=2, mode="bilinear")
    ),
    "bias": lambda layer: _function(torch.add, layer.sizes, layer.sizes[1:]),
    "max_pool": _pool,
    "average_pool": _pool,
    "loss": _loss,
    "embedding": _embedding,
    "recurrent": _recurrent,
    "cells": _cells,
    "bags": _bags,
    "concatenate": _concatenate,
    # Channels last and a copy, as between convolutions and transformers.
    "permute": _elementwise(lambda image: image.permute(0, 2, 3, 1).contiguous() * 2),
    "roll": _roll,
}


_PASSES: Final = 2
#: By the second pass most memory has been handed out.
_WARM_UPS: Final = 2
#: Blocks of a network are alike: the second one finds the code of the first at hand, not its data.
_REPEATS: Final = 3
#: A layer that alone makes more than a pass should is as good as a row of them.
_REPEATS_OF_LARGE: Final = 2
#: What a pass makes at most. The C library gives what lies above 64 MiB at the end of the heap back as
#: soon as it is free, and every page of it costs a fault when it is used again.
_CHAIN_BYTES: Final = 48 * MIB
#: A GPU keeps what it has, and is held for every few calls: in rows of single layers for longer than they take.
_GPU_CHAIN_BYTES: Final = GIB
#: Read and written between layers: weights of other layers go through the second cache, and push out
#: what the interpreter and light operators have there.
_BETWEEN: Final = TensorSpec(shape=(2**20,), dtype="bool")
#: It makes the gradients that layers begin from on a GPU. Networks seldom call it: those of one kind of layer tell.
_GRADIENT_OF_GPU: Final = "aten.randn_like.default"
_DRAWN: Final = "residual"
#: Every layer has views, and all views cost the same: these layers have every kind.
_VIEWED: Final = ("rotate", "product")
_METHOD: Final = StepMethod(
    optimizer="sgd",
    optimizer_implementation="loop",
    precision="fp32",
    checkpointing="none",
    device_kind="cpu",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Layers in a row, as a step."""

    step: TracedStep
    timed: frozenset[tuple[int, Phase]]
    """Operators whose times are wanted."""
    handed: frozenset[int]
    """Operators that stand in for a layer before."""


def chained(layers: Sequence[RecordedLayer]) -> Chain:
    """The step that runs the layers forward in order and backward in the opposite one."""
    operators: list[Operator] = []
    calls: list[Call] = []
    positions: dict[Operator, int] = {}
    timed: set[tuple[int, Phase]] = set()
    handed: set[int] = set()

    def append(operator: Operator, phase: Phase) -> int:
        operators.append(operator)
        return call(len(operators) - 1, phase)

    def call(position: int, phase: Phase) -> int:
        calls.append(Call(operator=position, phase=phase, module=""))
        return position

    def run(layer: RecordedLayer, phase: Phase) -> None:
        # What the weights of a heavier layer leave of the caches.
        append(_copy(_BETWEEN), phase)
        if phase is Phase.FORWARD:
            # What the layer before would make: fresh in memory and in the caches.
            handed.update(append(_copy(spec), phase) for spec in layer.inputs)
        for operator in (each for each, at in layer.calls if at is phase):
            known = positions.get(operator)
            position = append(operator, phase) if known is None else call(known, phase)
            positions[operator] = position
            is_made = operator.name == _GRADIENT_OF_GPU and layer.layer.kind != _DRAWN
            if (not operator.view or layer.layer.kind in _VIEWED) and not is_made:
                timed.add((position, phase))

    for layer in layers:
        run(layer, Phase.FORWARD)
    for layer in reversed(layers):
        run(layer, Phase.BACKWARD)
    parameters = [spec for layer in reversed(layers) for spec in reversed(layer.parameters)]
    step = TracedStep(
        micro_batch=1,
        sample="made up",
        method=_METHOD,
        operators=tuple(operators),
        segments=(Segment(count=1, calls=tuple(calls)),),
        parameters=tuple(
            TracedParameter(name="", shape=spec.shape, dtype=spec.dtype, ready_after=0)
            for spec in parameters
        ),
        saved_bytes=0,
        buffer_bytes=0,
        frozen_bytes=0,
    )
    return Chain(step=step, timed=frozenset(timed), handed=frozenset(handed))


def _copy(spec: TensorSpec) -> Operator:
    return Operator(
        name="aten.clone.default",
        inputs=(spec,),
        outputs=(spec,),
        arguments=json.dumps([[{"tensor": 0}], {}]),
        flop=0.0,
        read_bytes=spec.size_bytes,
        written_bytes=spec.size_bytes,
    )


def measure_layers(session: Session, task: LayersTask) -> OperatorsObservation:
    """Time the operators of a task's layers, those of a chain and optimizers."""
    evictor = Evictor(session.measured)
    chain = [layer for layer in task.layers if not is_optimizer(layer)]
    optimizers = [layer for layer in task.layers if is_optimizer(layer)]
    return OperatorsObservation(
        task=task.name,
        round=task.round,
        operators=tuple(chain_operators(session, chain, evictor)),
        optimizers=tuple(measure_optimizer(session, layer, evictor) for layer in optimizers),
    )


def chain_operators(
    session: Session, layers: Sequence[Layer], evictor: Evictor
) -> list[IsolatedOperator]:
    """Time every operator of some layers inside steps that consist of them."""
    with session.measured.without():
        recorded = [recorded_layer(layer, session.device) for layer in layers]
    most_bytes = (_GPU_CHAIN_BYTES if session.asynchronous else _CHAIN_BYTES) // _REPEATS
    return [
        timed
        for group in grouped(recorded, most_bytes=most_bytes)
        for timed in _measured(session, group, evictor, repeats=_repeats(group, most_bytes))
    ]


def _repeats(group: Sequence[RecordedLayer], most_bytes: Bytes) -> int:
    return _REPEATS if sum(map(_made_bytes, group)) <= most_bytes else _REPEATS_OF_LARGE


def _made_bytes(layer: RecordedLayer) -> Bytes:
    handed = sum(spec.size_bytes for spec in layer.inputs)
    return handed + sum(operator.written_bytes for operator, _ in layer.calls)


def grouped(layers: Sequence[RecordedLayer], *, most_bytes: Bytes) -> list[list[RecordedLayer]]:
    """Layers in groups that make at most this much in a pass, or that consist of one alone."""
    groups: list[list[RecordedLayer]] = []
    total = 0
    for layer in layers:
        made = _made_bytes(layer)
        if not groups or total + made > most_bytes:
            groups.append([])
            total = 0
        groups[-1].append(layer)
        total += made
    return groups


@torch.no_grad()
def _measured(
    session: Session, layers: Sequence[RecordedLayer], evictor: Evictor, *, repeats: int
) -> list[IsolatedOperator]:
    chain = chained([layer for layer in layers for _ in range(repeats)])
    passes = Passes(session, chain.step)
    for number, source in passes.flow.sources.items():
        if source.operator in chain.handed:
            # What layers hand on is of the size of 1, and some functions take longer then than near 0.
            passes.lasting[number].normal_()

    def timed_pass() -> list[Seconds]:
        """Duration of every call. [s]"""
        # An optimizer that goes over parameters and states leaves nothing else in the caches.
        evictor.evict()
        clock = passes.new_clock()
        passes.run(clock)
        return passes.durations_s(clock)

    times: dict[tuple[int, Phase], list[Seconds]] = defaultdict(list)
    with without_denormals():
        *_, last_s = (timed_pass() for _ in range(_WARM_UPS))
        is_long = sum(last_s) > LONG_S
        for durations_s in [last_s] if is_long else [timed_pass() for _ in range(_PASSES)]:
            for call, duration_s in zip(passes.flow.calls, durations_s, strict=True):
                times[call.operator, call.phase].append(duration_s)
    calls_by_layer = [Counter(layer.calls) for layer in layers]
    return [
        IsolatedOperator(
            operator=chain.step.operators[key[0]],
            phase=key[1],
            times_s=tuple(all_s),
            # What a cell does in every step finds its data in the caches; what another layer does, does not.
            num_calls=max(calls[chain.step.operators[key[0]], key[1]] for calls in calls_by_layer),
        )
        for key, all_s in times.items()
        if key in chain.timed and key[0] not in passes.failed
    ]
