"""Predictions beside measurements: signed errors, coverage, speed-ups; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.fit.steps import Repetition, estimate, to_speed
from perfmodel.arrays import FloatArray
from perfmodel.documents.observation import RunSetting
from perfmodel.documents.verdicts import ComparedSetting, ComparedSpeedup, ErrorSummary, Repeat
from perfmodel.layout.layout import Synchronisation
from perfmodel.machine.measured import ASSUMED_SENSITIVITY, MeasuredMachine
from perfmodel.statistics.interval import Interval
from perfmodel.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting, measured now."""

    value_s: Seconds
    """At the machine speed of the calibration."""
    raw_s: Seconds
    relative_error: float
    num_repetitions: int


def measured(repetitions: Sequence[Repetition], *, profile: MeasuredMachine) -> Measured:
    """Typical step over repetitions, as the clock showed it and at the machine speed of the calibration.

    Each repetition is brought to that speed as far as the workload followed it then. A machine that differs
    from its calibration as a whole is followed no further than one that differs from minute to minute:
    both times it is mostly a neighbour on the same core (see the record of ``validate models``, seventh).
    """
    setting = repetitions[0].setting
    workload = profile.workload(setting.workload)
    sensitivity = workload.speed_sensitivity if workload is not None else ASSUMED_SENSITIVITY
    at_speed = estimate(
        [
            v.step_s * to_speed(v, speed_probe_s=profile.speed_probe_s, sensitivity=sensitivity)
            for v in repetitions
        ]
    )
    return Measured(
        value_s=at_speed.value_s,
        raw_s=estimate([v.step_s for v in repetitions]).value_s,
        relative_error=at_speed.relative_error,
        num_repetitions=len(repetitions),
    )


def compare_setting(
    setting: RunSetting, predicted_s: Interval, found: Measured, *, profile: MeasuredMachine
) -> ComparedSetting:
    """One row of the table."""
    return ComparedSetting(
        setting=setting,
        predicted_s=predicted_s,
        measured_s=found.value_s,
        measured_raw_s=found.raw_s,
        num_repetitions=found.num_repetitions,
        measured_relative_error=found.relative_error,
        signed_error=predicted_s.signed_error(found.value_s),
        signed_error_raw=predicted_s.signed_error(found.raw_s),
        is_covered=predicted_s.holds(found.value_s),
        is_covered_raw=predicted_s.holds(found.raw_s),
        is_extrapolated=is_extrapolated(setting, profile),
    )


def is_extrapolated(setting: RunSetting, profile: MeasuredMachine) -> bool:
    """Whether a micro-batch lies beyond those that were calibrated for its workload."""
    workload = profile.workload(setting.workload)
    if workload is None:
        return True
    batches = [point.at for point in workload.phases[0].forward]
    return not min(batches) <= setting.micro_batch <= max(batches)


def baseline_of(setting: RunSetting) -> RunSetting:
    """The same micro-batch on one device on its own, every step an optimizer step."""
    return replace(
        setting,
        world_size=1,
        accumulation=1,
        synchronisation=Synchronisation.NONE,
        bucket_cap_mb=None,
    )


def compare_speedup(
    setting: RunSetting, predicted: Interval, found: Mapping[RunSetting, Measured]
) -> ComparedSpeedup:
    """Throughput over that of the baseline, predicted and measured."""
    baseline = baseline_of(setting)
    ratio = setting.global_batch / baseline.global_batch
    speedup = ratio * found[baseline].value_s / found[setting].value_s
    speedup_raw = ratio * found[baseline].raw_s / found[setting].raw_s
    return ComparedSpeedup(
        workload=setting.workload,
        world_size=setting.world_size,
        micro_batch=setting.micro_batch,
        accumulation=setting.accumulation,
        bucket_cap_mb=setting.bucket_cap_mb,
        predicted=predicted,
        measured=speedup,
        measured_raw=speedup_raw,
        signed_error=predicted.signed_error(speedup),
        signed_error_raw=predicted.signed_error(speedup_raw),
    )


def compare_repeat(setting: RunSetting, calibrated_s: Seconds, found: Measured) -> Repeat:
    """A calibrated setting, then and now."""
    return Repeat(
        setting=setting,
        calibrated_s=calibrated_s,
        measured_s=found.value_s,
        measured_raw_s=found.raw_s,
        signed_error=calibrated_s / found.value_s - 1,
        signed_error_raw=calibrated_s / found.raw_s - 1,
    )


def summarise(signed_errors: Sequence[float] | FloatArray) -> ErrorSummary:
    """Sum up at least one error.

    Raises
    ------
    ValueError
        If there is none.
    """
    errors = np.asarray(signed_errors, dtype=np.float64)
    if not errors.size:
        raise ValueError("signed_errors must hold at least one error, got none")
    return ErrorSummary(
        num_settings=errors.size,
        bias=float(errors.mean()),
        mape=float(np.abs(errors).mean()),
        median_absolute=float(np.median(np.abs(errors))),
        worst_absolute=float(np.abs(errors).max()),
    )


def summarise_any(signed_errors: Sequence[float]) -> ErrorSummary | None:
    """Sum up errors; None without any."""
    return summarise(signed_errors) if signed_errors else None


def fraction(flags: Iterable[bool]) -> float:
    """Share of what is true, such as intervals that held what was measured; of at least one."""
    return float(np.mean(list(flags)))
