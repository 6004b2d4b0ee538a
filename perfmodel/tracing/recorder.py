"""Every operator that reaches a device, with its tensors, arguments, phase and module."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from perfmodel.errors import UntraceableModel
from perfmodel.tracing.cuda import CUDNN_RULES
from perfmodel.tracing.liveness import LiveStorages, workspace_bytes
from perfmodel.workload import ELEMENT_BYTES, Call, Operator, Phase, TensorSpec


class ModulePaths:
    """Follows which module runs; a node of the backward pass belongs to the module that made it."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = {module: path for path, module in root.named_modules()}
        self._owners = {p: name.rpartition(".")[0] for name, p in root.named_parameters()}
        self._stack: list[str] = []
        self._of_node: dict[int, str] = {}

    def follow(self, until: ExitStack) -> None:
        """Watch modules begin and end."""
        until.callback(register_module_forward_pre_hook(self._begin).remove)
        until.callback(register_module_forward_hook(self._end, always_call=True).remove)

    def forward(self) -> str:
        """Path of the module that runs now; the node that autograd just made is noted as its own."""
        path = self._stack[-1] if self._stack else ""
        # The first operator after a node was made is the node's own; a later one may be another module's.
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # type: ignore[attr-defined] # noqa: SLF001
        return path

    def backward(self) -> str:
        """Path of the module whose gradient is computed now, or that is computed again."""
        if self._stack:
            return self.forward()
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined] # noqa: SLF001
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            return self._owners.get(variable, "")  # type: ignore[call-overload,no-any-return]
        return self._of_node.get(node._sequence_nr(), "")  # noqa: SLF001

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        inherited = self._stack[-1] if self._stack else ""
        self._stack.append(self._paths.get(module, inherited))

    def _end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._stack.pop()


_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
#: Processor time of a pass that may have no end: with the start of a command below 10 s. [s]
_MOST_PASS_S: Final = 6.5
#: Operators of a pass that ends whatever it takes: 30,000 of few shapes, at 0.2 ms, are a recurrence by hand. Of
#: a new shape each takes up to 4 ms: 2,000 are more than irregular models have.
_USUAL_CALLS: Final = 2_000
_USUAL_CALLS_OF_FEW: Final = 30_000
_FEW_SHAPES: Final = 500
#: Builds of older versions without CUDA lack it; there a part of a larger gradient counts as one of its own.
_holders_of_storage = getattr(torch._C, "_storage_Use_Count", lambda _: 1)  # noqa: SLF001
_IS_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default


def as_unwatched(func: OpOverload, args: tuple[Any, ...], least: tuple[int, int]) -> OpOverload:
    """The operator that a backward pass calls when no mode watches; ``least`` is of ``least_holders``.

    As ``can_accumulate_inplace`` of PyTorch's ``torch/csrc/autograd/input_buffer.cpp``.
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
    return int(tensor._use_count()), int(_holders_of_storage(storage._cdata))  # type: ignore[attr-defined] # noqa: SLF001


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


_DEVICE_OF = torch.ops.prim.device.default
_WEIGHT_OF_NORM = {
    torch.ops.aten.native_batch_norm.default: 1,
    torch.ops.aten.native_layer_norm.default: 2,
}
_CONSTANTS: Final[dict[type, str]] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
_DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_DATA = (
    "asks for a value that only a real run has (control flow that depends on data); "
    "replace it by a fixed choice for tracing, or trace a module without it"
)


class Recorder(TorchDispatchMode):
    """Records operators while it is entered, and follows which storages are alive.

    ``on_cuda``: Whether CUDA's kernels are meant, whatever the device of the tensors.
    """

    def __init__(self, paths: ModulePaths, *, on_cuda: bool = False) -> None:
        super().__init__()
        self._on_cuda = on_cuda
        self.phase = Phase.FORWARD
        self.num_phase_calls = 0
        """Calls of the present phase so far."""
        self._begun_s = time.process_time()
        self.operators: list[Operator] = []
        self.calls: list[Call] = []
        self.module = ""
        """Where the last operator was called."""
        self.operator = ""
        """Name of the last operator."""
        self.running = False
        """Whether that operator has not returned yet."""
        self.live = LiveStorages()
        self._paths = paths
        self._least_holders = least_holders()
        self._positions: dict[tuple[Any, ...], int] = {}
        self._specs: dict[tuple[Any, ...], tuple[TensorSpec, int]] = {}
        """By layout and device, with a number for each."""
        self._results: dict[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]] = {}
        """Of operators without content: torch's rules for shapes are slow, and deep models ask the same ones often."""

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
        # Positions among the inputs by tensor object.
        seen: dict[int, int] = {}
        tensors: list[Tensor] = []
        arguments = json.dumps(
            [
                [_encoded(value, seen, tensors) for value in args],
                {key: _encoded(value, seen, tensors) for key, value in keywords.items()},
            ]
        )
        found = [self._layout(tensor) for tensor in tensors]
        inputs = tuple(spec for spec, _ in found)
        aliases = _aliases(func)
        mutated = _mutated(aliases, args, keywords, seen)
        self.live.begin(workspace_bytes(func, args, on_cuda=self._on_cuda))
        self.running = True
        # Of devices ``arguments`` hold the type alone, and of what they cannot tell, that there is some.
        devices = [str(v) for v in (*args, *keywords.values()) if isinstance(v, torch.device)]
        numbers = tuple(number for _, number in found)
        same = func, numbers, arguments, *devices, torch.get_default_dtype()
        may_recur = '"opaque"' not in arguments and all(map(_is_hollow, tensors))
        may_recur &= torch.Tag.inplace_view not in func.tags  # gives its argument another storage
        if may_recur and same in self._results:
            result = self._results[same](args)
        else:
            try:
                result = _mended(func, args, _BY_RULE.get(func, func)(*args, **keywords))
            except _DATA_ERRORS as error:
                raise UntraceableModel(f"{self.place()}: {_NO_DATA}") from error
            again = _again(func, args, tensors, result) if may_recur else None
            if again is not None and [self._layout(tensor) for tensor in tensors] == found:
                self._results[same] = again
        self.running = False
        fresh = _fresh(aliases, result)
        outputs = tuple(self._layout(tensor)[0] for tensor in fresh)
        for tensor in fresh:
            self.live.follow(tensor)
        self.num_phase_calls += 1
        self._refuse_endless()
        key = self.operator, inputs, outputs, arguments, mutated, aliases.view
        position = self._positions.setdefault(key, len(self.operators))
        if position == len(self.operators):
            self.operators.append(Operator.of(*key[:4], mutated=mutated, view=aliases.view))
        self.calls.append(Call(operator=position, phase=self.phase, module=self.module))
        return result

    def _refuse_endless(self) -> None:
        usual = _USUAL_CALLS_OF_FEW if len(self.operators) <= _FEW_SHAPES else _USUAL_CALLS
        if self.num_phase_calls > usual and time.process_time() - self._begun_s > _MOST_PASS_S:
            raise UntraceableModel(
                f"{self.place()}: a pass of more than {usual:,} operators must end within {_MOST_PASS_S:g} s of "
                "processor time, got more; does its loop end? Trace a shorter sequence"
            )

    def begin(self, phase: Phase) -> None:
        """What follows belongs to another phase."""
        self.phase = phase
        self.num_phase_calls = 0
        self._begun_s = time.process_time()

    def place(self) -> str:
        """Module and operator where a trace is, for messages."""
        return f"{self.where()}, operator {self.operator}"

    def where(self) -> str:
        """The module alone."""
        return f"module {self.module!r}" if self.module else "the model's own forward or its loss"

    def _layout(self, tensor: Tensor) -> tuple[TensorSpec, int]:
        if tensor.layout is not torch.strided:
            raise UntraceableModel(
                f"{self.place()}: tensors must be dense, got layout {tensor.layout}; "
                "use dense gradients (sparse=False)"
            )
        # torch's own ``device`` of a tensor without content is an operator.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        key = (tensor.shape, tensor.dtype, tensor.stride(), device)
        known = self._specs.get(key)
        if known is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in ELEMENT_BYTES:
                raise UntraceableModel(f"{self.place()}: data type {dtype} is not known")
            spec = TensorSpec(
                shape=tuple(int(n) for n in tensor.shape),
                dtype=dtype,
                stride=None if tensor.is_contiguous() else tuple(tensor.stride()),
            )
            known = self._specs[key] = spec, len(self._specs)
        return known


def _encoded(value: Any, seen: dict[int, int], tensors: list[Tensor]) -> Any:
    """An argument as JSON; tensors become positions among the inputs."""
    if isinstance(value, Tensor):
        position = seen.get(id(value))
        if position is None:
            position = seen[id(value)] = len(tensors)
            tensors.append(value)
        return {"tensor": position}
    if isinstance(value, list | tuple):
        return [_encoded(item, seen, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, name in _CONSTANTS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
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
    aliases: _Aliases, args: tuple[Any, ...], keywords: dict[str, Any], seen: dict[int, int]
) -> tuple[int, ...]:
    """Positions of the tensors that the schema says are written."""
    written: list[int] = []
    for index, name in aliases.written:
        value = args[index] if index < len(args) else keywords.get(name)
        values = value if isinstance(value, list | tuple) else [value]
        written += [seen[id(v)] for v in values if isinstance(v, Tensor)]
    return tuple(dict.fromkeys(written))


def _fresh(aliases: _Aliases, result: Any) -> list[Tensor]:
    """Tensors that a call returns again; those that it wrote in place are known already."""
    values = result if isinstance(result, tuple) and len(aliases.fresh) > 1 else (result,)
    tensors: list[Tensor] = []
    for fresh, value in zip(aliases.fresh, values, strict=False):
        if fresh:
            items = value if isinstance(value, list | tuple) else (value,)
            tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


_BATCH_NORM: Final = torch.ops.aten.native_batch_norm.default
_BATCH_NORM_BACKWARD: Final = torch.ops.aten.native_batch_norm_backward.default
_SLICE: Final = torch.ops.aten.slice.Tensor
#: Its offset is not counted from that of its argument.
_AS_STRIDED: Final = torch.ops.aten.as_strided.default


def _batch_norm(images: Tensor, weight: Tensor | None, *others: Any) -> Any:
    """Results of a batch normalisation that trains: torch's own rule takes 50 times as long."""
    *_, is_training, _, _ = others
    if weight is None or not is_training or not _is_hollow(images):
        return _BATCH_NORM(images, weight, *others)
    return _like(images), _like(weight), _like(weight)


def _batch_norm_backward(
    gradient: Tensor, images: Tensor, weight: Tensor | None, *others: Any
) -> Any:
    """Gradients of images, weight and bias, the same way."""
    *_, is_training, _, wanted = others
    if weight is None or not is_training or not _is_hollow(images):
        return _BATCH_NORM_BACKWARD(gradient, images, weight, *others)
    of_weights = (_like(weight) if is_wanted else None for is_wanted in wanted[1:])
    return _like(images), *of_weights


def _slice(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """A part of a tensor, which dense networks cut by hundreds: torch's own rule takes 10 times as long."""
    if not _is_hollow(tensor) or tensor.dim() == 0 or step < 1:
        return _SLICE(tensor, dim, start, end, step)
    shape, stride = list(tensor.shape), list(tensor.stride())
    first, last, _ = slice(start, end).indices(shape[dim])
    offset = int(tensor.storage_offset()) + first * stride[dim]
    shape[dim], stride[dim] = max(0, -(-(last - first) // step)), stride[dim] * step
    return replace(_Layout.of(tensor), shape=shape, stride=stride).over(tensor, offset)


_BY_RULE: Final[dict[OpOverload, Callable[..., Any]]] = {
    _BATCH_NORM: _batch_norm,
    _BATCH_NORM_BACKWARD: _batch_norm_backward,
    _SLICE: _slice,
    **CUDNN_RULES,
}


def _is_hollow(tensor: Tensor) -> bool:
    """Whether it is all layout: no content, a constant's neither, no type of a script, no bit of a conjugate."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if type(tensor) is FakeTensor:
        return tensor.constant is None
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "meta"


@dataclass(frozen=True, slots=True)
class _Layout:
    """All that there is to a tensor without content."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    fake: tuple[Any, torch.device] | None
    """Mode and device of a tensor that pretends to have one."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        fake = (tensor.fake_mode, tensor.fake_device) if isinstance(tensor, FakeTensor) else None
        return cls(tensor.shape, tensor.stride(), tensor.dtype, fake)

    def new(self) -> Tensor:
        """A tensor of this layout."""
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined] # noqa: SLF001
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return self._pretending(made)

    def over(self, base: Tensor, offset: int) -> Tensor:
        """A tensor of this layout that shares another's memory."""
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined] # noqa: SLF001
            made = torch.empty(0, dtype=self.dtype, device="meta")
            made.set_(base.untyped_storage(), offset, self.shape, self.stride)
        return self._pretending(made)

    def _pretending(self, made: Tensor) -> Tensor:
        return made if self.fake is None else FakeTensor(self.fake[0], made, self.fake[1])


def _like(tensor: Tensor) -> Tensor:
    """As ``torch.empty_like``, faster where no order has to be found."""
    return _Layout.of(tensor).new() if tensor.is_contiguous() else torch.empty_like(tensor)


def _again(
    func: OpOverload, args: tuple[Any, ...], tensors: Sequence[Tensor], result: Any
) -> Callable[[tuple[Any, ...]], Any] | None:
    """What gives the same results for other arguments of the same layouts; None where that is not certain."""
    if _aliases(func).written:
        if result is None:
            return lambda _: None
        return (lambda args: args[0]) if args and result is args[0] else None
    leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
    if not all(isinstance(leaf, Tensor) and _is_hollow(leaf) for leaf in leaves):
        return None
    held, own = (
        {tensor.untyped_storage()._cdata for tensor in each}  # noqa: SLF001
        for each in (tensors, leaves)
    )
    if held & own:
        return _view_again(func, args, tensors, result)
    is_apart = len(own) == len(leaves)  # not parts of one buffer, nor of one that nobody else has
    if not is_apart or any(leaf.untyped_storage().nbytes() != leaf.nbytes for leaf in leaves):
        return None
    made = tree_map_only(Tensor, _Layout.of, result)
    return lambda _: tree_map_only(_Layout, _Layout.new, made)


def _view_again(
    func: OpOverload, args: tuple[Any, ...], tensors: Sequence[Tensor], result: Any
) -> Callable[[tuple[Any, ...]], Any] | None:
    """The same where the result is a part of the only tensor among the arguments."""
    is_one = len(tensors) == 1 and tensors[0] is args[0] and isinstance(result, Tensor)
    base = tensors[0]
    if not is_one or func is _AS_STRIDED or result is base or result.dtype != base.dtype:
        return None
    layout, ahead = _Layout.of(result), result.storage_offset() - base.storage_offset()
    return lambda args: layout.over(args[0], args[0].storage_offset() + ahead)


def _mended(func: OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """What the kernel returns, where the shape rules of torch say something else.

    Under autocast the statistics of a normalisation have the type of its weight; torch's rules give
    them the type of the batch.
    """
    position = _WEIGHT_OF_NORM.get(func)
    if position is None or args[position] is None or args[position].dtype == result[1].dtype:
        return result
    return result[0], *(statistic.to(args[position].dtype) for statistic in result[1:])
