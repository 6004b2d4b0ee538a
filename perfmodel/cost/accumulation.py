"""Gradients of later micro-batches are added to those of the first: a kernel for each, and a call of the host."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Phase

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


def call_s(
    machine: MeasuredMachine,
    workload: MeasuredWorkload,
    micro_batch: int,
    passes_s: tuple[Samples, Samples],
) -> Samples | float:
    """Time of the host to issue an operator of the backward pass: as fitted, or a mean. [s]

    ``passes_s``: Of the host to issue both passes without DDP. What starts no kernel costs little beside the rest.
    """
    if machine.host is not None:
        return machine.host.backward_s
    forward_s, backward_s = passes_s
    if not isinstance(workload, TracedWorkload):
        return (forward_s + backward_s) / max(1, workload.workload.num_operators)
    from perfmodel.cost.traced import issued  # noqa: PLC0415 - slow, and seldom needed

    kernels, _ = issued(workload.trace.at(micro_batch=micro_batch), Phase.BACKWARD)
    return backward_s / max(1, kernels)


def _streamed_s(machine: MeasuredMachine, moved_bytes: Samples) -> Seconds:
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
