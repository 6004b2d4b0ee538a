"""What no machine does: units that are wrong by a prefix, runs that contradict each other."""

from dataclasses import fields
from typing import Final

import numpy as np

from perfmodel.cost.jobs import Column, Jobs
from perfmodel.cost.layout_memory import tensor_bytes
from perfmodel.units import format_bytes

FASTEST_FLOP_PER_S: Final = 2.5e15
"""Above the dense bf16 peak of every device sold by 2026 (B200: 2.25e15, its data sheet)."""
SLOWEST_FLOP_PER_S: Final = 1e10
"""One core of a CPU is faster; slower steps are waiting, or not in the unit that is claimed."""
LEAST_SHARE_OF_PEAK: Final = 1e-3
"""Half of all runs of a table are above: normal published ones reach 3 to 60 % of the peak, degraded 0.1 %."""
OUT_OF_PROPORTION: Final = 30.0
"""Published peaks are within a factor of 6 of the formula."""
FAR_BEHIND: Final = 100.0
"""Normal published runs of one table are within a factor of 20 of each other; one in milliseconds is not."""
CONTRADICTION: Final = 1.5
"""Ratio of two step times of the same job from which on they contradict each other."""


def _speed(jobs: Jobs, step_s: Column) -> Column:
    return np.asarray(jobs.model_flop / jobs.devices / step_s)


def wrong_unit(jobs: Jobs, step_s: Column) -> dict[int, str]:
    """Rows (from 0) whose step time cannot be in seconds, and why."""
    speed = _speed(jobs, step_s)
    found = {}
    for i in np.flatnonzero((speed > FASTEST_FLOP_PER_S) | (speed < SLOWEST_FLOP_PER_S)).tolist():
        rate = f"{speed[i]:.3g} FLOP/s per device"
        why = f"only {rate}; the column looks 1000x too large (give its unit)"
        if speed[i] > FASTEST_FLOP_PER_S:
            why = f"{rate}, more than any has; the column looks 1000x too small (give its unit)"
        found[i] = f"step time {step_s[i]:g} s means {why}"
    return found


def wrong_memory_unit(jobs: Jobs, peak_bytes: Column) -> dict[int, str]:
    """Rows (from 0) whose printed peak cannot be in bytes, and why; rows without one are fine."""
    share = peak_bytes / tensor_bytes(jobs)

    odd = (share > OUT_OF_PROPORTION) | (share < 1 / OUT_OF_PROPORTION)
    return {
        i: f"a peak of {format_bytes(peak_bytes[i])} is {share[i]:.2g} times what the tensors of rank 0 "
        f"take; the column looks 1000x too {'large' if share[i] > 1 else 'small'} (give its unit)"
        for i in np.flatnonzero(odd).tolist()
    }


def slow_for_device(jobs: Jobs, step_s: Column, peak_flop_per_s: float) -> str | None:
    """Why all step times together cannot be in seconds on a device with this peak, if so."""
    share = float(np.median(_speed(jobs, step_s))) / peak_flop_per_s
    if share >= LEAST_SHARE_OF_PEAK:
        return None
    return (
        f"half of the step times mean less than {share:.2g} of the device's peak; the column looks 1000x "
        "too large (seconds are not milliseconds: give its unit), or sequences 1000x too short"
    )


def fast_for_device(jobs: Jobs, step_s: Column, peak_flop_per_s: float) -> dict[int, str]:
    """Rows (from 0) that are faster than a device with this 16-bit peak can be, and by how much."""
    share = _speed(jobs, step_s) / (peak_flop_per_s * jobs.matmul_ratio)
    return {
        int(i): f"step time {step_s[i]:.4g} s means {share[i]:.3g} times the peak"
        for i in np.flatnonzero(share > 1)
    }


def far_behind(jobs: Jobs, step_s: Column) -> dict[int, str]:
    """Rows (from 0) that are far slower than the others for their work, and by how much."""
    speed = _speed(jobs, step_s)
    behind = float(np.median(speed)) / speed
    return {
        row: f"step time {step_s[row]:g} s is {behind[row]:,.0f} times that of the other runs for its work"
        for row in np.flatnonzero(behind > FAR_BEHIND).tolist()
    }


def contradictions(jobs: Jobs, step_s: Column) -> list[tuple[int, int]]:
    """Pairs of rows (from 0) that are the same job with step times too far apart."""
    suspect = np.abs(np.subtract.outer(np.log(step_s), np.log(step_s))) > np.log(CONTRADICTION)
    for field in fields(Jobs):
        column = getattr(jobs, field.name)
        suspect &= np.equal.outer(column, column)
    return [(int(i), int(j)) for i, j in np.argwhere(np.triu(suspect, 1))]
