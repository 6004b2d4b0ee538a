"""Every operator that reaches a device, with its tensors, arguments, phase and module."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.accumulation import as_unwatched, least_holders
from perfmodel.tracing.liveness import LiveStorages, Place
from perfmodel.tracing.modules import ModulePaths
from perfmodel.tracing.workspaces import workspace_bytes
from perfmodel.workload.operator import ELEMENT_BYTES, Phase, TensorSpec

_DEVICE_OF = torch.ops.prim.device.default
_WEIGHT_OF_NORM = {
    torch.ops.aten.native_batch_norm.default: 1,
    torch.ops.aten.native_layer_norm.default: 2,
}
_DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_DATA = (
    "asks for a value that only a real run has (control flow that depends on data); "
    "replace it by a fixed choice for tracing, or trace a module without it"
)


@dataclass(frozen=True, slots=True)
class RawOperator:
    """An operator as seen at one micro-batch."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: str
    mutated: tuple[int, ...]
    view: bool


@dataclass(frozen=True, slots=True)
class RawCall:
    """One call of a raw operator."""

    operator: RawOperator
    phase: Phase
    module: str


@dataclass(slots=True)
class _Seen:
    """Tensors among the arguments of one call."""

    specs: list[TensorSpec] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    """Of each tensor object in ``specs``."""


class Recorder(TorchDispatchMode):
    """Records while it is entered, and follows what is alive; ``phase`` is set from outside."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.num_phase_calls = 0
        """Calls of the present phase so far."""
        self.calls: list[RawCall] = []
        self.module = ""
        """Where the last operator was called."""
        self.operator = ""
        """Name of the last operator."""
        self.running = False
        """Whether that operator has not returned yet."""
        self.live = LiveStorages()
        self._paths = paths
        self._least_holders = least_holders()
        self._operators: dict[RawOperator, RawOperator] = {}
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while a step is traced: torch need not guard every call against it."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and note it."""
        del types
        keywords = kwargs or {}
        if func is _DEVICE_OF:  # a question that only tensors without content dispatch
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if self.phase is Phase.BACKWARD:
            func = as_unwatched(func, args, self._least_holders)
        self.operator = str(func)
        at_forward = self.phase is Phase.FORWARD
        self.module = self._paths.forward() if at_forward else self._paths.backward()
        seen = _Seen()
        arguments = json.dumps(
            [
                [self._encoded(value, seen) for value in args],
                {key: self._encoded(value, seen) for key, value in keywords.items()},
            ]
        )
        mutated = _mutated(func, args, keywords, seen)
        self.live.begin(
            Place(phase=self.phase, module=self.module, operator=self.operator),
            workspace_bytes(func, args),
        )
        self.running = True
        try:
            result = func(*args, **keywords)
        except _DATA_ERRORS as error:
            raise UntraceableModel(f"{self.place()}: {_NO_DATA}") from error
        self.running = False
        result = _mended(func, args, result)
        fresh = _fresh(func, result)
        outputs = tuple(self._spec(tensor) for tensor in fresh)
        for tensor in fresh:
            self.live.follow(tensor)
        self.num_phase_calls += 1
        self._note(
            RawOperator(
                self.operator, tuple(seen.specs), outputs, arguments, mutated, _aliases(func).view
            )
        )
        return result

    def begin(self, phase: Phase) -> None:
        """What follows belongs to another phase."""
        self.phase = phase
        self.num_phase_calls = 0

    def place(self) -> str:
        """Module and operator where a trace is, for messages."""
        return f"{self.where()}, operator {self.operator}"

    def where(self) -> str:
        """The module alone."""
        return f"module {self.module!r}" if self.module else "the model's own forward or its loss"

    def _note(self, operator: RawOperator) -> None:
        known = self._operators.setdefault(operator, operator)
        self.calls.append(RawCall(known, self.phase, self.module))

    def _spec(self, tensor: Tensor) -> TensorSpec:
        if tensor.layout is not torch.strided:
            raise UntraceableModel(
                f"{self.place()}: tensors must be dense, got layout {tensor.layout}; "
                "use dense gradients (sparse=False)"
            )
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        key = (tuple(tensor.shape), tensor.dtype, stride)
        spec = self._specs.get(key)
        if spec is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in ELEMENT_BYTES:
                raise UntraceableModel(f"{self.place()}: data type {dtype} is not known")
            spec = TensorSpec(shape=tuple(int(n) for n in key[0]), dtype=dtype, stride=stride)
            self._specs[key] = spec
        return spec

    def _encoded(self, value: Any, seen: _Seen) -> Any:
        """An argument as JSON; tensors become positions."""
        if isinstance(value, Tensor):
            position = seen.positions.get(id(value))
            if position is None:
                position = len(seen.specs)
                seen.positions[id(value)] = position
                seen.specs.append(self._spec(value))
            return {"tensor": position}
        if isinstance(value, list | tuple):
            return [self._encoded(item, seen) for item in value]
        return _encoded_constant(value)


def _encoded_constant(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    return {"opaque": type(value).__name__}


@dataclass(frozen=True, slots=True)
class _Aliases:
    """What the schema of an operator says about memory that it shares."""

    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it writes."""
    fresh: tuple[bool, ...]
    """Of each result, whether it is something else than a written argument."""
    view: bool
    """Whether a result shares the memory of an argument that is not written."""


@functools.cache
def _aliases(func: OpOverload) -> _Aliases:
    schema = func._schema  # noqa: SLF001
    returned = [declared.alias_info for declared in schema.returns]
    return _Aliases(
        written=tuple(
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        fresh=tuple(alias is None or not alias.is_write for alias in returned),
        view=any(alias is not None and not alias.is_write for alias in returned),
    )


def _mutated(
    func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], seen: _Seen
) -> tuple[int, ...]:
    """Positions of the tensors that the schema says are written."""
    written: list[int] = []
    for index, name in _aliases(func).written:
        value = args[index] if index < len(args) else keywords.get(name)
        values = value if isinstance(value, list | tuple) else [value]
        written += [seen.positions[id(v)] for v in values if isinstance(v, Tensor)]
    return tuple(dict.fromkeys(written))


def _fresh(func: OpOverload, result: Any) -> list[Tensor]:
    """Tensors that a call returns anew; those that it wrote in place are known already."""
    declared = _aliases(func).fresh
    values = result if isinstance(result, tuple) and len(declared) > 1 else (result,)
    tensors: list[Tensor] = []
    for fresh, value in zip(declared, values, strict=False):
        if fresh:
            items = value if isinstance(value, list | tuple) else (value,)
            tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


def _mended(func: OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """What the kernel returns, where the shape rules of torch say something else.

    Under autocast the statistics of a normalisation have the type of its weight; torch's rules give
    them the type of the batch.
    """
    position = _WEIGHT_OF_NORM.get(func)
    if position is None or args[position] is None or args[position].dtype == result[1].dtype:
        return result
    return result[0], *(statistic.to(args[position].dtype) for statistic in result[1:])
