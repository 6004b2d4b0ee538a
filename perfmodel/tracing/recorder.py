"""Every operator that reaches a device, with its tensors, arguments, phase and module."""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
from perfmodel.tracing.liveness import LiveStorages
from perfmodel.units import MIB, Bytes
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


_CONVOLUTION: Final = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD: Final = torch.ops.aten.convolution_backward.default
#: Channels that a blocked layout rounds up to: the floats of one vector register.
_BLOCK: Final = {"AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 8)
#: Below this many channels oneDNN reads images as they are.
_PLAIN_CHANNELS: Final = 4


class _Convolution(NamedTuple):
    """A convolution, or its backward pass."""

    inputs: Tensor
    weight: Tensor
    outputs: Sequence[int]
    """Shape of the result, or of its gradient."""
    settings: Sequence[Any]
    """Stride, padding, dilation, whether it is transposed, padding of the output, groups."""
    for_inputs: bool | None
    """Whether a backward pass computes the gradient of the inputs; None in a forward pass."""


def blocked_bytes(
    *,
    inputs: Bytes,
    weight: Bytes,
    outputs: Bytes,
    blocked_inputs: Bytes,
    blocked_outputs: Bytes,
    for_inputs: bool | None,
) -> Bytes:
    """Workspace beyond the results, of bytes of tensors and of their copies in blocked layout. [B]

    Forward: copies while the kernel runs, then the result beside its copy. Backward: gradients of inputs, as far as
    they are computed (``for_inputs``), and weight, one after the other. ``blocked_inputs``: 0 if they are not copied.
    """
    copies = blocked_inputs + weight + blocked_outputs
    if for_inputs is None:
        return max(copies, blocked_outputs + outputs) - outputs
    done = inputs if for_inputs else 0
    moments = [done + copies, done + 2 * weight]
    if for_inputs:
        gradient = blocked_inputs or inputs
        moments += [blocked_outputs + weight + gradient, gradient + inputs]
    return max(0, max(moments) - done - weight)


#: Tensor cores read channels, or pixels, in pieces of this size.
_CHANNEL_BYTES: Final = 16
#: Sums of a weight's gradient that are kept apart: copies of the weight, and their bytes, at most.
_PARTIAL_SUMS: Final = 64
_PARTIAL_SUMS_BYTES: Final = 8 * MIB
#: Most that was seen of gradients of a weight by each sample: of 1,024 samples in one ShuffleNet, less in ResNets.
_SAMPLE_GRADIENTS_BYTES: Final = 768 * MIB


def _cudnn_bytes(of: _Convolution) -> Bytes:
    """What cuDNN takes for a convolution on tensor cores: copies with channels last, and partial sums. [B]

    Read off 164 convolutions of ResNets on an H200 (cuDNN 9.19): the algorithm is a heuristic's choice. Within 6 %
    or 2 MB are 139 of their forward and 95 of their backward passes; those in bf16 add up to 17 MB of partial sums.
    Grouped ones count as none: with some in fp32, a step on an H100 took 5 % more than predicted.
    """
    inputs, weight, backward = of.inputs, of.weight, of.for_inputs is not None
    stride, _, _, transposed, _, groups = of.settings
    if transposed or groups > 1:
        return 0
    size, channels = inputs.element_size(), int(inputs.shape[1])
    padded = -(-channels * size // _CHANNEL_BYTES) * _CHANNEL_BYTES
    is_last = inputs.is_contiguous(memory_format=torch.channels_last)
    pixels = int(inputs.shape[2]) * int(inputs.shape[3])
    is_pointwise = tuple(weight.shape[2:]) == (1, 1) and set(stride) == {1}
    if is_pointwise and not is_last and pixels * size % _CHANNEL_BYTES == 0:
        # A matrix product: a gradient of the weight by each sample, then their sum.
        by_sample = int(inputs.shape[0]) * weight.nbytes
        return min(_SAMPLE_GRADIENTS_BYTES, by_sample) if backward else 0
    copies = 0
    if not is_last or padded != channels * size:
        copies += inputs.nbytes // (channels * size) * padded
    if not is_last:
        copies += math.prod(of.outputs) * size + weight.nbytes
    if backward and inputs.dtype == torch.float32:
        return copies + min(_PARTIAL_SUMS_BYTES, _PARTIAL_SUMS * weight.nbytes)
    return copies


def workspace_bytes(func: Any, args: Sequence[Any], *, on_cuda: bool = False) -> Bytes:
    """What the kernel of an operator takes beyond its results; 0 where nothing is known. [B]

    ``on_cuda``: Whatever the device of the tensors.
    """
    if func is _CONVOLUTION:
        inputs, weight, _, *settings = args[:9]
        of = _Convolution(inputs, weight, _output_shape(inputs, weight, settings), settings, None)
    elif func is _CONVOLUTION_BACKWARD:
        gradient, inputs, weight, _, *settings = args[:10]
        of = _Convolution(inputs, weight, gradient.shape, settings, bool(args[10][0]))
    else:
        return 0
    device = "cuda" if on_cuda else inputs.device.type
    count = {"cuda": _cudnn_bytes, "cpu": _cpu_bytes}.get(device)
    return 0 if count is None or inputs.dim() != 4 else count(of)


def _cpu_bytes(of: _Convolution) -> Bytes:
    inputs, weight, outputs = of.inputs, of.weight, of.outputs
    if inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous():
        # The kernel works in place; the weight alone is copied.
        return int(weight.nbytes)
    kind = torch._C._select_conv_backend(inputs, weight, None, *of.settings).name  # type: ignore[attr-defined] # noqa: SLF001
    if kind == "Slow2d":
        return _columns_bytes(of)
    if not kind.startswith("Mkldnn"):
        return 0
    output_bytes = math.prod(outputs) * inputs.element_size()
    plain = inputs.shape[1] < _PLAIN_CHANNELS
    return blocked_bytes(
        inputs=inputs.nbytes,
        weight=weight.nbytes,
        outputs=output_bytes,
        blocked_inputs=0 if plain else _blocked(inputs.nbytes, inputs.shape[1]),
        blocked_outputs=_blocked(output_bytes, outputs[1]),
        for_inputs=of.for_inputs,
    )


def _blocked(size_bytes: Bytes, channels: int) -> Bytes:
    return size_bytes // channels * (math.ceil(channels / _BLOCK) * _BLOCK)


def _columns_bytes(of: _Convolution) -> Bytes:
    """The matrix of patches of the unfolding kernel; a 1x1 kernel that moves by 1 needs none."""
    stride, padding, *_ = of.settings
    height, width = of.weight.shape[2:]
    if (height, width) == (1, 1) and set(stride) == {1} and set(padding) == {0}:
        return 0
    patch = math.prod(of.weight.shape[2:]) * int(of.inputs.shape[1])
    positions = int(of.outputs[2]) * int(of.outputs[3])
    return int(of.inputs.shape[0]) * patch * positions * of.inputs.element_size()


def _output_shape(inputs: Tensor, weight: Tensor, settings: Sequence[Any]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, *_ = settings
    if transposed or inputs.dim() != 4:
        return tuple(inputs.shape)
    spatial = (
        (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, apart in zip(
            inputs.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return (inputs.shape[0], weight.shape[0], *spatial)


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
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        """Of operators on "meta": torch's rules for shapes are slow, and deep models ask the same ones often."""

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
        inputs: list[TensorSpec] = []
        arguments = json.dumps(
            [
                [self._encoded(value, seen, inputs) for value in args],
                {key: self._encoded(value, seen, inputs) for key, value in keywords.items()},
            ]
        )
        aliases = _aliases(func)
        mutated = _mutated(aliases, args, keywords, seen)
        self.live.begin(workspace_bytes(func, args, on_cuda=self._on_cuda))
        self.running = True
        same = self.operator, tuple(inputs), arguments
        if same in self._results:
            result = _again(self._results[same])
        else:
            try:
                result = _mended(func, args, _BY_RULE.get(func, func)(*args, **keywords))
            except _DATA_ERRORS as error:
                raise UntraceableModel(f"{self.place()}: {_NO_DATA}") from error
            if not (mutated or aliases.view) and _is_new(result, args):
                self._results[same] = _again(result)
        self.running = False
        fresh = _fresh(aliases, result)
        outputs = tuple(self._spec(tensor) for tensor in fresh)
        for tensor in fresh:
            self.live.follow(tensor)
        self.num_phase_calls += 1
        self._refuse_endless()
        key = self.operator, tuple(inputs), outputs, arguments, mutated, aliases.view
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

    def _encoded(self, value: Any, seen: dict[int, int], inputs: list[TensorSpec]) -> Any:
        """An argument as JSON; tensors become positions among the inputs."""
        if isinstance(value, Tensor):
            position = seen.get(id(value))
            if position is None:
                position = seen[id(value)] = len(inputs)
                inputs.append(self._spec(value))
            return {"tensor": position}
        if isinstance(value, list | tuple):
            return [self._encoded(item, seen, inputs) for item in value]
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


def _batch_norm(images: Tensor, weight: Tensor | None, *others: Any) -> Any:
    """Results of a batch normalisation that trains: torch's own rule takes 50 times as long."""
    *_, is_training, _, _ = others
    if weight is None or not is_training or not _is_hollow(images):
        return _BATCH_NORM(images, weight, *others)
    return torch.empty_like(images), torch.empty_like(weight), torch.empty_like(weight)


def _batch_norm_backward(
    gradient: Tensor, images: Tensor, weight: Tensor | None, *others: Any
) -> Any:
    """Gradients of images, weight and bias, the same way."""
    *_, is_training, _, wanted = others
    if weight is None or not is_training or not _is_hollow(images):
        return _BATCH_NORM_BACKWARD(gradient, images, weight, *others)
    of_weights = (torch.empty_like(weight) if is_wanted else None for is_wanted in wanted[1:])
    return torch.empty_like(images), *of_weights


_BY_RULE: Final[dict[OpOverload, Callable[..., Any]]] = {
    _BATCH_NORM: _batch_norm,
    _BATCH_NORM_BACKWARD: _batch_norm_backward,
    **CUDNN_RULES,
}


def _is_hollow(tensor: Tensor) -> bool:
    """Whether it has no content."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _is_new(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether results are tensors on "meta", none of which shares the memory of an argument."""
    held = {leaf.untyped_storage()._cdata for leaf in args if isinstance(leaf, Tensor)}  # noqa: SLF001
    return all(
        type(leaf) is Tensor
        and leaf.device.type == "meta"
        and leaf.untyped_storage()._cdata not in held  # noqa: SLF001
        for leaf in tree_leaves(result)
        if leaf is not None
    )


def _again(result: Any) -> Any:
    """New tensors on "meta" of the same layout."""
    return tree_map_only(
        Tensor,
        lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"),
        result,
    )


def _mended(func: OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """What the kernel returns, where the shape rules of torch say something else.

    Under autocast the statistics of a normalisation have the type of its weight; torch's rules give
    them the type of the batch.
    """
    position = _WEIGHT_OF_NORM.get(func)
    if position is None or args[position] is None or args[position].dtype == result[1].dtype:
        return result
    return result[0], *(statistic.to(args[position].dtype) for statistic in result[1:])
