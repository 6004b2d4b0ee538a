"""Curves of phases between calibrated settings: numbers of ranks, micro-batches, workloads that never ran."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from perfmodel.machine.measured import (
    PHASE_CURVES,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.units import Seconds
from perfmodel.workload import Workload

#: Uncertainty, in log, of anything borrowed from other workloads: at least this.
_BORROWED_SPREAD: Final = 0.5


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


def contention(workload: MeasuredWorkload, micro_batch: int, ranks: int, *, than: int) -> float:
    """Duration of compute with so many ranks at work beside each other, over that with ``than`` of them.

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


def noise_weights(
    workload: MeasuredWorkload, micro_batch: int
) -> list[tuple[tuple[float, ...], float]]:
    """Step ratios of the calibrated micro-batches beside one, and their shares on a logarithmic scale."""
    entries = sorted(workload.noise, key=lambda noise: noise.micro_batch)
    if not entries:
        return [((), 1.0)]
    low = next((e for e in reversed(entries) if e.micro_batch <= micro_batch), entries[0])
    high = next((e for e in entries if e.micro_batch >= micro_batch), low)
    if low.micro_batch >= high.micro_batch:
        return [(low.ratios, 1.0)]
    share = math.log(micro_batch / low.micro_batch) / math.log(high.micro_batch / low.micro_batch)
    return [(low.ratios, 1 - share), (high.ratios, share)]


def borrowed_profile(profile: MeasuredMachine, workload: Workload) -> MeasuredWorkload:
    """Curves for a workload that was never run, scaled from the calibrated ones by their flop.

    Each calibrated workload tells how long a FLOP takes at its largest batch; their spread is the
    uncertainty. A trace of the operators would do far better; until then this is an extrapolation and
    says so.
    """
    donors = profile.workloads
    batches = sorted({int(p.at) for donor in donors for p in donor.phases[0].forward})
    ends = (batches[0], batches[-1])
    # Backward issues about twice as many operators as forward.
    issue_s = profile.dispatch_s * workload.num_operators
    host = {"forward": issue_s / 3, "backward": issue_s * 2 / 3, "optimizer": 0.0}

    def line(constant_s: float, slope_s: float, spread: float) -> tuple[CurvePoint, ...]:
        return tuple(
            CurvePoint(at=batch, time_s=constant_s + slope_s * batch, relative_error=spread)
            for batch in ends
        )

    curves = {"input": line(0.0, 0.0, 0.0)}
    for name in ("forward", "backward"):
        seconds_per_flop, spread = _seconds_per_flop(donors, name)
        constant_s = 0.0 if profile.asynchronous else host[name]
        curves[name] = line(constant_s, _flop(workload, name) * seconds_per_flop, spread)
    per_parameter_s = float(
        np.median([d.phases[0].optimizer[0].time_s / d.workload.num_parameters for d in donors])
    )
    curves["optimizer"] = line(workload.num_parameters * per_parameter_s, 0.0, _BORROWED_SPREAD)
    if profile.asynchronous:
        curves |= {
            f"dispatch_{name}": line(seconds, 0.0, _BORROWED_SPREAD)
            for name, seconds in host.items()
        }
    return MeasuredWorkload(
        workload=workload,
        phases=tuple(
            PhaseCurves(world_size=phases.world_size, **curves) for phases in donors[0].phases
        ),
        noise=max((donor.noise for donor in donors), key=len),
        rank_spread=max(donor.rank_spread for donor in donors),
    )


def _flop(workload: Workload, phase: str) -> float:
    return workload.forward_flop if phase == "forward" else workload.backward_flop


def _seconds_per_flop(donors: tuple[MeasuredWorkload, ...], phase: str) -> tuple[float, float]:
    """Geometric mean over workloads, at their largest batch, and its spread in log. [s/FLOP]"""
    largest = [(getattr(d.phases[-1], phase)[-1], _flop(d.workload, phase)) for d in donors]
    logs = [math.log(point.time_s / (point.at * flop)) for point, flop in largest if flop > 0]
    return math.exp(float(np.mean(logs))), max(_BORROWED_SPREAD, float(np.std(logs)))
