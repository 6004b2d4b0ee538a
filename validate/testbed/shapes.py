"""Emulated models: gradients of the sizes of real networks, compute spread over their layers."""

from collections.abc import Callable, Sequence
from typing import Final

from perfmodel.documents.testbed import EmulatedLayer, EmulatedModel
from perfmodel.units import Seconds
from perfmodel.workload.workload import Parameter, Workload

#: Backward computes two gradients where forward computes one result.
_FORWARD_SHARE: Final = 1 / 3

#: A layer: elements of its parameters, and its weight in the compute of the model.
Shape = tuple[int, float]


def _convolution(channels_in: int, channels_out: int, pixels: int, kernel: int = 3) -> Shape:
    elements = channels_in * channels_out * kernel * kernel + channels_out
    return elements, float(elements * pixels)


def _linear(features_in: int, features_out: int, rows: int = 1) -> Shape:
    elements = features_in * features_out + features_out
    return elements, float(elements * rows)


def _lenet() -> list[Shape]:
    return [
        _convolution(1, 6, 784, 5),
        _convolution(6, 16, 100, 5),
        _linear(400, 120),
        _linear(120, 84),
        _linear(84, 10),
    ]


def _resnet20() -> list[Shape]:
    first = [_convolution(3, 16, 1024), *[_convolution(16, 16, 1024)] * 6]
    second = [_convolution(16, 32, 256), *[_convolution(32, 32, 256)] * 5]
    third = [_convolution(32, 64, 64), *[_convolution(64, 64, 64)] * 5]
    return [*first, *second, *third, _linear(64, 10)]


def _squeezenet() -> list[Shape]:
    layers = [_convolution(3, 64, 12544)]
    for squeezed, expanded, pixels in ((16, 64, 3025), (32, 128, 729), (48, 192, 169)):
        for channels_in in (expanded, 2 * expanded):
            layers += [
                _convolution(channels_in, squeezed, pixels, 1),
                _convolution(squeezed, expanded, pixels, 1),
                _convolution(squeezed, expanded, pixels),
            ]
    return [*layers, _convolution(512, 1000, 169, 1)]


def _perceptron() -> list[Shape]:
    return [_linear(784, 1024), _linear(1024, 1024), _linear(1024, 512), _linear(512, 10)]


def _transformer(width: int = 192, depth: int = 4) -> list[Shape]:
    block = [
        _linear(width, 3 * width, 64),
        _linear(width, width, 64),
        _linear(width, 4 * width, 64),
        _linear(4 * width, width, 64),
    ]
    return [(1000 * width, 0.05 * width * width * 64), *block * depth]


def _vgg_like() -> list[Shape]:
    """Most gradients belong to the layers whose backward comes first."""
    return [
        _convolution(3, 32, 4096),
        _convolution(32, 64, 1024),
        _convolution(64, 128, 256),
        _convolution(128, 128, 64),
        _linear(2048, 900),
        _linear(900, 100),
    ]


def _head_light() -> list[Shape]:
    """Most gradients belong to the layer whose backward comes last: nothing hides them."""
    return [(1_200_000, 1e5), *[(50_000, 1e5)] * 8]


_SHAPES: Final[dict[str, Callable[[], Sequence[Shape]]]] = {
    "lenet": _lenet,
    "resnet20": _resnet20,
    "squeezenet": _squeezenet,
    "perceptron": _perceptron,
    "transformer": _transformer,
    "vgg-like": _vgg_like,
    "embedding": _head_light,
}

#: No layer is shorter: a sleeping host cannot keep a device busy with less.
_SHORTEST_PASS_S: Final = 2e-4


def gradient_bytes(name: str) -> int:
    """Bytes of all gradients of a shape."""
    return 4 * sum(elements for elements, _ in _SHAPES[name]())


def emulated(name: str, *, compute_s: Seconds, optimizer_s: Seconds = 0.0) -> EmulatedModel:
    """Build a model whose forward and backward passes together take a time.

    Parameters
    ----------
    compute_s
        Of one micro-step; a little more where layers would be too short to emulate. [s]
    """
    shapes = _SHAPES[name]()
    total = sum(weight for _, weight in shapes)
    layers = []
    for elements, weight in shapes:
        layer_s = compute_s * weight / total
        layers.append(
            EmulatedLayer(
                num_elements=elements,
                forward_s=max(_SHORTEST_PASS_S, layer_s * _FORWARD_SHARE),
                backward_s=max(_SHORTEST_PASS_S, layer_s * (1 - _FORWARD_SHARE)),
            )
        )
    return EmulatedModel(name=name, layers=tuple(layers), optimizer_s=optimizer_s)


def as_workload(model: EmulatedModel) -> Workload:
    """Describe the model as the product sees any: parameters in gradient-ready order."""
    total_s = sum(layer.backward_s for layer in model.layers)
    done_s = 0.0
    parameters = []
    for number, layer in reversed(list(enumerate(model.layers))):
        done_s += layer.backward_s
        parameters.append(
            Parameter(
                name=f"layer {number}",
                num_elements=layer.num_elements,
                # Sums of fractions may miss 1 by a rounding.
                ready_fraction=1.0 if number == 0 else min(1.0, done_s / total_s),
            )
        )
    return Workload(
        name=model.name,
        sample="one emulated sample",
        parameters=tuple(parameters),
        forward_flop=0.0,
        backward_flop=0.0,
        num_operators=len(model.layers),
    )
