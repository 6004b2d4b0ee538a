"""All layouts that a model, a cluster and a global batch allow, as columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from perfmodel.errors import NotFeasible, check_at_least
from perfmodel.layout import Layout, Recompute
from perfmodel.statistics import IntArray

LARGEST_MICRO_BATCH: Final = 64
LARGEST_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the layouts of one model on one cluster."""

    layers: int
    heads: int
    devices: int
    sequence: int | None = None
    """Tokens per sequence, if known."""
    experts: int = 1
    devices_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumns:
    """One row per layout, whole numbers; recomputation by its position in ``Recompute``."""

    rows: IntArray
    """Shape ``(num_layouts, 10)``: the numbers of ``COLUMNS``."""

    def __len__(self) -> int:
        """Number of layouts."""
        return len(self.rows)

    def column(self, name: str) -> IntArray:
        """One number of every layout."""
        return self.rows[:, COLUMNS.index(name)]

    def layout(self, index: int) -> Layout:
        """One of them, with the options that are taken for granted."""
        numbers: dict[str, Any] = dict(zip(COLUMNS, self.rows[index].tolist(), strict=True))
        recompute = tuple(Recompute)[numbers.pop("recompute")]
        return Layout(recompute=recompute, sequence_parallel=numbers["tp"] > 1, **numbers)


COLUMNS: Final = (
    "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "accumulation", "recompute", "interleave"
)  # fmt: skip


def feasible_layouts(
    limits: Limits, *, global_batch: int, interleave: int = 1, fused_attention: bool = True
) -> LayoutColumns:
    """Every layout of a global batch that ``impossible`` does not refuse, within bounds.

    One forward, one backward alternating; sequence parallelism wherever matrices are shared; sharding only
    where there is somebody to share with. Stages may be uneven by one layer.

    ``interleave``: Most stages per device.
    ``fused_attention``: Selective recomputation then saves nothing and is left out.
    """
    check_at_least("devices", limits.devices, 1)
    check_at_least("global_batch", global_batch, 1)
    check_at_least("interleave", interleave, 1)
    recomputes = (0, 2) if fused_attention else (0, 1, 2)
    rows = list(_rows(limits, global_batch, interleave, recomputes))
    return LayoutColumns(rows=np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS)))


def _rows(
    limits: Limits, global_batch: int, most_interleave: int, recomputes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    for tp, pp, cp in _shares(limits):
        dp = limits.devices // (tp * pp * cp)
        if global_batch % dp:
            continue
        zeros = (0,) if dp * cp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
        each = global_batch // dp
        eps = [ep for ep in divisors(limits.experts) if dp * cp % ep == 0]
        for micro_batch in divisors(each, most=LARGEST_MICRO_BATCH):
            accumulation = each // micro_batch
            is_even = pp > 1 and accumulation % pp == limits.layers % pp == 0
            chunks = divisors(limits.layers // pp, most=most_interleave) if is_even else (1,)
            for interleave in chunks:
                for ep, zero, recompute in product(eps, zeros, recomputes):
                    yield (
                        *(dp, tp, pp, cp, ep, zero),
                        *(micro_batch, accumulation, recompute, interleave),
                    )


def _shares(limits: Limits) -> Iterator[tuple[int, int, int]]:
    """How many ranks share a matrix, the layers and a sequence."""
    devices, sequence = limits.devices, limits.sequence or 1
    for tp in divisors(limits.heads):
        for pp in divisors(devices, most=limits.layers):
            cp = 1
            while cp <= LARGEST_CONTEXT:
                whole = cp == 1 or sequence % (2 * cp) == 0
                if whole and devices % (tp * pp * cp) == 0:
                    yield tp, pp, cp
                cp *= 2


def divisors(number: int, *, most: int | None = None) -> tuple[int, ...]:
    """Divisors in ascending order, up to a bound."""
    bound = number if most is None else min(number, most)
    return tuple(value for value in range(1, bound + 1) if number % value == 0)


def require_feasible(layout: Layout, limits: Limits) -> None:
    """Refuse a layout that this model or this number of devices does not allow."""
    reason = impossible(layout, limits)
    if reason is not None:
        raise NotFeasible(f"layout {layout}: {reason}")


def impossible(layout: Layout, limits: Limits) -> str | None:
    """Why a layout cannot be run, or ``None``."""
    return next(_refusals(layout, limits), None)


def _refusals(layout: Layout, limits: Limits) -> Iterator[str]:
    layers, sequence, experts = limits.layers, limits.sequence, limits.experts
    chunks = layout.pp * layout.interleave
    if limits.heads % layout.tp != 0:
        yield f"tp must divide the {limits.heads} heads, got {layout.tp}"
    if chunks > layers:
        yield f"pp x interleave must be at most the {layers} layers, got {chunks}"
    if layout.interleave > 1 and layers % chunks != 0:
        yield f"pp x interleave must divide the {layers} layers, got {chunks}"
    if sequence is not None and layout.cp > 1 and sequence % (2 * layout.cp) != 0:
        yield f"2 x cp must divide the {sequence} tokens of a sequence, got cp = {layout.cp}"
    if experts == 1 and layout.ep != 1:
        yield f"ep must be 1 for a model without experts, got {layout.ep}"
    if experts % layout.ep != 0:
        yield f"ep must divide the {experts} experts, got {layout.ep}"
    if layout.interleave > 1 and layout.accumulation % layout.pp != 0:
        yield f"accumulation must be a multiple of pp = {layout.pp}, got {layout.accumulation}"
    node = limits.devices_per_node
    if layout.world_size != limits.devices:
        yield f"dp x tp x pp x cp must be {limits.devices} devices, got {layout.world_size}"
    if layout.one_process and node is not None and layout.dp > node:
        yield f"one_process=yes must stay within a node of {node} devices, got dp = {layout.dp}"
