"""Two recordings of one step at two micro-batches, joined into a step with the batch left open."""

import json

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.recorder import RawCall, RawOperator
from perfmodel.tracing.step import RawStep
from perfmodel.workload.affine import Dimension, merged_arguments, through
from perfmodel.workload.operator import Call, Phase, TensorSpec
from perfmodel.workload.step import SymbolicOperator, SymbolicTensor

_RETRACE = "the step cannot be scaled to other micro-batches; trace it with --micro-batch at each"


class Joiner:
    """Joins pairs of calls; equal pairs give one operator."""

    def __init__(self, first: RawStep, second: RawStep) -> None:
        self._micro_batches = first.micro_batch, second.micro_batch
        self._tensors: dict[SymbolicTensor, int] = {}
        self._operators: dict[SymbolicOperator, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}

    @property
    def tensors(self) -> tuple[SymbolicTensor, ...]:
        """All tensors so far."""
        return tuple(self._tensors)

    @property
    def operators(self) -> tuple[SymbolicOperator, ...]:
        """All operators so far."""
        return tuple(self._operators)

    def call(self, one: RawCall, other: RawCall) -> Call:
        """The call that both are.

        Raises
        ------
        UntraceableModel
            If they are not the same call at two sizes.
        """
        same = (one.phase, one.module, one.operator.name) == (
            other.phase,
            other.module,
            other.operator.name,
        )
        if not same:
            raise UntraceableModel(
                f"module {one.module!r}: runs {one.operator.name} at micro-batch "
                f"{self._micro_batches[0]} and {other.operator.name} at {self._micro_batches[1]}: {_RETRACE}"
            )
        key = id(one.operator), id(other.operator)
        position = self._pairs.get(key)
        if position is None:
            try:
                operator = self._operator(one.operator, other.operator)
            except ValueError as error:
                raise UntraceableModel(
                    f"module {one.module!r}, operator {one.operator.name}: {error}: {_RETRACE}"
                ) from error
            position = self._operators.setdefault(operator, len(self._operators))
            self._pairs[key] = position
        return Call(operator=position, phase=one.phase, module=one.module)

    def _operator(self, one: RawOperator, other: RawOperator) -> SymbolicOperator:
        arguments = one.arguments
        if arguments != other.arguments:
            arguments = json.dumps(
                merged_arguments(
                    json.loads(one.arguments),
                    json.loads(other.arguments),
                    micro_batches=self._micro_batches,
                )
            )
        return SymbolicOperator(
            name=one.name,
            inputs=self._positions(one.inputs, other.inputs),
            outputs=self._positions(one.outputs, other.outputs),
            arguments=arguments,
            mutated=one.mutated,
            view=one.view,
        )

    def _positions(
        self, ones: tuple[TensorSpec, ...], others: tuple[TensorSpec, ...]
    ) -> tuple[int, ...]:
        if len(ones) != len(others):
            raise ValueError(
                f"there are {len(ones)} tensors at one micro-batch and {len(others)} at another"
            )
        return tuple(
            self._tensors.setdefault(self._tensor(one, other), len(self._tensors))
            for one, other in zip(ones, others, strict=True)
        )

    def _tensor(self, one: TensorSpec, other: TensorSpec) -> SymbolicTensor:
        if one.dtype != other.dtype or len(one.shape) != len(other.shape):
            raise ValueError(
                f"a tensor is {one.shape} {one.dtype} and then {other.shape} {other.dtype}"
            )
        if (one.stride is None) != (other.stride is None):
            raise ValueError("a tensor is contiguous at one micro-batch and not at another")
        strides = None
        if one.stride is not None and other.stride is not None:
            strides = self._lines(one.stride, other.stride)
        return SymbolicTensor(
            shape=self._lines(one.shape, other.shape), dtype=one.dtype, stride=strides
        )

    def _lines(self, ones: tuple[int, ...], others: tuple[int, ...]) -> tuple[Dimension, ...]:
        first, second = self._micro_batches
        return tuple(
            through(((first, one), (second, other)))
            for one, other in zip(ones, others, strict=True)
        )


def joined_calls(joiner: Joiner, first: RawStep, second: RawStep) -> list[Call]:
    """All calls of two recordings of one step; the optimizer knows no batch, and is that of the first.

    Raises
    ------
    UntraceableModel
        If the steps differ in more than sizes.
    """
    ones, others = (
        [call for call in step.calls if call.phase is not Phase.OPTIMIZER]
        for step in (first, second)
    )
    calls = [joiner.call(a, b) for a, b in zip(ones, others, strict=False)]
    if len(ones) != len(others):
        raise UntraceableModel(
            f"the step runs {len(ones)} operators at micro-batch {first.micro_batch} and "
            f"{len(others)} at {second.micro_batch}: {_RETRACE}"
        )
    return calls + [joiner.call(call, call) for call in first.calls[len(ones) :]]
