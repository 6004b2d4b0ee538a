"""One traced optimizer step: its operators, the order of their calls, and the parameters' gradients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel import checks
from perfmodel.units import Bytes, Flop
from perfmodel.workload.affine import AffineBytes, Dimension, arguments_at, value_at
from perfmodel.workload.operator import Call, Operator, Phase, TensorSpec
from perfmodel.workload.work import flop, traffic_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMethod:
    """How a step is carried out; each changes which operators run."""

    optimizer: str
    """Either "sgd" (with momentum) or "adamw"."""
    optimizer_implementation: str
    """One of "loop", "foreach" and "fused"."""
    precision: str
    """Either "fp32", or "bf16" or "fp16" for autocast."""
    checkpointing: str
    """One of "none", "full" (the whole model) and "per-block"."""
    device_kind: str
    """Whose kernels were dispatched to: "cpu" or "cuda"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Calls in a row that repeat: the layers of a model are stored once."""

    count: int
    calls: tuple[Call, ...]
    """Of the first repetition."""
    prefix: str = ""
    """Path before the index that changes from one repetition to the next; empty if none does."""
    step: int = 0
    """What that index grows by: 1 forward, -1 backward."""

    def expanded(self) -> Iterator[Call]:
        """Every call in order, with its own module path."""
        yield from self.calls
        for repetition in range(1, self.count):
            for call in self.calls:
                module = shifted(call.module, prefix=self.prefix, by=repetition * self.step)
                yield Call(operator=call.operator, phase=call.phase, module=module)


def shifted(module: str, *, prefix: str, by: int) -> str:
    """A module path with the index that follows a prefix moved; other paths stay."""
    if by == 0 or not module.startswith(prefix):
        return module
    index, dot, rest = module[len(prefix) :].partition(".")
    return f"{prefix}{int(index) + by}{dot}{rest}" if index.isdigit() else module


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """One trainable tensor of a traced step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ready_after: int | None
    """Calls of the backward pass after which its gradient is complete; ``None`` if it never gets one."""

    @property
    def num_elements(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One optimizer step of one micro-step at a micro-batch."""

    micro_batch: int
    sample: str
    """What one sample is, such as "3x224x224 image"."""
    method: StepMethod
    operators: tuple[Operator, ...]
    segments: tuple[Segment, ...]
    parameters: tuple[TracedParameter, ...]
    """In the order in which backward produces their gradients; those without one at the end."""
    saved_bytes: Bytes
    """What the forward pass keeps for the backward pass, apart from parameters and buffers. [B]"""
    buffer_bytes: Bytes
    frozen_bytes: Bytes
    """Parameters that are not trained. [B]"""
    caveats: tuple[str, ...] = ()

    def calls(self) -> Iterator[Call]:
        """Every call in the order of execution."""
        for segment in self.segments:
            yield from segment.expanded()

    def call_counts(self) -> dict[tuple[int, Phase], int]:
        """How often each operator runs in each phase."""
        counts: dict[tuple[int, Phase], int] = {}
        for segment in self.segments:
            for call in segment.calls:
                key = call.operator, call.phase
                counts[key] = counts.get(key, 0) + segment.count
        return counts

    def flop(self, phase: Phase) -> Flop:
        """Floating point operations of one phase. [FLOP]"""
        return sum(
            count * self.operators[operator].flop
            for (operator, at), count in self.call_counts().items()
            if at is phase
        )

    def num_calls(self, phase: Phase) -> int:
        """Operators dispatched in one phase."""
        return sum(count for (_, at), count in self.call_counts().items() if at is phase)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of parameters that get no gradient."""
        return tuple(p.name for p in self.parameters if p.ready_after is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicTensor:
    """A tensor whose sizes may grow with the micro-batch."""

    shape: tuple[Dimension, ...]
    dtype: str
    stride: tuple[Dimension, ...] | None = None

    def at(self, micro_batch: int) -> TensorSpec:
        """The tensor at one micro-batch."""
        stride = self.stride
        return TensorSpec(
            shape=tuple(value_at(size, micro_batch) for size in self.shape),
            dtype=self.dtype,
            stride=None if stride is None else tuple(value_at(s, micro_batch) for s in stride),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicOperator:
    """An operator with the micro-batch left open; work and traffic follow from the shapes."""

    name: str
    inputs: tuple[int, ...]
    """Positions in the tensors of the symbolic step."""
    outputs: tuple[int, ...]
    arguments: str
    """As in ``Operator``; integers may be ``{"affine": [constant, per_sample]}``."""
    mutated: tuple[int, ...] = ()
    view: bool = False

    def at(self, micro_batch: int, tensors: list[TensorSpec]) -> Operator:
        """The operator at one micro-batch, given the tensors of the step there."""
        inputs = tuple(tensors[position] for position in self.inputs)
        outputs = tuple(tensors[position] for position in self.outputs)
        arguments = arguments_at(self.arguments, micro_batch)
        read_bytes, written_bytes = traffic_bytes(
            self.name, inputs, outputs, mutated=self.mutated, view=self.view
        )
        return Operator(
            name=self.name,
            inputs=inputs,
            outputs=outputs,
            arguments=arguments,
            flop=flop(self.name, inputs, outputs, arguments),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            mutated=self.mutated,
            view=self.view,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicStep:
    """A traced step with the micro-batch left open."""

    traced_micro_batches: tuple[int, int]
    """Where it was traced; between and near them shapes are exact."""
    sample: str
    method: StepMethod
    tensors: tuple[SymbolicTensor, ...]
    operators: tuple[SymbolicOperator, ...]
    segments: tuple[Segment, ...]
    parameters: tuple[TracedParameter, ...]
    saved: AffineBytes
    buffer_bytes: Bytes
    frozen_bytes: Bytes
    caveats: tuple[str, ...] = ()
    """What was assumed in tracing."""

    def at(self, *, micro_batch: int) -> TracedStep:
        """The step at one micro-batch.

        Raises
        ------
        ValueError
            If the micro-batch is below 1.
        """
        checks.at_least("micro_batch", micro_batch, 1)
        tensors = [tensor.at(micro_batch) for tensor in self.tensors]
        return TracedStep(
            micro_batch=micro_batch,
            sample=self.sample,
            method=self.method,
            operators=tuple(operator.at(micro_batch, tensors) for operator in self.operators),
            segments=self.segments,
            parameters=self.parameters,
            saved_bytes=self.saved.at(micro_batch),
            buffer_bytes=self.buffer_bytes,
            frozen_bytes=self.frozen_bytes,
            caveats=self.caveats,
        )
