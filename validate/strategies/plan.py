"""What runs: calibration between two ranks, then strategies on 2 to 4 ranks that it never saw."""

import random
from dataclasses import dataclass
from typing import Final, Literal

from perfmodel.documents.testbed import (
    CollectiveSetting,
    EmulatedStack,
    StrategySetting,
    TrainingSetting,
)
from perfmodel.layout.layout import parse_layout
from perfmodel.units import MIB
from validate.testbed import plan as testbed_plan

Family = Literal["fsdp", "zero", "tensor", "pipeline"]
FAMILIES: Final[tuple[Family, ...]] = ("fsdp", "zero", "tensor", "pipeline")

#: Family-like name of the all-gathers that follow one another without a pause.
IN_TURN: Final = "all-gather in turn"
_OPTIMIZER_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """A setting in a line; ``layer_ms`` is one forward pass of a layer, backward takes twice as long."""

    family: Family
    layout: str
    mbit: float
    layers: int
    hidden: int
    layer_ms: float
    rows: int = 256
    prefetch: bool = False
    cap_mb: float | None = None

    def setting(self, number: int, kind: str) -> StrategySetting:
        """Build the setting; the number makes its name unique."""
        num_ranks = parse_layout(self.layout).world_size
        extra = " prefetch" if self.prefetch else ""
        cap = "" if self.cap_mb is None else f" cap={self.cap_mb:g}MiB"
        return StrategySetting(
            name=(
                f"{self.family} {kind}{number}: {self.layout}{extra}{cap} {self.mbit:g}Mbit/s "
                f"{self.layers}x{self.hidden} rows={self.rows} {self.layer_ms:g}ms"
            ),
            family=self.family,
            model=EmulatedStack(
                num_layers=self.layers,
                hidden=self.hidden,
                rows=self.rows,
                forward_s=self.layer_ms / 1e3,
                backward_s=2 * self.layer_ms / 1e3,
                optimizer_s=_OPTIMIZER_S,
            ),
            fabric=testbed_plan.flat(num_ranks, self.mbit),
            layout=self.layout,
            prefetch=self.prefetch,
            bucket_cap_mb=self.cap_mb,
            num_steps=4,
        )


def collectives() -> tuple[CollectiveSetting, ...]:
    """Between two ranks: all-reduces as the testbed has them, and all-gathers one after another."""
    in_turn = CollectiveSetting(
        name=IN_TURN,
        collective="all_gather",
        fabric=testbed_plan.flat(2, 200),
        sizes_bytes=(MIB, 2 * MIB),
        repeats=8,
        pause_s=0.0,
    )
    return (*testbed_plan.collectives(), in_turn)


def trainings() -> tuple[TrainingSetting, ...]:
    """Two ranks of plain DDP whose counters tell what messages cost on the wire."""
    return tuple(
        setting
        for setting in testbed_plan.trainings()
        if setting.fabric.num_ranks == 2 and setting.num_steps < 10
    )[:2]


#: Two ranks of each strategy, which tell what its host work costs.
_FIRST: Final = (
    _Recipe(family="fsdp", layout="dp=2 zero=3", mbit=400, layers=3, hidden=160, layer_ms=10),
    _Recipe(family="fsdp", layout="dp=2 zero=3", mbit=400, layers=6, hidden=64, layer_ms=5),
    _Recipe(family="zero", layout="dp=2 zero=1", mbit=400, layers=4, hidden=160, layer_ms=10),
    _Recipe(family="zero", layout="dp=2 zero=1", mbit=400, layers=8, hidden=64, layer_ms=5),
    _Recipe(family="tensor", layout="tp=2", mbit=400, layers=3, hidden=128, layer_ms=20, rows=512),
    _Recipe(family="tensor", layout="tp=2", mbit=400, layers=6, hidden=64, layer_ms=10),
    _Recipe(
        family="pipeline",
        layout="pp=2 accumulation=4 schedule=gpipe",
        mbit=400,
        layers=4,
        hidden=192,
        layer_ms=10,
        rows=512,
    ),
    _Recipe(
        family="pipeline",
        layout="pp=2 accumulation=6",
        mbit=400,
        layers=8,
        hidden=64,
        layer_ms=5,
    ),
)


def first() -> tuple[StrategySetting, ...]:
    """Strategies on two ranks, for calibration."""
    return tuple(recipe.setting(number, "first ") for number, recipe in enumerate(_FIRST))


#: Layout, prefetch, Mbit/s, layers, width, ms of a layer.
_FSDP: Final[tuple[tuple[str, bool, float, int, int, float], ...]] = (
    ("dp=2 zero=3", False, 200, 4, 160, 20),
    ("dp=2 zero=3", True, 200, 5, 128, 30),
    ("dp=3 zero=3", False, 400, 4, 192, 10),
    ("dp=3 zero=3", True, 400, 4, 192, 40),
    ("dp=4 zero=3", False, 400, 4, 160, 20),
    ("dp=4 zero=3", True, 400, 6, 128, 20),
    ("dp=4 zero=3", True, 200, 3, 128, 60),
    ("dp=4 zero=2", True, 400, 5, 160, 25),
)
#: Layout, bucket cap, Mbit/s, layers, width, ms of a layer.
_ZERO: Final[tuple[tuple[str, float | None, float, int, int, float], ...]] = (
    ("dp=2 zero=1", None, 200, 4, 160, 20),
    ("dp=2 zero=1", 2.0, 100, 4, 128, 40),
    ("dp=3 zero=1", None, 400, 6, 160, 15),
    ("dp=3 zero=1", 1.0, 200, 5, 128, 30),
    ("dp=4 zero=1", None, 400, 6, 160, 10),
    ("dp=4 zero=1", 2.0, 400, 8, 128, 20),
    ("dp=4 zero=1 accumulation=2", 4.0, 400, 4, 192, 15),
)
#: Layout, Mbit/s, layers, width, rows, ms of a layer.
_TENSOR: Final[tuple[tuple[str, float, int, int, int, float], ...]] = (
    ("tp=2", 200, 3, 256, 256, 40),
    ("tp=2", 100, 2, 128, 512, 40),
    ("tp=3", 200, 3, 192, 256, 60),
    ("tp=3", 400, 4, 192, 512, 30),
    ("tp=4", 400, 3, 256, 512, 40),
    ("tp=4", 200, 2, 256, 256, 80),
    ("tp=4 accumulation=2", 400, 2, 128, 512, 40),
)
#: Layout, Mbit/s, layers, width, rows, ms of a layer.
_PIPELINE: Final[tuple[tuple[str, float, int, int, int, float], ...]] = (
    ("pp=2 accumulation=4 schedule=gpipe", 200, 4, 256, 512, 10),
    ("pp=2 accumulation=4", 200, 4, 256, 512, 10),
    ("pp=2 accumulation=6", 100, 4, 128, 512, 10),
    ("pp=3 accumulation=6 schedule=gpipe", 400, 6, 256, 512, 8),
    ("pp=3 accumulation=6", 200, 6, 256, 512, 8),
    ("pp=4 accumulation=4 schedule=gpipe", 400, 4, 256, 768, 12),
    ("pp=4 accumulation=8", 400, 8, 256, 512, 6),
    ("pp=4 accumulation=8", 200, 4, 256, 256, 20),
)


def judged(*, seed: int) -> tuple[StrategySetting, ...]:
    """All settings that are predicted and run, in an order of the seed: drift is no property of a family."""
    recipes = [
        _Recipe(
            family="fsdp",
            layout=layout,
            prefetch=prefetch,
            mbit=mbit,
            layers=layers,
            hidden=hidden,
            layer_ms=layer_ms,
        )
        for layout, prefetch, mbit, layers, hidden, layer_ms in _FSDP
    ]
    recipes += [
        _Recipe(
            family="zero",
            layout=layout,
            cap_mb=cap_mb,
            mbit=mbit,
            layers=layers,
            hidden=hidden,
            layer_ms=layer_ms,
        )
        for layout, cap_mb, mbit, layers, hidden, layer_ms in _ZERO
    ]
    families: tuple[tuple[Family, tuple[tuple[str, float, int, int, int, float], ...]], ...] = (
        ("tensor", _TENSOR),
        ("pipeline", _PIPELINE),
    )
    recipes += [
        _Recipe(
            family=family,
            layout=layout,
            mbit=mbit,
            layers=layers,
            hidden=hidden,
            rows=rows,
            layer_ms=layer_ms,
        )
        for family, table in families
        for layout, mbit, layers, hidden, rows, layer_ms in table
    ]
    settings = [recipe.setting(number, "") for number, recipe in enumerate(recipes)]
    random.Random(seed).shuffle(settings)  # noqa: S311 - an order, no secret
    return tuple(settings)
