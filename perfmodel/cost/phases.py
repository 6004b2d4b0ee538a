"""Curves of compute by the number of ranks at work, which share processors or a path to memory."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perfmodel.layout import Layout
from perfmodel.machine.measured import (
    PHASE_CURVES,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.units import Seconds


def phases_at(workload: MeasuredWorkload, world_size: int) -> PhaseCurves:
    """Curves between the measured world sizes, which processors share; a full node beyond the largest."""
    ordered = sorted(workload.phases, key=lambda phases: phases.world_size)
    low = [p for p in ordered if p.world_size <= world_size][-1]
    high = next((p for p in ordered if p.world_size >= world_size), low)
    if low.world_size == high.world_size:
        return _without_dips(low)
    weight = (world_size - low.world_size) / (high.world_size - low.world_size)

    def between(name: str) -> tuple[CurvePoint, ...]:
        known = {point.at: point.time_s for point in getattr(low, name)}
        return tuple(
            replace(p, time_s=known.get(p.at, p.time_s) * (1 - weight) + p.time_s * weight)
            for p in getattr(high, name)
        )

    found = {name: between(name) for name in PHASE_CURVES}
    return _without_dips(PhaseCurves(world_size=world_size, **found))


def phases_under(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout
) -> PhaseCurves:
    """Curves of the ranks that compute together under a layout; those that share matrices do so in step."""
    ranks = layout.beside.world_size
    return phases_at(workload, in_step(machine, workload, ranks) if layout.tp > 1 else ranks)


def in_step(machine: MeasuredMachine, workload: MeasuredWorkload, ranks: int) -> int:
    """Number of ranks that take as long as these, all of which wait for each other.

    Three on two processors work one after another, as four do: between measured numbers the larger.
    Ranks with a processor each take no turns.
    """
    if min(ranks, machine.ranks_per_node) <= _processors(machine):
        return ranks
    return min((p.world_size for p in workload.phases if p.world_size >= ranks), default=ranks)


def _processors(machine: MeasuredMachine) -> float:
    """What the ranks of a node share; 0 where nobody counted, infinite where each has a device."""
    if machine.device_kind != "cpu":
        return math.inf
    cpu = machine.environment.get("cpu")
    known = [cpu.get("usable_cores"), cpu.get("quota_cores")] if isinstance(cpu, dict) else []
    return min((n for n in known if isinstance(n, (int, float))), default=0)


def contention(workload: MeasuredWorkload, micro_batch: int, ranks: int, *, than: int) -> float:
    """Duration of compute with ``ranks`` ranks at work beside each other, over that with ``than`` of them.

    Above 1 where ranks share processors or a path to memory; what a library works out on the processors is
    slowed alike.
    """

    def pass_s(world_size: int) -> Seconds:
        phases = phases_at(workload, world_size)
        passes = zip(phases.forward, phases.backward, strict=True)
        nearest = min(passes, key=lambda pair: abs(math.log(pair[0].at / micro_batch)))
        return sum(point.time_s for point in nearest)

    return pass_s(ranks) / (pass_s(than) or 1.0)


def _without_dips(phases: PhaseCurves) -> PhaseCurves:
    """Curves in which more samples never take less time: dips are noise.

    The backward pass, which exchanges may hide, rises by itself; all that nothing hides, together.
    """
    names = ("input", "forward", "backward", "optimizer")
    curves = {name: sorted(getattr(phases, name), key=lambda point: point.at) for name in names}
    if len({tuple(point.at for point in curve) for curve in curves.values()}) > 1:
        return phases
    bare = [curves[name] for name in ("forward", "optimizer", "input")]
    bare_s = [sum(point.time_s for point in points) for points in zip(*bare, strict=True)]
    missing_s = {
        "forward": _to_rise(bare_s),
        "backward": _to_rise([point.time_s for point in curves["backward"]]),
    }
    if not any(any(more_s) for more_s in missing_s.values()):
        return phases
    filled: dict[str, Any] = {
        name: tuple(
            replace(point, time_s=point.time_s + more_s)
            for point, more_s in zip(curves[name], of_phase_s, strict=True)
        )
        for name, of_phase_s in missing_s.items()
    }
    return replace(phases, **filled)


def _to_rise(time_s: Sequence[Seconds]) -> list[Seconds]:
    """What each time lacks to the longest one before it. [s]"""
    highest = itertools.accumulate(time_s, max)
    return [high_s - each_s for high_s, each_s in zip(highest, time_s, strict=True)]
