"""Memory that kernels take for themselves and give back before they end.

A trace without content sees what operators return, not what their kernels allocate inside. On a CPU
the large case is convolution: oneDNN works on blocked layouts and copies what it reads and writes
[1]_. The sequences below were read off the allocator's events of single convolutions.

References
----------
.. [1] oneDNN documentation, "Understanding memory formats": blocked layouts and reorders.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from perfmodel.units import Bytes

_CONVOLUTION: Final = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD: Final = torch.ops.aten.convolution_backward.default
#: Channels that a blocked layout rounds up to: the floats of one vector register.
_BLOCK: Final = {"AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 8)
#: Below this many channels oneDNN reads images as they are.
_PLAIN_CHANNELS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSizes:
    """Bytes of the tensors of one convolution, and of their copies in blocked layout."""

    inputs: Bytes
    weight: Bytes
    outputs: Bytes
    blocked_inputs: Bytes
    """Zero if the kernel reads the inputs as they are."""
    blocked_weight: Bytes
    blocked_outputs: Bytes


def forward_workspace_bytes(sizes: ConvolutionSizes) -> Bytes:
    """Beyond the result: the copies while the kernel runs, then the result beside its copy. [B]"""
    running = sizes.blocked_inputs + sizes.blocked_weight + sizes.blocked_outputs
    leaving = sizes.blocked_outputs + sizes.outputs
    return max(running, leaving) - sizes.outputs


def backward_workspace_bytes(sizes: ConvolutionSizes, *, inputs_need_gradient: bool) -> Bytes:
    """Beyond the gradients of inputs and weight, which are computed one after the other. [B]"""
    done = sizes.inputs if inputs_need_gradient else 0
    blocked_gradient = sizes.blocked_inputs or sizes.inputs
    moments = [
        done + sizes.blocked_outputs + sizes.blocked_inputs + sizes.blocked_weight,
        done + sizes.blocked_weight + sizes.weight,
    ]
    if inputs_need_gradient:
        moments += [
            sizes.blocked_outputs + sizes.blocked_weight + blocked_gradient,
            blocked_gradient + sizes.inputs,
        ]
    return max(0, max(moments) - done - sizes.weight)


def workspace_bytes(func: Any, args: Sequence[Any]) -> Bytes:
    """What the CPU kernel of an operator takes beyond its results; 0 where nothing is known. [B]"""
    if func is _CONVOLUTION:
        inputs, weight, _, *settings = args[:9]
        outputs = _output_shape(inputs, weight, settings)
        return _convolution_workspace(inputs, weight, outputs, settings, None)
    if func is _CONVOLUTION_BACKWARD:
        gradient, inputs, weight, _, *settings = args[:10]
        return _convolution_workspace(inputs, weight, gradient.shape, settings, args[10][0])
    return 0


def _convolution_workspace(
    inputs: Tensor,
    weight: Tensor,
    outputs: Sequence[int],
    settings: Sequence[Any],
    inputs_need_gradient: bool | None,  # noqa: FBT001 - None: forward
) -> Bytes:
    """Settings are stride, padding, dilation, transposed, output padding and groups."""
    if inputs.device.type != "cpu" or inputs.dim() != 4:
        return 0
    if inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous():
        # The kernel works in place; the weight alone is copied.
        return weight.nbytes
    kind = torch._C._select_conv_backend(inputs, weight, None, *settings).name  # type: ignore[attr-defined] # noqa: SLF001
    if kind == "Slow2d":
        return _columns_bytes(inputs, weight, outputs, settings)
    if not kind.startswith("Mkldnn"):
        return 0
    sizes = _sizes(inputs, weight, outputs)
    if inputs_need_gradient is None:
        return forward_workspace_bytes(sizes)
    return backward_workspace_bytes(sizes, inputs_need_gradient=inputs_need_gradient)


def _sizes(inputs: Tensor, weight: Tensor, outputs: Sequence[int]) -> ConvolutionSizes:
    out_bytes = math.prod(outputs) * inputs.element_size()
    plain = inputs.shape[1] < _PLAIN_CHANNELS
    return ConvolutionSizes(
        inputs=inputs.nbytes,
        weight=weight.nbytes,
        outputs=out_bytes,
        blocked_inputs=0 if plain else _blocked(inputs.nbytes, inputs.shape[1]),
        blocked_weight=weight.nbytes,
        blocked_outputs=_blocked(out_bytes, outputs[1]),
    )


def _blocked(size_bytes: Bytes, channels: int) -> Bytes:
    return size_bytes // channels * (math.ceil(channels / _BLOCK) * _BLOCK)


def _columns_bytes(
    inputs: Tensor, weight: Tensor, outputs: Sequence[int], settings: Sequence[Any]
) -> Bytes:
    """The matrix of patches of the unfolding kernel; a 1x1 kernel that moves by 1 needs none."""
    stride, padding, *_ = settings
    height, width = weight.shape[2:]
    if (height, width) == (1, 1) and set(stride) == {1} and set(padding) == {0}:
        return 0
    positions = int(outputs[2]) * int(outputs[3])
    patch = int(inputs.shape[1]) * int(height) * int(width)
    return int(inputs.shape[0]) * patch * positions * inputs.element_size()


def _output_shape(inputs: Tensor, weight: Tensor, settings: Sequence[Any]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, *_ = settings
    if transposed or inputs.dim() != 4:
        return tuple(inputs.shape)
    spatial = (
        (size + 2 * pad - hop * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, hop in zip(
            inputs.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return (inputs.shape[0], weight.shape[0], *spatial)
