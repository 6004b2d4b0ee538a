"""What the testbed runs: calibration with one and two ranks, then plain and hard settings with more."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from perfmodel.documents.testbed import (
    CollectiveKind,
    CollectiveSetting,
    Fabric,
    Noise,
    Traffic,
    TrainingSetting,
)
from perfmodel.units import MBIT, MIB
from validate.testbed.shapes import emulated, gradient_bytes

#: Faster than the machine can feed: shaped in name only.
UNSHAPED_MBIT: Final = 10_000.0

#: Moments at which a calibration prices the machine's work.
NUM_MOMENTS: Final = 3

#: Family of the runs that tell what steps cost the machine.
RUSH: Final = "rush"

LOGNORMALS: Final = (0.1, 0.2)
PARETO: Final = Noise(kind="pareto", spread=0.15)
PERSISTENT: Final = Noise(kind="lognormal", spread=0.03, rank_spread=0.06)
NOISES: Final = (
    *(Noise(kind="lognormal", spread=spread) for spread in LOGNORMALS),
    PARETO,
    PERSISTENT,
)


def flat(num_ranks: int, mbit: float) -> Fabric:
    """One rank per node, all on one switch."""
    return Fabric(node_of_rank=tuple(range(num_ranks)), node_bytes_per_s=(mbit * MBIT,) * num_ranks)


_QUIET: Final = Noise()


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
    noise: Noise = _QUIET
    num_steps: int = 7

    def setting(self, number: int) -> TrainingSetting:
        """Build the setting; the number makes its name unique."""
        ring_s = 2 * gradient_bytes(self.shape) / (self.mbit * MBIT)
        model = emulated(
            self.shape, compute_s=self.ratio * ring_s / self.accumulation, optimizer_s=0.002
        )
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}MiB"
        name = (
            f"{self.family} {number}: {self.shape} n={self.fabric.num_ranks} {self.mbit:g}Mbit/s "
            f"ratio={self.ratio:g} accumulation={self.accumulation} cap={cap}"
        )
        return TrainingSetting(
            name=name,
            family=self.family,
            model=model,
            fabric=self.fabric,
            accumulation=self.accumulation,
            bucket_cap_mb=self.bucket_cap_mb,
            noise=self.noise,
            num_steps=self.num_steps,
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


def _messages(turn: int) -> tuple[CollectiveSetting, ...]:
    """What messages and bytes cost the machine."""
    # Many ranks keep the cores awake; so must two, for the price of a message.
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
    warm = tuple(
        CollectiveSetting(
            name=f"{kind} warm {turn}",
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
        name=f"all_reduce crowded {turn}",
        fabric=flat(2, UNSHAPED_MBIT),
        sizes_bytes=(1024, 4 * MIB),
        repeats=25,
        pause_s=0.0,
        copies=8,
    )
    return (*warm, crowded)


def calibration() -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """All that runs with one and two ranks; prices of the machine at three moments, as hosts slow down."""
    steps = trainings()
    middle = len(steps) // 2
    return (*collectives(), *steps[:middle], *prices(1), *steps[middle:], *prices(2))


def prices(turn: int) -> tuple[CollectiveSetting | TrainingSetting, ...]:
    """What messages, bytes and steps cost the machine, once more."""
    return (*_messages(turn), *_rushes(turn))


def trainings() -> tuple[TrainingSetting, ...]:
    """Training runs of one and two ranks."""
    recipes = [
        Recipe(family="calibration", shape=shape, fabric=flat(1, 200), ratio=ratio, mbit=200)
        for shape, ratio in (("lenet", 3), ("transformer", 0.5), ("squeezenet", 0.5))
    ]
    recipes += [
        Recipe(
            family="calibration",
            shape=shape,
            fabric=flat(2, mbit),
            ratio=ratio,
            mbit=mbit,
            bucket_cap_mb=cap,
        )
        for shape, mbit, ratio, cap in (
            ("lenet", 50, 2, None),
            ("resnet20", 100, 0.3, 0.25),
            ("transformer", 200, 0.5, 2.0),
            ("perceptron", 200, 1.5, 4.0),
            ("squeezenet", 200, 3, 1.0),
            ("embedding", 200, 0.5, None),
        )
    ]
    settings = [recipe.setting(number) for number, recipe in enumerate(recipes)]
    settings += _rushes(0)
    for noise in NOISES:
        # What stays with a rank shows in many ranks, what changes in many steps.
        num_runs = 5 if noise.rank_spread else 1
        for repeat in range(num_runs):
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


def _rushes(turn: int) -> tuple[TrainingSetting, ...]:
    shapes = ("lenet", "transformer", "squeezenet", "perceptron")
    return tuple(_rush(shape, turn) for shape in shapes)


def _rush(shape: str, turn: int) -> TrainingSetting:
    """One rank whose device needs no time: what is left is the price of its steps on a busy core."""
    model = emulated(shape, compute_s=1.0)
    layers = tuple(
        layer.model_copy(update={"forward_s": 1e-9, "backward_s": 1e-9}) for layer in model.layers
    )
    return TrainingSetting(
        name=f"{RUSH} {turn}: {shape}",
        family=RUSH,
        model=model.model_copy(update={"layers": layers}),
        fabric=flat(1, 200),
        num_steps=30,
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
    settings: list[TrainingSetting] = []
    for num_ranks in (4, 8, 16):
        for shape, mbit, ratio, cap, accumulation in rows:
            recipe = Recipe(
                family="plain",
                shape=shape,
                fabric=flat(num_ranks, mbit),
                ratio=ratio,
                mbit=mbit,
                bucket_cap_mb=cap,
                accumulation=accumulation,
            )
            settings.append(recipe.setting(len(settings)))
    return tuple(settings)


def hard() -> tuple[TrainingSetting, ...]:
    """Unequal links and devices, noise, other traffic, and rates that the machine cannot feed."""
    recipes = (
        *_two_tiers(),
        *_slow_links(),
        *_slow_ranks(),
        *_noisy(),
        *_background(),
        *_host_limited(),
    )
    return tuple(recipe.setting(number) for number, recipe in enumerate(recipes))


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


def _two_tiers() -> Iterator[Recipe]:
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
        yield Recipe(
            family="two tiers",
            shape=shape,
            fabric=fabric,
            ratio=(0.4, 0.8, 2.0)[number % 3],
            mbit=200,
            bucket_cap_mb=cap,
        )


def _slow_links() -> Iterator[Recipe]:
    for number, (num_ranks, slow_mbit, ratio) in enumerate(
        ((4, 100, 0.5), (8, 60, 0.5), (16, 60, 0.5), (4, 100, 0.7), (8, 150, 0.3), (16, 100, 8))
    ):
        rates = [200 * MBIT] * num_ranks
        rates[num_ranks // 2] = slow_mbit * MBIT
        yield Recipe(
            family="slow link",
            shape=("transformer", "squeezenet", "resnet20")[number % 3],
            fabric=Fabric(node_of_rank=tuple(range(num_ranks)), node_bytes_per_s=tuple(rates)),
            ratio=ratio,
            mbit=200,
            bucket_cap_mb=(2.0, None)[number % 2],
        )


def _slow_ranks() -> Iterator[Recipe]:
    for number, (num_ranks, factor, ratio) in enumerate(
        ((4, 1.5, 1.3), (8, 1.5, 2), (16, 1.3, 1.5), (4, 1.5, 0.3), (8, 2.0, 0.3), (16, 1.5, 0.4))
    ):
        yield Recipe(
            family="slow rank",
            shape=("perceptron", "squeezenet", "transformer")[number % 3],
            fabric=flat(num_ranks, 200),
            ratio=ratio,
            mbit=200,
            bucket_cap_mb=(None, 2.0)[number % 2],
            noise=Noise(slow_ranks=((num_ranks // 3, factor),)),
        )


def _noisy() -> Iterator[Recipe]:
    number = 0
    for noise in NOISES:
        for num_ranks, ratio in ((4, 3.0), (8, 0.5), (16, 0.5), (16, 3.0)):
            number += 1
            names = {"pareto": "heavy tails", "lognormal": "lognormal"}
            yield Recipe(
                family="persistent" if noise.rank_spread else names[noise.kind],
                shape=("resnet20", "lenet")[ratio > 1],
                fabric=flat(num_ranks, 100 if ratio < 1 else 50),
                ratio=ratio,
                mbit=100 if ratio < 1 else 50,
                bucket_cap_mb=0.5,
                noise=noise.model_copy(update={"seed": number}),
                num_steps=32,
            )


def _background() -> Iterator[Recipe]:
    for number, (num_ranks, mbit, ratio) in enumerate(
        ((4, 100, 0.4), (8, 100, 0.4), (16, 80, 0.4), (4, 50, 4), (8, 120, 0.6), (16, 60, 4))
    ):
        stream = Traffic(from_node=1, to_node=num_ranks - 1, bytes_per_s=mbit * MBIT)
        yield Recipe(
            family="background",
            shape=("squeezenet", "perceptron", "resnet20")[number % 3],
            fabric=flat(num_ranks, 200).model_copy(update={"background": (stream,)}),
            ratio=ratio,
            mbit=200,
            bucket_cap_mb=2.0,
        )


def _host_limited() -> Iterator[Recipe]:
    for num_ranks, mbit, shape, cap in (
        (8, 10_000, "transformer", None),
        (8, 2_000, "perceptron", None),
        (16, 2_000, "transformer", 4.0),
        (16, 1_000, "perceptron", 4.0),
        (16, 5_000, "squeezenet", None),
        (16, 1_000, "vgg-like", None),
    ):
        yield Recipe(
            family="host",
            shape=shape,
            fabric=flat(num_ranks, mbit),
            ratio=0.1,
            mbit=1000,
            bucket_cap_mb=cap,
            # Steps of 0.1 s: a second in which the kernel holds real-time processes back is many.
            num_steps=25,
        )


def short(settings: tuple[TrainingSetting, ...], budget: str) -> tuple[TrainingSetting, ...]:
    """All settings, or for ``quick`` some of each family, in an order that the seed does not change."""
    if budget == "standard":
        return settings
    return settings[::6]


def shuffled(settings: tuple[TrainingSetting, ...], *, seed: int) -> tuple[TrainingSetting, ...]:
    """In an order of the seed, so that drift is no property of a family."""
    order = list(settings)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return tuple(order)
