"""What it takes to add gradients of later micro-batches to those of the first: kernels, and calls of the host."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import Phase

#: Bytes that move for each byte of a gradient: an addition reads two and writes one, a division reads and writes one.
_ADDED: Final = 3.0
_DIVIDED: Final = 2.0
#: Uncertainty, in log, of kernels that were read off others over memory, and of a call of one operator beside the
#: mean of many: priors.
KERNEL_ERROR: Final = 0.1
_CALL_ERROR: Final = 0.3
#: Time of the host for a view over that of an operator with a kernel, where no law of the host tells: a prior.
_VIEW: Final = 0.3


def additions(machine: MeasuredMachine, layout: Layout, sizes_bytes: Sequence[Bytes]) -> Seconds:
    """Time of the device to add up gradients of such sizes, in the mean of the micro-batches of a step. [s]

        T = sum over gradients of ((m - 1) add(size) + [pp > 1] divide(size)) / m

    By the kernels over memory, as large as gradients are. The schedule of a pipeline divides each sum by the number
    of micro-batches. On a processor T is 0: the pages of a new gradient, which a backward pass of one micro-batch was
    measured with, take as long as to add it to one that is there.
    """
    count = layout.accumulation
    if count == 1 or not (machine.asynchronous or machine.law is not None):
        return 0.0
    sizes = np.array(sizes_bytes, np.float64)
    total_s = (count - 1) * _streamed_s(machine, _ADDED * sizes)
    if layout.pp > 1:
        total_s += _streamed_s(machine, _DIVIDED * sizes)
    return total_s / count


def calls_of_additions(
    machine: MeasuredMachine,
    workload: MeasuredWorkload,
    layout: Layout,
    passes_s: tuple[Samples, Samples],
) -> tuple[Samples | float, float]:
    """Time of the host for all gradients, in the mean of the micro-batches of a step, and its error in log. [s]

        T = gradients * ((m - 1) added + [pp > 1] call) / m,  added = call - view where no addition was timed

    The first gradient is taken as it is, through a view, and none is added to it.

    ``passes_s``: Of the host to issue both passes without DDP.
    """
    count = layout.accumulation
    call_s, view_s = _call_and_view_s(machine, workload, layout.micro_batch, passes_s)
    host, added_s = machine.host, np.maximum(call_s - view_s, 0.0)
    error = math.hypot(_CALL_ERROR, 0.0 if host is None else host.relative_error)
    if host is not None and host.addition_s is not None:
        added_s, error = host.addition_s, host.addition_log_error
    each_s = (count - 1) * added_s + (layout.pp > 1) * call_s
    return len(workload.workload.parameters) * each_s / count, error


def _call_and_view_s(
    machine: MeasuredMachine,
    workload: MeasuredWorkload,
    micro_batch: int,
    passes_s: tuple[Samples, Samples],
) -> tuple[Samples | float, Samples | float]:
    """Time of the host for an operator with a kernel in the backward pass, and for a view. [s]

    As fitted, or the backward pass is all calls and views of its trace; else the mean of both passes.
    """
    host = machine.host
    if host is not None:
        return host.backward_s, host.view_s
    forward_s, backward_s = passes_s
    if not isinstance(workload, TracedWorkload):
        return (forward_s + backward_s) / max(1, workload.workload.num_operators), 0.0
    from perfmodel.cost.traced import issued  # noqa: PLC0415 - slow, and seldom needed

    counts = issued(workload.trace.at(micro_batch=micro_batch), Phase.BACKWARD)
    kernels, views = counts["backward_s"], counts["view_s"]
    equal_s = backward_s / max(1.0, kernels + _VIEW * views)
    return equal_s, _VIEW * equal_s


def _streamed_s(machine: MeasuredMachine, moved_bytes: Samples) -> Seconds:
    """Time of kernels that move these bytes, one after another. [s]

    On the line through the kernels over memory that were timed; at the bandwidth of the data sheet where none was.
    """
    timed = sorted(
        (rate.bytes_per_s * rate.time_s, rate.time_s)
        for rate in machine.rates
        if rate.probe == "memory"
    )
    if len(timed) > 1:
        sizes, times_s = np.array(timed).T
        start_s = times_s[0] - sizes[0] * (times_s[1] - times_s[0]) / (sizes[1] - sizes[0])
        found_s = np.interp(moved_bytes, [0.0, *sizes], [max(0.0, start_s), *times_s])
        return float(np.sum(found_s * np.maximum(1.0, moved_bytes / sizes[-1])))
    costs = machine.law
    return 0.0 if costs is None else float(moved_bytes.sum() / costs.bytes_per_s)
