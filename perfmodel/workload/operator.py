"""One operator of a traced training step: what runs, on which tensors, and what it computes and moves."""

import enum
import functools
import json
import math
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.units import Bytes, Flop

#: Bytes of one element, by the name that torch gives the type without its prefix.
ELEMENT_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Phase(enum.StrEnum):
    """The part of a training step that an operator belongs to."""

    FORWARD = "forward"
    """Forward pass and loss."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its content."""

    shape: tuple[int, ...]
    dtype: str
    """As in torch, without the prefix: "float32", "bfloat16", "int64", "bool"."""
    stride: tuple[int, ...] | None = None
    """In elements; ``None`` means contiguous."""

    @property
    def num_elements(self) -> int:
        """Elements that an index can reach."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> Bytes:
        """Bytes that reading every element once touches; expanded dimensions count once. [B]"""
        if self.stride is None:
            return self.num_elements * ELEMENT_BYTES[self.dtype]
        distinct = (
            1 if step == 0 and size > 0 else size
            for size, step in zip(self.shape, self.stride, strict=True)
        )
        return math.prod(distinct) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An ATen call with everything needed to repeat it; equal calls are one operator."""

    name: str
    """With its overload, such as "aten.convolution.default"."""
    inputs: tuple[TensorSpec, ...]
    """Every tensor among the arguments, in the order in which ``arguments`` refers to them."""
    outputs: tuple[TensorSpec, ...]
    """What it returns anew; for a view the view, for an operator in place nothing."""
    arguments: str
    """JSON ``[positional, keyword]``; a tensor is ``{"tensor": index}``, a dtype ``{"dtype": "float32"}``,
    a device or layout or memory format ``{"device": ...}`` and so on; lists nest."""
    flop: Flop
    """Multiplications and additions of products (matrices, convolutions, attention), each one; the
    rest counts as 0, as is the custom. [FLOP]"""
    read_bytes: Bytes
    """Every tensor that must be read, once. [B]"""
    written_bytes: Bytes
    mutated: tuple[int, ...] = ()
    """Positions in ``inputs`` that it writes in place."""
    view: bool = False
    """Whether it only looks at its input in another way: it costs the host time and moves nothing."""


@functools.lru_cache(maxsize=8192)
def parsed(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of an operator; shared by all who ask, not to be changed."""
    positional, keyword = json.loads(arguments)
    return positional, keyword


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One place of a step where an operator runs."""

    operator: int
    """Position in the operators of the traced step."""
    phase: Phase
    module: str
    """Path of the module that it belongs to, such as "layers.3.attention"; empty outside modules."""
