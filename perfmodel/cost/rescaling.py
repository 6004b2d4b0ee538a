"""Times of a calibrated device, brought to another one by the ratio of what binds.

An operator of ``flop`` and ``moved`` bytes takes at least ``max(flop / peak, moved / bandwidth)``; the
larger of the two is the binding resource. Its time beyond the start of the call is scaled by that bound
on the target over that on the source: the share of the peak that it reached is kept, and what binds may
change. The start of a call does not get faster with peaks.
"""

from perfmodel.documents.profile import DeviceRates, Rescaling
from perfmodel.errors import UsageError
from perfmodel.units import Flop, Seconds
from perfmodel.workload.operator import Operator

#: Names of element types as data sheets have them.
_PRECISIONS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
#: What PyTorch computes in TF32 by default where the device can (torch.backends.cudnn.allow_tf32).
CONVOLUTION_FP32 = "convolution fp32"


def rescaled_s(
    time_s: Seconds, operator: Operator, rescaling: Rescaling, *, shortest_s: Seconds
) -> Seconds:
    """Time of one call on the target; never above the target's peak. [s]

    Parameters
    ----------
    time_s
        On the source. [s]
    shortest_s
        The shortest call of the operator's family on the source. [s]

    Raises
    ------
    UsageError
        If the data sheet of either device has no rate for the type of the operator.
    """
    before_s = bound_s(operator, rescaling.source)
    after_s = bound_s(operator, rescaling.target)
    if before_s <= 0:
        return time_s
    ratio = after_s / before_s
    start_s = min(time_s, shortest_s if rescaling.start_s is None else rescaling.start_s)
    return max(
        start_s + (time_s - start_s) * ratio,
        min(time_s, before_s) * ratio,  # a start that stays must not beat a slower device's bound
        _products_s(operator, rescaling.target),
    )


def rescaled_stream_s(time_s: Seconds, rescaling: Rescaling, *, num_tensors: int) -> Seconds:
    """Time of an optimizer, which streams memory and starts at least once per tensor. [s]"""
    ratio = rescaling.source.bytes_per_s / rescaling.target.bytes_per_s
    start_s = min(time_s, (rescaling.start_s or 0.0) * num_tensors)
    return start_s + (time_s - start_s) * ratio


def whole_steps_refused(workload: str, device: str) -> UsageError:
    """What to say where a workload was not traced: nothing tells what binds a whole step."""
    return UsageError(
        f"--workload: must be a traced workload file on {device}, got {workload!r}: whole steps of another "
        f"device cannot be scaled; perfmodel trace {workload}, then give its file"
    )


def bound_s(operator: Operator, rates: DeviceRates) -> Seconds:
    """What an operator takes at least on a device: its products or its bytes. [s]"""
    moved_bytes = float(operator.read_bytes + operator.written_bytes)
    return max(_products_s(operator, rates), moved_bytes / rates.bytes_per_s)


def _products_s(operator: Operator, rates: DeviceRates) -> Seconds:
    flop: Flop = operator.flop
    return flop / _flop_per_s(operator, rates) if flop > 0 else 0.0


def _flop_per_s(operator: Operator, rates: DeviceRates) -> float:
    dtype = next((spec.dtype for spec in operator.inputs if spec.dtype in _PRECISIONS), "float32")
    precision = _PRECISIONS[dtype]
    if precision == "fp32" and "convolution" in operator.name:
        rate = rates.flop_per_s.get(CONVOLUTION_FP32)
        if rate is not None:
            return rate
    rate = rates.flop_per_s.get(precision)
    if rate is None:
        known = ", ".join(name for name in rates.flop_per_s if name != CONVOLUTION_FP32)
        raise UsageError(
            f"--device: {rates.name} must have a rate for {precision} ({operator.name}), got {known}; "
            "trace the model with another --precision"
        )
    return rate
