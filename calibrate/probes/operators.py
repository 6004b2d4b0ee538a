"""Operators repeated from their record: real tensors, real arguments, no model."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perfmodel.workload.operator import Operator, TensorSpec

#: Spread of made-up values: small enough that products of many layers stay finite.
_SCALE = 0.05


def resolved(name: str) -> Callable[..., Any]:
    """The kernel that a recorded name such as "aten.add.Tensor" stands for."""
    namespace, operator, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    return found


class ReplayedOperator:
    """An operator with its arguments read; only the tensors are missing."""

    def __init__(self, operator: Operator, device: torch.device) -> None:
        self.operator = operator
        self._function = resolved(operator.name)
        positional, keyword = json.loads(operator.arguments)
        self._positional: list[Any] = positional
        self._keyword: dict[str, Any] = keyword
        self._device = device

    def bound(self, tensors: Sequence[Tensor]) -> Callable[[], Any]:
        """The call on tensors that match ``operator.inputs``, ready to be timed."""
        function = self._function
        positional = [self._value(value, tensors) for value in self._positional]
        keyword = {key: self._value(value, tensors) for key, value in self._keyword.items()}
        return lambda: function(*positional, **keyword)

    def _value(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, list):
            return [self._value(item, tensors) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        match kind:
            case "tensor":
                return tensors[content]
            case "device":
                return self._device
            case "dtype" | "layout" | "memory_format":
                return getattr(torch, content)
            case _:
                raise ValueError(
                    f"{self.operator.name}: an argument of type {content} was not kept"
                )


def returned_tensors(operator: Operator, result: Any) -> list[Tensor]:
    """Tensors of a result in the order of ``operator.outputs``; none of an operator in place."""
    values = result if isinstance(result, tuple | list) else (result,)
    tensors: list[Tensor] = []
    for value in values:
        tensors += [
            item
            for item in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(item, Tensor)
        ]
    return tensors[: len(operator.outputs)] if operator.outputs else []


def made_up(spec: TensorSpec, device: torch.device, *, below: int = 1) -> Tensor:
    """A tensor of a shape, type and layout: small random numbers, or integers from 0 to ``below``."""
    dtype = getattr(torch, spec.dtype)
    stride = spec.stride if spec.stride is not None else _contiguous(spec.shape)
    reach = [(size - 1) * step for size, step in zip(spec.shape, stride, strict=True)]
    length = 1 + sum(reach) if all(spec.shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        fan = math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 1
        scale = min(_SCALE, 1 / math.sqrt(max(1, fan)))
        storage = torch.empty(length, device=device, dtype=dtype).normal_(0.0, scale)
    elif dtype is torch.bool:
        storage = torch.ones(length, device=device, dtype=dtype)
    else:
        storage = torch.randint(0, max(1, below), (length,), device=device, dtype=dtype)
    return storage.as_strided(spec.shape, stride)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def index_limit(operator: Operator, position: int) -> int:
    """Exclusive upper bound of the integers that an input may hold."""
    base = operator.name.split(".")[1]
    shapes = [spec.shape for spec in operator.inputs]
    match base:
        case "embedding":
            return shapes[0][0]
        case "embedding_dense_backward":
            return int(json.loads(operator.arguments)[0][2])
        case "nll_loss_forward" | "nll_loss2d_forward":
            return shapes[0][-1] if len(shapes[0]) <= 2 else shapes[0][1]
        case "nll_loss_backward" | "nll_loss2d_backward":
            return shapes[1][-1] if len(shapes[1]) <= 2 else shapes[1][1]
        case "index" | "index_select" | "gather" if position > 0:
            return min(shapes[0])
        case _:
            return 1
