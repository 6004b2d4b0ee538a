"""Changes of a machine: pure functions from profile to profile.

A changed profile goes through the same model as a measured one, with the same random draws, so that
two predictions differ by the change alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from perfmodel.cost.collectives import message_bytes, num_messages
from perfmodel.cost.terms import Samples
from perfmodel.errors import CalibrationUnavailable
from perfmodel.machine.measured import (
    CollectiveProfile,
    CurvePoint,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
)
from perfmodel.units import BytesPerSecond, Seconds

DEVICE_PHASES: Final = ("forward", "backward", "optimizer")
HOST_PHASES: Final = ("input", "dispatch_forward", "dispatch_backward", "dispatch_optimizer")
_DEVICE_DDP_COSTS: Final = ("bucket_s", "bucket_s_per_byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What messages between two ranks of the all-reduce ring say about the network."""

    latency_s: Seconds
    """Shortest message. [s]"""
    bytes_per_s: BytesPerSecond
    """Rate of the largest message beyond that; equals the busbw of a large all-reduce. [B/s]"""


def link_of(profile: MeasuredMachine) -> Link:
    """Latency and bandwidth of the measured ring.

    Raises
    ------
    CalibrationUnavailable
        If no two ranks were measured together.
    """
    messages = sorted(
        _messages(entry for entry in profile.collectives if entry.collective == "all_reduce")
    )
    if not messages:
        raise CalibrationUnavailable(
            "--set network: needs a measured all-reduce, but the profile holds one rank; calibrate "
            "with --nproc 2 or more"
        )
    latency_s = min(time_s for _, time_s in messages)
    size, time_s = messages[-1]
    return Link(latency_s=latency_s, bytes_per_s=size / max(time_s - latency_s, 1e-12))


def with_link(profile: MeasuredMachine, link: Link) -> MeasuredMachine:
    """All-reduces and broadcasts over links of another latency and bandwidth.

    Each measured message is split into the shortest message's time and the rest; the first is
    scaled by the latency, the second by the bandwidth, so that regimes between them keep their form.
    """
    was = link_of(profile)
    slower = link.latency_s / was.latency_s
    thinner = was.bytes_per_s / link.bytes_per_s

    def changed(entry: CollectiveProfile) -> CollectiveProfile:
        if entry.collective not in ("all_reduce", "broadcast") or entry.world_size == 1:
            return entry
        least_s = min(point.time_s for point in entry.points)
        return _with_times(entry, lambda time_s: least_s * slower + (time_s - least_s) * thinner)

    return replace(profile, collectives=tuple(map(changed, profile.collectives)))


def with_gradient_share(profile: MeasuredMachine, share: float) -> MeasuredMachine:
    """All-reduces that send this share of the gradients' bytes; converting them costs nothing."""

    def changed(entry: CollectiveProfile) -> CollectiveProfile:
        if entry.collective != "all_reduce":
            return entry
        points = tuple(replace(p, at=p.at / share) for p in entry.points)
        return replace(entry, points=points)

    return replace(profile, collectives=tuple(map(changed, profile.collectives)))


def with_device_speed(profile: MeasuredMachine, factor: float) -> MeasuredMachine:
    """Copying gradients into buckets takes ``1 / factor`` of the time; for phases see ``scaled``."""
    ddp = profile.ddp
    scale = np.array([1 / factor if name in _DEVICE_DDP_COSTS else 1.0 for name in ddp.names])
    values: Samples = np.array(ddp.values) * scale
    draws: Samples = np.array(ddp.draws) * scale
    changed = replace(
        ddp, values=tuple(values.tolist()), draws=tuple(tuple(row) for row in draws.tolist())
    )
    return replace(profile, ddp=changed)


def scaled(
    workload: MeasuredWorkload, names: Iterable[str], factor: float, *, relative_error: float = 0.0
) -> MeasuredWorkload:
    """Some phases take ``factor`` times as long, with so much more uncertainty (in log)."""
    names = tuple(names)

    def point(was: CurvePoint) -> CurvePoint:
        error = float(np.hypot(was.relative_error, relative_error))
        return replace(was, time_s=was.time_s * factor, relative_error=error if was.time_s else 0.0)

    def phases(was: PhaseCurves) -> PhaseCurves:
        changed: dict[str, Any] = {name: tuple(map(point, getattr(was, name))) for name in names}
        return replace(was, **changed)

    return replace(workload, phases=tuple(map(phases, workload.phases)))


def with_rank_noise(workload: MeasuredWorkload, factor: float) -> MeasuredWorkload:
    """Ranks and steps that differ, in log, by ``factor`` times as much."""
    noise = tuple(
        replace(entry, ratios=tuple(ratio**factor for ratio in entry.ratios))
        for entry in workload.noise
    )
    return replace(workload, noise=noise, rank_spread=workload.rank_spread * factor)


def matrix_speed(profile: MeasuredMachine, dtype: str) -> float:
    """Rate of matrix products and convolutions in a type over that in fp32, geometric mean.

    Raises
    ------
    CalibrationUnavailable
        If no kernel was timed in both.
    """
    rates = {
        (rate.probe, rate.shape, rate.dtype): rate.flop_per_s
        for rate in profile.rates
        if rate.flop_per_s > 0
    }
    logs = [
        np.log(rates[probe, shape, dtype] / rate)
        for (probe, shape, kind), rate in rates.items()
        if kind == "fp32" and (probe, shape, dtype) in rates
    ]
    if not logs:
        known = ", ".join(sorted({kind for _, _, kind in rates})) or "none"
        raise CalibrationUnavailable(
            f"--set precision: the profile must hold kernels timed in fp32 and in {dtype}, got "
            f"{known}; trace the workload with --precision instead"
        )
    return float(np.exp(np.mean(logs)))


def _messages(entries: Iterable[CollectiveProfile]) -> Iterable[tuple[float, Seconds]]:
    """Sizes and times of single messages."""
    for entry in entries:
        if entry.world_size > 1:
            for point in entry.points:
                yield (
                    message_bytes(entry.collective, point.at, entry.world_size),
                    point.time_s / num_messages(entry.collective, entry.world_size),
                )


def _with_times(entry: CollectiveProfile, time: Callable[[Seconds], Seconds]) -> CollectiveProfile:
    points = tuple(replace(p, time_s=time(p.time_s)) for p in entry.points)
    return replace(entry, points=points)
