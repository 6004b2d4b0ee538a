"""One operator of a traced training step: what runs, on which tensors, and what it computes and moves."""

import enum
from dataclasses import dataclass

from perfmodel.units import Bytes, Flop


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An ATen call with everything needed to repeat it; equal calls are one operator."""

    name: str
    """With its overload, such as "aten.convolution.default"."""
    inputs: tuple[TensorSpec, ...]
    """Every tensor among the arguments, in the order in which ``arguments`` refers to them."""
    outputs: tuple[TensorSpec, ...]
    arguments: str
    """JSON ``[positional, keyword]``; a tensor is ``{"tensor": index}``, a dtype ``{"dtype": "float32"}``,
    a device or layout or memory format ``{"device": ...}`` and so on; lists nest."""
    flop: Flop
    read_bytes: Bytes
    written_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One place of a step where an operator runs."""

    operator: int
    """Position in the operators of the traced step."""
    phase: Phase
    module: str
    """Path of the module that it belongs to, such as "layers.3.attention"; empty outside modules."""
