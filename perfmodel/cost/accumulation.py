"""Gradients of later micro-batches are added to those of the first: a kernel for each, and a call of the host."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.layout import Layout
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import ELEMENT_BYTES, Operator, Phase, TensorSpec

#: Operators, and bytes that move for each byte of a gradient: an addition reads two and writes one.
_ADD: Final = ("aten.add_.Tensor", 2, 3.0)
_DIVIDE: Final = ("aten.div_.Scalar", 1, 2.0)
#: Only bytes count.
_DTYPE: Final = "float32"


def accumulation_s(
    machine: MeasuredMachine, layout: Layout, sizes_bytes: Sequence[Bytes]
) -> Seconds:
    """Time of the device to add up gradients of such sizes, in the mean of the micro-batches of a step. [s]

        T = sum over gradients of ((m - 1) add(size) + [pp > 1] divide(size)) / m

    The schedule of a pipeline divides each sum by the number of micro-batches.
    """
    count = layout.accumulation
    if count == 1:
        return 0.0
    total_s = (count - 1) * _kernels_s(machine, _ADD, sizes_bytes)
    if layout.pp > 1:
        total_s += _kernels_s(machine, _DIVIDE, sizes_bytes)
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


def _kernels_s(
    machine: MeasuredMachine, kind: tuple[str, int, float], sizes_bytes: Sequence[Bytes]
) -> Seconds:
    """Time of an operator on gradients of such sizes, one after another. [s]

    By the curves of operators; where none was timed, by the kernels over memory.
    """
    name, num_inputs, passes = kind
    if machine.operators is None:
        return _streamed_s(machine, passes * np.array(sizes_bytes, np.float64))
    from perfmodel.cost.operators import OperatorDurations  # noqa: PLC0415 - slow

    calls = []
    for size_bytes in sizes_bytes:
        held = TensorSpec(shape=(-(-size_bytes // ELEMENT_BYTES[_DTYPE]),), dtype=_DTYPE)
        calls.append((Operator.of(name, (held,) * num_inputs, (), "[]", mutated=(0,)), 1))
    durations = OperatorDurations(machine.operators, use_measured=False)
    return durations.phase(calls, Phase.BACKWARD).time_s


def _streamed_s(machine: MeasuredMachine, moved_bytes: Samples) -> Seconds:
    """Time of kernels that move so many bytes, one after another. [s]

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
    costs = machine.device_costs
    return 0.0 if costs is None else float(moved_bytes.sum() / costs.bytes_per_s)
