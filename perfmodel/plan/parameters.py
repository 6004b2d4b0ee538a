"""Every parameter of a profile as a number with its doubt, so that two profiles can be compared."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perfmodel.documents.profile import PHASE_CURVES, ProfileDocument, WorkloadProfile
from perfmodel.units import Seconds, format_bytes

#: Doubt is never below this, in log: clocks and rounding.
SMALLEST_ERROR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A fitted value."""

    value: float
    unit: str
    error: float
    """Standard error: of the logarithm, or of the value if ``is_additive``."""
    is_additive: bool = False


def estimates(profile: ProfileDocument) -> dict[str, Estimate]:
    """Parameters by name.

    Steps and phases carry, beside their own error, that of the round, which no number of settings
    averages away. Kernels alone carry the spread of the machine's speed over visits.
    """
    found: dict[str, Estimate] = {}
    for workload in profile.workloads:
        found |= dict(_phases(workload, profile.round_error))
    found |= dict(_collectives(profile))
    found |= dict(_steps(profile))
    found |= dict(_ddp(profile))
    found |= dict(_kernels(profile))
    return found


def _phases(workload: WorkloadProfile, round_error: float) -> Iterator[tuple[str, Estimate]]:
    for phases in workload.phases:
        for name in PHASE_CURVES:
            for point in getattr(phases, name):
                where = f"{workload.workload.name} {name.replace('_', ' ')}"
                if point.time_s > 0:
                    yield (
                        f"{where}, micro-batch {point.at:g}, {_ranks(phases.world_size)}",
                        _logarithmic(point.time_s, point.relative_error, round_error),
                    )


def _collectives(profile: ProfileDocument) -> Iterator[tuple[str, Estimate]]:
    for entry in profile.collectives:
        for point in entry.points:
            yield (
                f"{entry.collective} of {format_bytes(point.at)}, {_ranks(entry.world_size)}",
                _logarithmic(point.time_s, point.relative_error),
            )


def _steps(profile: ProfileDocument) -> Iterator[tuple[str, Estimate]]:
    for step in profile.steps:
        cap = "" if step.bucket_cap_mb is None else f", cap {step.bucket_cap_mb:g} MiB"
        yield (
            (
                f"step {step.workload}, micro-batch {step.micro_batch}, {_ranks(step.world_size)}, "
                f"{step.synchronisation}{cap}"
            ),
            _logarithmic(step.step_s, step.relative_error, profile.round_error),
        )


def _ddp(profile: ProfileDocument) -> Iterator[tuple[str, Estimate]]:
    ddp = profile.ddp
    spreads = np.array(ddp.draws).std(axis=0)
    units = {"bucket_s": "s", "bucket_s_per_byte": "s/B"}
    for name, value, spread, determined in zip(
        ddp.names, ddp.values, spreads, ddp.determined, strict=True
    ):
        if determined:
            yield (
                f"DDP {name}",
                Estimate(
                    value=value,
                    unit=units.get(name, "fraction"),
                    error=max(float(spread), SMALLEST_ERROR * abs(value)),
                    is_additive=True,
                ),
            )


def _kernels(profile: ProfileDocument) -> Iterator[tuple[str, Estimate]]:
    for rate in profile.rates:
        shape = "x".join(map(str, rate.shape))
        yield (
            f"kernel {rate.probe} {rate.dtype} {shape}",
            _logarithmic(rate.time_s, profile.speed_spread),
        )


def _logarithmic(time_s: Seconds, *errors: float) -> Estimate:
    return Estimate(value=time_s, unit="s", error=max(SMALLEST_ERROR, math.hypot(*errors)))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
