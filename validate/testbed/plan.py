"""What the testbed runs: emulated models on shaped links; one and two ranks calibrate, 4 to 16 judge."""

from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np

from perfmodel.units import MBIT, MIB, Seconds
from perfmodel.workload import Parameter, Workload
from validate.judging import shuffled
from validate.testbed.records import (
    CollectiveSetting,
    EmulatedLayer,
    EmulatedModel,
    Fabric,
    TrainingSetting,
)

#: Backward computes two gradients where forward computes one result.
_FORWARD_SHARE: Final = 1 / 3
#: No layer is shorter: a sleeping host cannot keep a device busy with less.
_SHORTEST_PASS_S: Final = 2e-4
#: Faster than the machine can feed: shaped in name only.
UNSHAPED_MBIT: Final = 10_000.0
#: Family of the runs that tell what steps cost the machine.
RUSH: Final = "rush"

Shape: TypeAlias = tuple[int, float]
"""A layer: elements of its parameters, and its weight in the compute of the model."""


def _convolution(channels_in: int, channels_out: int, pixels: int, kernel: int = 3) -> Shape:
    elements = channels_in * channels_out * kernel * kernel + channels_out
    return elements, float(elements * pixels)


def _linear(features_in: int, features_out: int, rows: int = 1) -> Shape:
    elements = features_in * features_out + features_out
    return elements, float(elements * rows)


def _fire(channels_in: int, squeezed: int, expanded: int, pixels: int) -> list[Shape]:
    return [
        _convolution(channels_in, squeezed, pixels, 1),
        _convolution(squeezed, expanded, pixels, 1),
        _convolution(squeezed, expanded, pixels),
    ]


_SHAPES: Final[dict[str, list[Shape]]] = {
    "lenet": [
        _convolution(1, 6, 784, 5),
        _convolution(6, 16, 100, 5),
        _linear(400, 120),
        _linear(120, 84),
        _linear(84, 10),
    ],
    "resnet20": [
        *[_convolution(3, 16, 1024), *[_convolution(16, 16, 1024)] * 6],
        *[_convolution(16, 32, 256), *[_convolution(32, 32, 256)] * 5],
        *[_convolution(32, 64, 64), *[_convolution(64, 64, 64)] * 5],
        _linear(64, 10),
    ],
    "squeezenet": [
        _convolution(3, 64, 12544),
        *[
            layer
            for squeezed, expanded, pixels in ((16, 64, 3025), (32, 128, 729), (48, 192, 169))
            for channels_in in (expanded, 2 * expanded)
            for layer in _fire(channels_in, squeezed, expanded, pixels)
        ],
        _convolution(512, 1000, 169, 1),
    ],
    "perceptron": [_linear(784, 1024), _linear(1024, 1024), _linear(1024, 512), _linear(512, 10)],
    "transformer": [
        (1000 * 192, 0.05 * 192 * 192 * 64),
        *[
            _linear(192, 3 * 192, 64),
            _linear(192, 192, 64),
            _linear(192, 4 * 192, 64),
            _linear(4 * 192, 192, 64),
        ]
        * 4,
    ],
    # Most gradients belong to the layers whose backward comes first.
    "vgg-like": [
        _convolution(3, 32, 4096),
        _convolution(32, 64, 1024),
        _convolution(64, 128, 256),
        _convolution(128, 128, 64),
        _linear(2048, 900),
        _linear(900, 100),
    ],
    # Most gradients belong to the layer whose backward comes last: nothing hides them.
    "embedding": [(1_200_000, 1e5), *[(50_000, 1e5)] * 8],
}


def gradient_bytes(name: str) -> int:
    """Bytes of all gradients of a shape."""
    return 4 * sum(elements for elements, _ in _SHAPES[name])


def emulated(name: str, *, compute_s: Seconds, optimizer_s: Seconds = 0.0) -> EmulatedModel:
    """A model whose forward and backward passes together take ``compute_s`` per micro-step.

    A little more where layers would be too short to emulate.
    """
    total = sum(weight for _, weight in _SHAPES[name])
    layers = tuple(
        EmulatedLayer(
            num_elements=elements,
            forward_s=max(_SHORTEST_PASS_S, compute_s * weight / total * _FORWARD_SHARE),
            backward_s=max(_SHORTEST_PASS_S, compute_s * weight / total * (1 - _FORWARD_SHARE)),
        )
        for elements, weight in _SHAPES[name]
    )
    return EmulatedModel(name=name, layers=layers, optimizer_s=optimizer_s)


def as_workload(model: EmulatedModel) -> Workload:
    """The model as the product sees any: parameters in gradient-ready order."""
    layers = model.layers[::-1]
    ready = np.cumsum([layer.backward_s for layer in layers])
    return Workload(
        name=model.name,
        sample="one emulated sample",
        parameters=tuple(
            Parameter(
                name=f"layer {number}",
                num_elements=layer.num_elements,
                ready_fraction=float(ready[number] / ready[-1]),
            )
            for number, layer in enumerate(layers)
        ),
        forward_flop=0.0,
        backward_flop=0.0,
        num_operators=len(layers),
    )


def flat(num_ranks: int, mbit: float) -> Fabric:
    """One rank per node, all on one switch."""
    return Fabric(num_ranks=num_ranks, bytes_per_s=mbit * MBIT)


def training(  # noqa: PLR0913, PLR0917 - one argument per column of the tables below
    family: str,
    shape: str,
    num_ranks: int,
    mbit: float,
    ratio: float,
    cap_mb: float | None,
    accumulation: int = 1,
) -> TrainingSetting:
    """A training setting; its name lacks a number that makes it unique.

    ``ratio``: compute over the time in which a large ring would move the gradients at ``mbit``.
    """
    ring_s = 2 * gradient_bytes(shape) / (mbit * MBIT)
    cap = "default" if cap_mb is None else f"{cap_mb:g}MiB"
    return TrainingSetting(
        name=(
            f"{shape} n={num_ranks} {mbit:g}Mbit/s "
            f"ratio={ratio:g} accumulation={accumulation} cap={cap}"
        ),
        family=family,
        model=emulated(shape, compute_s=ratio * ring_s / accumulation, optimizer_s=0.002),
        fabric=flat(num_ranks, mbit),
        accumulation=accumulation,
        bucket_cap_mb=cap_mb,
        num_steps=7,
    )


def _numbered(settings: Iterable[TrainingSetting]) -> tuple[TrainingSetting, ...]:
    return tuple(
        setting.model_copy(update={"name": f"{setting.family} {number}: {setting.name}"})
        for number, setting in enumerate(settings)
    )


def collectives() -> tuple[CollectiveSetting, ...]:
    """All-reduces between two ranks on idle shaped links."""
    return tuple(
        CollectiveSetting(
            name=f"all-reduce {mbit:g}Mbit/s",
            fabric=flat(2, mbit),
            sizes_bytes=(1024, 262_144, MIB, 4 * MIB),
            repeats=6,
        )
        for mbit in (50, 100, 200, 400)
    )


def machine_costs(moment: int) -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """What messages, bytes and steps cost the machine: at several moments, as hosts slow down."""
    # Many ranks keep the cores awake; so must two, for the cost of a message.
    warm = CollectiveSetting(
        name=f"all_reduce warm {moment}",
        fabric=flat(2, 200),
        sizes_bytes=(1024,),
        repeats=200,
        pause_s=0.0,
        keep_awake=True,
    )
    crowded = CollectiveSetting(
        name=f"all_reduce crowded {moment}",
        fabric=flat(2, UNSHAPED_MBIT),
        sizes_bytes=(1024, 4 * MIB),
        repeats=25,
        pause_s=0.0,
        copies=8,
    )
    # One rank whose device needs no time: what is left is the cost of its steps on a busy core.
    rushes = []
    for shape in ("lenet", "transformer", "squeezenet", "perceptron"):
        model = emulated(shape, compute_s=1.0)
        none = {"forward_s": 1e-9, "backward_s": 1e-9}
        layers = tuple(layer.model_copy(update=none) for layer in model.layers)
        rushes.append(
            TrainingSetting(
                name=f"{RUSH} {moment}: {shape}",
                family=RUSH,
                model=model.model_copy(update={"layers": layers}),
                fabric=flat(1, 200),
                num_steps=30,
            )
        )
    return (warm, crowded, *rushes)


def trainings() -> tuple[TrainingSetting, ...]:
    """Training runs of one and two ranks."""
    # Shape, ranks, rate, compute over communication, bucket cap.
    rows: tuple[tuple[str, int, float, float, float | None], ...] = (
        ("lenet", 1, 200, 3, None),
        ("transformer", 1, 200, 0.5, None),
        ("squeezenet", 1, 200, 0.5, None),
        ("lenet", 2, 50, 2, None),
        ("resnet20", 2, 100, 0.3, 0.25),
        ("transformer", 2, 200, 0.5, 2.0),
        ("perceptron", 2, 200, 1.5, 4.0),
        ("squeezenet", 2, 200, 3, 1.0),
        ("embedding", 2, 200, 0.5, None),
    )
    return _numbered(training("calibration", *row) for row in rows)


def calibration() -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """All that runs with one and two ranks."""
    steps = trainings()
    middle = len(steps) // 2
    return (
        *(*collectives(), *machine_costs(0), *steps[:middle], *machine_costs(1)),
        *(*steps[middle:], *machine_costs(2)),
    )


def plain() -> tuple[TrainingSetting, ...]:
    """Equal devices on equal links: shapes, rates, overlaps, buckets, accumulations."""
    # Shape, rate, compute over communication, bucket cap, accumulation.
    rows: tuple[tuple[str, float, float, float | None, int], ...] = (
        ("lenet", 25, 2, None, 1),
        ("lenet", 50, 5, None, 2),
        ("lenet", 25, 0.5, 0.1, 1),
        ("resnet20", 50, 0.3, None, 1),
        ("resnet20", 200, 10, 0.5, 1),
        ("resnet20", 50, 1, 0.5, 3),
        ("squeezenet", 100, 0.2, None, 1),
        ("squeezenet", 200, 2, 2.0, 1),
        ("squeezenet", 200, 0.7, 4.0, 2),
        ("perceptron", 200, 0.4, None, 1),
        ("perceptron", 200, 1.2, 6.0, 1),
        ("transformer", 200, 0.5, 2.0, 1),
        ("transformer", 200, 1.3, None, 4),
        ("vgg-like", 200, 0.5, 3.0, 1),
        ("vgg-like", 200, 1.5, None, 1),
        ("embedding", 100, 0.8, 1.0, 1),
    )
    return _numbered(
        training("plain", shape, n, mbit, ratio, cap, accumulation)
        for n in (4, 8, 16)
        for shape, mbit, ratio, cap, accumulation in rows
    )


def judged(budget: str, *, seed: int) -> tuple[TrainingSetting, ...]:
    """All settings, or for ``quick`` every sixth, in an order of the seed: drift is no property of a size."""
    step = 1 if budget == "standard" else 6
    return tuple(shuffled(plain()[::step], str(seed)))
