"""Compute, copies and dispatch alone on one rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from calibrate.plan import ComputeProbe
from calibrate.probes.session import Session, repeats_within
from perfmodel.units import Seconds

_DTYPES: Final = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_CALLS_PER_DISPATCH_SAMPLE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """Work of one call, and how many operators one call issues."""

    act: Callable[[], object]
    flop: float = 0.0
    moved_bytes: float = 0.0
    calls: int = 1


def measure_compute(
    session: Session, probe: ComputeProbe, *, target_s: Seconds
) -> tuple[TimedKernel, list[Seconds]]:
    """Time repeats of one kernel on this rank alone. [s]"""
    kernel = _KERNELS[probe.probe](session, probe)
    # Matrix products and convolutions have a switch each.
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    _allow_tf32(matmul=probe.dtype == "tf32", convolution=probe.dtype == "tf32")
    try:
        warm_s = session.time_repeats(kernel.act, repeats=3)
        repeats = repeats_within(target_s, warm_s[1:], minimum=5, maximum=200)
        durations_s = session.time_repeats(kernel.act, repeats=repeats)
    finally:
        _allow_tf32(matmul=allowed[0], convolution=allowed[1])
    return kernel, [duration_s / kernel.calls for duration_s in durations_s]


def _allow_tf32(*, matmul: bool, convolution: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = convolution


def _matmul(session: Session, probe: ComputeProbe) -> TimedKernel:
    rows, inner, columns = probe.shape
    dtype = _DTYPES[probe.dtype]
    left = torch.randn(rows, inner, device=session.device).to(dtype)
    right = torch.randn(inner, columns, device=session.device).to(dtype)
    return TimedKernel(
        act=lambda: left @ right,
        flop=2.0 * rows * inner * columns,
        moved_bytes=float(left.element_size() * (rows * inner + inner * columns + rows * columns)),
    )


def _convolution(session: Session, probe: ComputeProbe) -> TimedKernel:
    batch, channels, height, width = probe.shape
    dtype = _DTYPES[probe.dtype]
    layer = nn.Conv2d(channels, channels, 3, padding=1, device=session.device, dtype=dtype)
    inputs = torch.randn(batch, channels, height, width, device=session.device).to(dtype)

    def act() -> object:
        with torch.no_grad():
            return layer(inputs)

    return TimedKernel(
        act=act,
        flop=2.0 * batch * height * width * channels * channels * 9,
        moved_bytes=float(2 * inputs.numel() * inputs.element_size()),
    )


def _memory(session: Session, probe: ComputeProbe) -> TimedKernel:
    values = torch.zeros(probe.shape, device=session.device)
    return TimedKernel(act=lambda: values.add_(1), moved_bytes=8.0 * values.numel())


def _host_to_device(session: Session, probe: ComputeProbe) -> TimedKernel:
    host = torch.zeros(probe.shape).pin_memory()
    device = torch.zeros(probe.shape, device=session.device)
    return TimedKernel(
        act=lambda: device.copy_(host, non_blocking=True), moved_bytes=4.0 * host.numel()
    )


def _device_to_host(session: Session, probe: ComputeProbe) -> TimedKernel:
    host = torch.zeros(probe.shape).pin_memory()
    device = torch.zeros(probe.shape, device=session.device)
    return TimedKernel(
        act=lambda: host.copy_(device, non_blocking=True), moved_bytes=4.0 * host.numel()
    )


def _dispatch(session: Session, probe: ComputeProbe) -> TimedKernel:
    """Cost of one operator that has nothing to do."""
    value = torch.zeros(probe.shape, device=session.device)

    def act() -> None:
        for _ in range(_CALLS_PER_DISPATCH_SAMPLE):
            value.add_(1)

    return TimedKernel(act=act, calls=_CALLS_PER_DISPATCH_SAMPLE)


def _optimizer(session: Session, probe: ComputeProbe) -> TimedKernel:
    """SGD with momentum over a list of equal parameters: reads 3 and writes 2 values of each."""
    num_tensors, num_elements = probe.shape
    parameters = [
        nn.Parameter(torch.zeros(num_elements, device=session.device)) for _ in range(num_tensors)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return TimedKernel(act=optimizer.step, moved_bytes=20.0 * num_tensors * num_elements)


_KERNELS: Final[dict[str, Callable[[Session, ComputeProbe], TimedKernel]]] = {
    "matmul": _matmul,
    "convolution": _convolution,
    "memory": _memory,
    "host_to_device": _host_to_device,
    "device_to_host": _device_to_host,
    "dispatch": _dispatch,
    "optimizer": _optimizer,
}
