"""Gradients of later micro-batches are added to those of the first: a kernel for each, and a call of the host."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import Bytes, Seconds

#: Bytes that move for each byte of a gradient: an addition reads two and writes one, a division reads and writes.
_ADDED: Final = 3.0
_DIVIDED: Final = 2.0


def accumulation_s(
    machine: MeasuredMachine, layout: Layout, sizes_bytes: Sequence[Bytes]
) -> Seconds:
    """Time of the device to add up gradients of such sizes, in the mean of the micro-batches of a step. [s]

        T = sum over gradients of ((m - 1) stream(3 size) + [pp > 1] stream(2 size)) / m

    The schedule of a pipeline divides each sum by the number of micro-batches.
    """
    count = layout.accumulation
    if count == 1:
        return 0.0
    sizes = np.array(sizes_bytes, np.float64)
    total_s = (count - 1) * _streamed_s(machine, _ADDED * sizes)
    if layout.pp > 1:
        total_s += _streamed_s(machine, _DIVIDED * sizes)
    return total_s / count


def accumulation_calls(layout: Layout) -> float:
    """Calls of the host for each gradient, in the mean of the micro-batches of a step."""
    count = layout.accumulation
    return 0.0 if count == 1 else (count - 1 + (layout.pp > 1)) / count


def _streamed_s(machine: MeasuredMachine, moved_bytes: np.ndarray) -> Seconds:
    """Time of kernels that move so many bytes, one after another. [s]

    On the line through the kernels over memory that were timed; at the bandwidth of the data sheet where none was.
    """
    timed = sorted(
        (rate.bytes_per_s * rate.time_s, rate.time_s)
        for rate in machine.rates
        if rate.probe == "memory"
    )
    if machine.rescaling is not None:
        return float(moved_bytes.sum() / machine.rescaling.target.bytes_per_s)
    if len(timed) > 1:
        sizes, times_s = np.array(timed).T
        start_s = times_s[0] - sizes[0] * (times_s[1] - times_s[0]) / (sizes[1] - sizes[0])
        found_s = np.interp(moved_bytes, [0.0, *sizes], [max(0.0, start_s), *times_s])
        return float(np.sum(found_s * np.maximum(1.0, moved_bytes / sizes[-1])))
    costs = machine.device_costs
    return 0.0 if costs is None else float(moved_bytes.sum() / costs.bytes_per_s)
