"""Gradients of a tensor that several operators read: autograd adds them up, in place where it can.

While a mode watches, autograd believes that every tensor may be a subclass and always adds into a new
one. A step that nobody watches does so only where somebody else holds the sum so far.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
#: Builds of older versions without CUDA lack it; there a part of a larger gradient counts as one of its own.
_holders_of_storage = getattr(torch._C, "_storage_Use_Count", lambda _: 1)  # noqa: SLF001
_IS_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default


def as_unwatched(func: OpOverload, args: tuple[Any, ...], least: tuple[int, int]) -> OpOverload:
    """The operator that a backward pass calls when no mode watches.

    Parameters
    ----------
    least
        What ``least_holders`` says.

    References
    ----------
    .. [1] ``can_accumulate_inplace`` in PyTorch's ``torch/csrc/autograd/input_buffer.cpp``.
    """
    if func is not _ADD or torch.is_grad_enabled() or not isinstance(args[1], Tensor):
        return func
    so_far, another = args[:2]
    # Formulas of gradients that add two of their own results look the same, but there are few.
    is_sum = so_far.shape == another.shape and so_far.dtype == another.dtype
    if is_sum and _IS_DENSE(so_far) and _holders(so_far) == least:
        return _ADD_IN_PLACE
    return func


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many refer to a tensor and to its storage, those on the way here among them."""
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), int(_holders_of_storage(storage._cdata))  # noqa: SLF001


@functools.cache
def least_holders() -> tuple[int, int]:
    """How many refer to a sum that autograd alone holds, and to its storage.

    Not to be asked first inside a backward pass, where nothing can be differentiated.
    """
    seen = _Holders()
    with seen:
        values = torch.zeros(1, device="cpu", requires_grad=True) * 1
        (values.sin() + values.cos()).backward()  # type: ignore[no-untyped-call]
    return seen.found


class _Holders(TorchDispatchMode):
    """Looks at the one sum of a backward pass."""

    found = 0, 0
    """Unless it was seen; then no sum is in place."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is _ADD and not args[0].requires_grad:
            self.found = _holders(args[0])
        return func(*args, **(kwargs or {}))
