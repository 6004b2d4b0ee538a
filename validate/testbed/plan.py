"""What the testbed runs: emulated models on shaped links; one and two ranks calibrate, 4 to 16 judge."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from perfmodel.documents.testbed import (
    CollectiveKind,
    CollectiveSetting,
    EmulatedLayer,
    EmulatedModel,
    Fabric,
    Noise,
    Traffic,
    TrainingSetting,
)
from perfmodel.units import MBIT, MIB, Seconds
from perfmodel.workload.workload import Parameter, Workload

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
    layers = []
    for elements, weight in _SHAPES[name]:
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
    """The model as the product sees any: parameters in gradient-ready order."""
    total_s = sum(layer.backward_s for layer in model.layers)
    done_s = 0.0
    parameters = []
    for number, layer in reversed(list(enumerate(model.layers))):
        done_s += layer.backward_s
        # Sums of fractions may miss 1 by a rounding.
        ready = 1.0 if number == 0 else min(1.0, done_s / total_s)
        parameters.append((layer.num_elements, ready))
    return gradients(model.name, parameters)


def gradients(name: str, parameters: list[tuple[int, float]]) -> Workload:
    """A workload of which only elements and readiness of its gradients are known."""
    return Workload(
        name=name,
        sample="one emulated sample",
        parameters=tuple(
            Parameter(name=f"layer {number}", num_elements=elements, ready_fraction=ready)
            for number, (elements, ready) in enumerate(parameters)
        ),
        forward_flop=0.0,
        backward_flop=0.0,
        num_operators=len(parameters),
    )


def flat(num_ranks: int, mbit: float) -> Fabric:
    """One rank per node, all on one switch."""
    return Fabric(node_of_rank=tuple(range(num_ranks)), node_bytes_per_s=(mbit * MBIT,) * num_ranks)


def _shared(num_nodes: int, per_node: int, mbit: float, *, round_robin: bool = False) -> Fabric:
    ranks = range(num_nodes * per_node)
    nodes = tuple(rank % num_nodes if round_robin else rank // per_node for rank in ranks)
    return Fabric(node_of_rank=nodes, node_bytes_per_s=(mbit * MBIT,) * num_nodes)


def _racks(num_racks: int, per_rack: int, uplink_mbit: float, *, mixed: bool) -> Fabric:
    num_nodes = num_racks * per_rack
    racks = tuple(node % num_racks if mixed else node // per_rack for node in range(num_nodes))
    return Fabric(
        node_of_rank=tuple(range(num_nodes)),
        node_bytes_per_s=(200 * MBIT,) * num_nodes,
        rack_of_node=racks,
        rack_bytes_per_s=(uplink_mbit * MBIT,) * num_racks,
    )


_EQUAL: Final = Noise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What distinguishes a training setting; becomes one with ``setting``."""

    family: str
    shape: str
    fabric: Fabric
    ratio: float
    """Compute over the time in which a large ring would move the gradients at ``mbit``."""
    mbit: float
    accumulation: int = 1
    bucket_cap_mb: float | None = None
    noise: Noise = _EQUAL
    num_steps: int = 7

    def setting(self, number: int) -> TrainingSetting:
        """Build the setting; the number makes its name unique."""
        ring_s = 2 * gradient_bytes(self.shape) / (self.mbit * MBIT)
        compute_s = self.ratio * ring_s / self.accumulation
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}MiB"
        return TrainingSetting(
            name=(
                f"{self.family} {number}: {self.shape} n={self.fabric.num_ranks} {self.mbit:g}Mbit/s "
                f"ratio={self.ratio:g} accumulation={self.accumulation} cap={cap}"
            ),
            family=self.family,
            model=emulated(self.shape, compute_s=compute_s, optimizer_s=0.002),
            fabric=self.fabric,
            accumulation=self.accumulation,
            bucket_cap_mb=self.bucket_cap_mb,
            noise=self.noise,
            num_steps=self.num_steps,
        )


NOISES: Final = (
    *(Noise(kind="lognormal", spread=spread) for spread in (0.1, 0.2)),
    Noise(kind="pareto", spread=0.15),
    Noise(kind="lognormal", spread=0.03, rank_spread=0.06),
)


def collectives() -> tuple[CollectiveSetting, ...]:
    """Between two ranks: all-reduces on idle shaped links, and what messages cost the machine."""
    sizes = (1024, 262_144, MIB, 4 * MIB)
    shaped = tuple(
        CollectiveSetting(
            name=f"all-reduce {mbit:g}Mbit/s", fabric=flat(2, mbit), sizes_bytes=sizes, repeats=6
        )
        for mbit in (50, 100, 200, 400)
    )
    return (*shaped, *_messages(0))


def _messages(moment: int) -> tuple[CollectiveSetting, ...]:
    """What messages and bytes cost the machine."""
    # Many ranks keep the cores awake; so must two, for the cost of a message.
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
    warm = tuple(
        CollectiveSetting(
            name=f"{kind} warm {moment}",
            collective=kind,
            fabric=flat(2, 200),
            sizes_bytes=(1024,),
            repeats=200,
            pause_s=0.0,
            keep_awake=True,
        )
        for kind in kinds
    )
    crowded = CollectiveSetting(
        name=f"all_reduce crowded {moment}",
        fabric=flat(2, UNSHAPED_MBIT),
        sizes_bytes=(1024, 4 * MIB),
        repeats=25,
        pause_s=0.0,
        copies=8,
    )
    return (*warm, crowded)


def _rushes(moment: int) -> tuple[TrainingSetting, ...]:
    """One rank whose device needs no time: what is left is the cost of its steps on a busy core."""
    found = []
    for shape in ("lenet", "transformer", "squeezenet", "perceptron"):
        model = emulated(shape, compute_s=1.0)
        none = {"forward_s": 1e-9, "backward_s": 1e-9}
        layers = tuple(layer.model_copy(update=none) for layer in model.layers)
        found.append(
            TrainingSetting(
                name=f"{RUSH} {moment}: {shape}",
                family=RUSH,
                model=model.model_copy(update={"layers": layers}),
                fabric=flat(1, 200),
                num_steps=30,
            )
        )
    return tuple(found)


def machine_costs(moment: int) -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """What messages, bytes and steps cost the machine, once more."""
    return (*_messages(moment), *_rushes(moment))


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
    settings = [
        Recipe(
            family="calibration",
            shape=shape,
            fabric=flat(num_ranks, mbit),
            ratio=ratio,
            mbit=mbit,
            bucket_cap_mb=cap,
        ).setting(number)
        for number, (shape, num_ranks, mbit, ratio, cap) in enumerate(rows)
    ]
    settings += _rushes(0)
    for noise in NOISES:
        # What stays with a rank shows in many ranks, what changes in many steps.
        for repeat in range(5 if noise.rank_spread else 1):
            recipe = Recipe(
                family="calibration",
                shape="lenet",
                fabric=flat(2, 1000),
                ratio=2,
                mbit=200,
                noise=noise.model_copy(update={"seed": 1000 + repeat}),
                num_steps=60 if noise.rank_spread else 300,
            )
            settings.append(recipe.setting(len(settings)))
    return tuple(settings)


def calibration() -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """All that runs with one and two ranks; costs of the machine at three moments, as hosts slow down."""
    steps = trainings()
    middle = len(steps) // 2
    return (
        *(*collectives(), *steps[:middle], *machine_costs(1)),
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
    recipes = [
        Recipe(
            family="plain",
            shape=shape,
            fabric=flat(num_ranks, mbit),
            ratio=ratio,
            mbit=mbit,
            bucket_cap_mb=cap,
            accumulation=accumulation,
        )
        for num_ranks in (4, 8, 16)
        for shape, mbit, ratio, cap, accumulation in rows
    ]
    return tuple(recipe.setting(number) for number, recipe in enumerate(recipes))


def hard() -> tuple[TrainingSetting, ...]:
    """Unequal links and devices, noise, other traffic, and rates that the machine cannot feed."""
    return tuple(recipe.setting(number) for number, recipe in enumerate(_hard()))


def _hard() -> Iterator[Recipe]:
    fabrics = (
        _shared(4, 2, 200),
        _shared(2, 4, 200, round_robin=True),
        _shared(4, 4, 200),
        _shared(4, 4, 400, round_robin=True),
        _racks(2, 2, 80, mixed=False),
        _racks(2, 4, 80, mixed=False),
        _racks(2, 4, 300, mixed=True),
        _racks(4, 4, 300, mixed=True),
    )
    for number, fabric in enumerate(fabrics):
        shape, cap = (("squeezenet", None), ("perceptron", 4.0))[number % 2]
        ratio = (0.4, 0.8, 2.0)[number % 3]
        yield _at_200("two tiers", shape, fabric, ratio, cap)
    slow_links = ((4, 100, 0.5), (8, 60, 0.5), (16, 60, 0.5), (4, 100, 0.7), (8, 150, 0.3))
    for number, (num_ranks, slow_mbit, ratio) in enumerate((*slow_links, (16, 100, 8))):
        rates = [200 * MBIT] * num_ranks
        rates[num_ranks // 2] = slow_mbit * MBIT
        fabric = Fabric(node_of_rank=tuple(range(num_ranks)), node_bytes_per_s=tuple(rates))
        shape = ("transformer", "squeezenet", "resnet20")[number % 3]
        yield _at_200("slow link", shape, fabric, ratio, (2.0, None)[number % 2])
    slow_ranks = ((4, 1.5, 1.3), (8, 1.5, 2), (16, 1.3, 1.5), (4, 1.5, 0.3), (8, 2.0, 0.3))
    for number, (num_ranks, factor, ratio) in enumerate((*slow_ranks, (16, 1.5, 0.4))):
        shape = ("perceptron", "squeezenet", "transformer")[number % 3]
        noise = Noise(slow_ranks=((num_ranks // 3, factor),))
        fabric = flat(num_ranks, 200)
        yield _at_200("slow rank", shape, fabric, ratio, (None, 2.0)[number % 2], noise)
    noisy = [
        (noise, *row) for noise in NOISES for row in ((4, 3.0), (8, 0.5), (16, 0.5), (16, 3.0))
    ]
    for number, (noise, num_ranks, ratio) in enumerate(noisy, start=1):
        name = {"pareto": "heavy tails", "lognormal": "lognormal"}[noise.kind]
        mbit = 100 if ratio < 1 else 50
        yield Recipe(
            family="persistent" if noise.rank_spread else name,
            shape=("resnet20", "lenet")[ratio > 1],
            fabric=flat(num_ranks, mbit),
            ratio=ratio,
            mbit=mbit,
            bucket_cap_mb=0.5,
            noise=noise.model_copy(update={"seed": number}),
            num_steps=32,
        )
    streams = ((4, 100, 0.4), (8, 100, 0.4), (16, 80, 0.4), (4, 50, 4), (8, 120, 0.6), (16, 60, 4))
    for number, (num_ranks, mbit, ratio) in enumerate(streams):
        stream = Traffic(from_node=1, to_node=num_ranks - 1, bytes_per_s=mbit * MBIT)
        fabric = flat(num_ranks, 200).model_copy(update={"background": (stream,)})
        shape = ("squeezenet", "perceptron", "resnet20")[number % 3]
        yield _at_200("background", shape, fabric, ratio, 2.0)
    host_limited: tuple[tuple[int, float, str, float | None], ...] = (
        (8, 10_000, "transformer", None),
        (8, 2_000, "perceptron", None),
        (16, 2_000, "transformer", 4.0),
        (16, 1_000, "perceptron", 4.0),
        (16, 5_000, "squeezenet", None),
        (16, 1_000, "vgg-like", None),
    )
    for num_ranks, rate, shape, cap in host_limited:
        yield Recipe(
            family="host",
            shape=shape,
            fabric=flat(num_ranks, rate),
            ratio=0.1,
            mbit=1000,
            bucket_cap_mb=cap,
            # Steps of 0.1 s: a second in which the kernel holds real-time processes back is many.
            num_steps=25,
        )


def _at_200(
    family: str, shape: str, fabric: Fabric, ratio: float, cap: float | None, noise: Noise = _EQUAL
) -> Recipe:
    """Compute over communication as of links of 200 Mbit/s."""
    return Recipe(
        family=family,
        shape=shape,
        fabric=fabric,
        ratio=ratio,
        mbit=200,
        bucket_cap_mb=cap,
        noise=noise,
    )


def judged(budget: str, *, seed: int) -> tuple[TrainingSetting, ...]:
    """All settings, or for ``quick`` some of each family, in an order of the seed."""
    # In that order drift is no property of a family.
    step = 1 if budget == "standard" else 6
    order = [*plain()[::step], *hard()[::step]]
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return tuple(order)
