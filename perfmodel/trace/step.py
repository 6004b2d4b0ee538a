"""One training step on tensors without content: no weights, no device, a 70B model on a laptop."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils._pytree import tree_leaves

from perfmodel.errors import PerfModelError, UntraceableModel
from perfmodel.trace.liveness import Blocks, LiveStorages, Sweep, apply_checkpointing
from perfmodel.trace.recorder import ModulePaths, RawCall, RawOperator, Recorder
from perfmodel.trace.sources import Batch, ModelSource, make_optimizer
from perfmodel.units import Bytes
from perfmodel.workload.memory import Part
from perfmodel.workload.operator import Call, Phase, TensorSpec
from perfmodel.workload.step import (
    Dimension,
    StepMethod,
    SymbolicOperator,
    SymbolicTensor,
    merged_arguments,
    through,
)

_NO_SHAPES = (
    "nothing tells the shapes of its results without running it; register a rule with "
    "torch.library.register_fake (and its gradient with register_autograd)"
)
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawStep:
    """A step as recorded at one micro-batch."""

    micro_batch: int
    calls: tuple[RawCall, ...]
    ready_after: dict[str, int]
    """Calls of the backward pass before each gradient was complete, in the order of completion."""
    saved_bytes: Bytes
    sweep: Sweep
    """What was alive at every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model and its optimizer, ready for a step."""

    source: ModelSource
    method: StepMethod
    module: nn.Module
    optimizer: torch.optim.Optimizer


@contextmanager
def without_content(device_kind: str) -> Iterator[None]:
    """Tensors made inside have shapes, types and a device, but no memory."""
    # Tensors are on the processor anyway; saying so costs time in every call.
    device = nullcontext() if device_kind == "cpu" else torch.device(device_kind)
    with _without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True), device:
        yield


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Torch logs a traceback of its own for every wrong shape; ours is one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def build_model_spec(source: ModelSource, method: StepMethod) -> ModelSpec:
    """Build a model and bring its optimizer past its first step, in which it makes its states.

    Raises
    ------
    UntraceableModel
        If building the model fails, or it has nothing to train.
    """
    module = _built(source)
    module.train()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise UntraceableModel(f"{source.name}: the model must have trainable parameters, got none")
    apply_checkpointing(module, method.checkpointing)
    optimizer = make_optimizer(
        trained, name=method.optimizer, implementation=method.optimizer_implementation
    )
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return ModelSpec(source=source, method=method, module=module, optimizer=optimizer)


def _built(source: ModelSource) -> nn.Module:
    try:
        with _without_initialisation():
            module = source.build()
    except PerfModelError:
        raise
    except Exception as error:
        raise UntraceableModel(
            f"{source.name}: building the model raised {_described(error)}; "
            "it must build without data, files and devices"
        ) from error
    if any(_is_compiled(part) for part in module.modules()):
        raise UntraceableModel(
            f"{source.name}: torch.compile is not supported: its fused kernels are chosen when it runs; "
            "trace the model without torch.compile"
        )
    return module


def _is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile wraps a module, its call, or a function that it or its class holds."""
    kinds = type(part).__mro__
    held = [*vars(part).values(), *(value for kind in kinds for value in vars(kind).values())]
    return (
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or any(_is_compiled_function(value) for value in held if callable(value))
    )


def _is_compiled_function(function: Any) -> bool:
    """Functions that torch only keeps from being compiled carry the same mark, and another one."""
    marked = hasattr(function, "_torchdynamo_orig_callable")
    return marked and not getattr(function, "_torchdynamo_disable", False)


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """Values do not matter, and some initialisers look at the values that they drew."""
    own = {
        name: function
        for name, function in vars(nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }
    for name in own:
        setattr(nn.init, name, lambda tensor, *_args, **_keywords: tensor)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(nn.init, name, function)


def record_step(model_spec: ModelSpec, micro_batch: int) -> RawStep:
    """Forward, loss, backward and optimizer once, as recorded operators and the memory between them.

    Optimizer states are there from the start.

    Raises
    ------
    UntraceableModel
        With module and operator, if the model raises or asks for data.
    """
    model_spec.optimizer.zero_grad(set_to_none=True)
    paths = ModulePaths(model_spec.module)
    recorder = Recorder(paths)
    held = Blocks(model_spec.module, recorder.live)
    ready: dict[str, int] = {}
    batch = model_spec.source.draw_batch(micro_batch)
    _follow_owned(recorder.live, model_spec, batch)
    with (
        _one_thread(),
        _ready_hooks(model_spec.module, recorder, ready),
        paths.following(),
        held.following(),
    ):
        try:
            saved_bytes = _run(model_spec, batch, recorder)
        except PerfModelError:
            raise
        except Exception as error:
            raise UntraceableModel(_complaint(model_spec.source, recorder, error)) from error
    return RawStep(
        micro_batch=micro_batch,
        calls=tuple(recorder.calls),
        ready_after=ready,
        saved_bytes=saved_bytes,
        sweep=Sweep(
            micro_batch=micro_batch,
            places=tuple(recorder.live.places),
            parts=recorder.live.by_part(),
            blocks=held.sizes(),
            reserved_ratio=recorder.live.reserved_ratio(),
        ),
    )


def _run(model_spec: ModelSpec, batch: Batch, recorder: Recorder) -> Bytes:
    live = recorder.live
    with recorder:
        with autocast(model_spec.method):
            outputs = model_spec.module(*batch.positional, **batch.keyword)
            loss = model_spec.source.loss(outputs, batch.targets)
        live.end_of_forward()
        with live.held():
            del outputs
        # What is alive now and was made on the way is held by the graph alone.
        saved_bytes = live.kept_bytes()
        recorder.begin(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = (parameter.grad for parameter in model_spec.module.parameters())
        live.mark((grad for grad in gradients if grad is not None), Part.GRADIENTS)
        recorder.begin(Phase.OPTIMIZER)
        model_spec.optimizer.step()
    return saved_bytes


def _follow_owned(live: LiveStorages, model_spec: ModelSpec, batch: Batch) -> None:
    owned: dict[Part, list[Any]] = {
        Part.PARAMETERS: list(model_spec.module.parameters()),
        Part.BUFFERS: list(model_spec.module.buffers()),
        Part.OPTIMIZER: tree_leaves(list(model_spec.optimizer.state.values())),
        Part.INPUTS: tree_leaves((batch.positional, batch.keyword, batch.targets)),
    }
    for part, leaves in owned.items():
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                live.follow(leaf, part)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Kernels are chosen as for a rank with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def autocast(method: StepMethod) -> Any:
    """The precision of the forward pass, as a context."""
    dtype = _PRECISIONS.get(method.precision)
    return nullcontext() if dtype is None else torch.autocast(method.device_kind, dtype=dtype)


@contextmanager
def _ready_hooks(module: nn.Module, recorder: Recorder, ready: dict[str, int]) -> Iterator[None]:
    """Note after how many calls of the backward pass each gradient is complete."""

    def note(name: str) -> None:
        ready[name] = recorder.num_phase_calls

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _complaint(source: ModelSource, recorder: Recorder, error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        return f"{source.name}: {recorder.place()}: {_NO_SHAPES}"
    at = "in" if recorder.running else "after"
    after = f" {at} operator {recorder.operator}" if recorder.operator else ""
    return (
        f"{source.name}: {recorder.where()}{after} raised {_described(error)}; "
        f"check that the model accepts a {source.sample}"
    )


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


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
