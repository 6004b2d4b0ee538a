"""The use case: a model source as a workload and a symbolic step."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.trace.allocator import Fork
from perfmodel.trace.collection import without_collection
from perfmodel.trace.liveness import joined_memory
from perfmodel.trace.sources import ModelSource
from perfmodel.trace.step import (
    Joiner,
    ModelSpec,
    RawStep,
    build_model_spec,
    joined_calls,
    record_step,
    without_content,
)
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.operator import ELEMENT_BYTES, Phase
from perfmodel.workload.step import (
    Affine,
    AffineBytes,
    StepMethod,
    SymbolicStep,
    TracedParameter,
    TracedStep,
    compressed,
    through,
)
from perfmodel.workload.workload import Parameter, Workload

#: How long a copy of this process may still trace when this one has finished, at least: what another
#: thread had locked when it was copied would stay locked there for ever.
_LEAST_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """What tracing a model yields."""

    workload: Workload
    step: SymbolicStep
    memory: StepMemory


def trace_model(
    source: ModelSource, method: StepMethod, *, micro_batch: int, beside: bool = False
) -> TracedModel:
    """Trace one optimizer step at a micro-batch and at twice as many samples.

    Batches of one are never traced: normalisation refuses them, and their layouts are ambiguous.

    Parameters
    ----------
    beside
        Whether the second batch is traced at the same time, in a copy of this process, where that works:
        for processes that have used no CUDA device and hold no locks.

    Raises
    ------
    UsageError
        If the kernels of a device are asked for that this machine lacks.
    UntraceableModel
        If the model cannot be built, run without data, or scaled with the batch.
    """
    if method.device_kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device-kind: cuda needs a CUDA device, got none (autograd asks the driver); use cpu: "
            "the work is the same, kernels of attention and normalisation have other names"
        )
    least = max(2, micro_batch)
    with without_content(method.device_kind), without_collection():
        model_spec = build_model_spec(source, method)
        first, second = _recorded(model_spec, least, beside=beside and method.device_kind == "cpu")
    step = _symbolic(model_spec, first, second)
    memory = joined_memory(first.sweep, second.sweep)
    concrete = step.at(micro_batch=least)
    workload = workload_of(source.name, concrete, model_spec.module)
    return TracedModel(workload=workload, step=step, memory=memory)


def _recorded(model_spec: ModelSpec, least: int, *, beside: bool) -> tuple[RawStep, RawStep]:
    """A step at a micro-batch and at twice as many samples."""

    def record_second() -> RawStep:
        return record_step(model_spec, 2 * least)

    copy = _copied(record_second) if beside and hasattr(os, "fork") else None
    if copy is None:
        return record_step(model_spec, least), record_second()
    with copy:
        started_s = time.monotonic()
        first = record_step(model_spec, least)
        own_s = time.monotonic() - started_s
        try:
            return first, copy.result(within_s=_LEAST_PATIENCE_S + 2 * own_s)
        except Exception:  # noqa: BLE001 - autograd refuses copies of a process that has used it
            return first, record_second()


def _copied(act: Callable[[], RawStep]) -> Fork[RawStep] | None:
    try:
        return Fork(act)
    except OSError:  # no memory, or no process, for a copy
        return None


def _symbolic(model_spec: ModelSpec, first: RawStep, second: RawStep) -> SymbolicStep:
    joiner = Joiner(first, second)
    calls = joined_calls(joiner, first, second)
    if list(first.ready_after.items()) != list(second.ready_after.items()):
        raise UntraceableModel(
            f"{model_spec.source.name}: gradients become ready in another order at micro-batch "
            f"{second.micro_batch} than at {first.micro_batch}; make the model independent of the batch"
        )
    module = model_spec.module
    return SymbolicStep(
        traced_micro_batches=(first.micro_batch, second.micro_batch),
        sample=model_spec.source.sample,
        method=model_spec.method,
        tensors=joiner.tensors,
        operators=joiner.operators,
        segments=compressed(calls),
        parameters=_parameters(module, first.ready_after),
        saved=_affine_bytes(first, second),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        frozen_bytes=sum(
            p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad
        ),
        caveats=model_spec.source.caveats,
    )


def _affine_bytes(first: RawStep, second: RawStep) -> AffineBytes:
    line = through(
        ((first.micro_batch, first.saved_bytes), (second.micro_batch, second.saved_bytes))
    )
    if isinstance(line, Affine):
        return AffineBytes(constant_bytes=line.constant, per_sample_bytes=line.per_sample)
    return AffineBytes(constant_bytes=line, per_sample_bytes=0)


def _parameters(module: nn.Module, ready_after: dict[str, int]) -> tuple[TracedParameter, ...]:
    tensors = {name: p for name, p in module.named_parameters() if p.requires_grad}
    order = [*ready_after, *(name for name in tensors if name not in ready_after)]
    return tuple(
        TracedParameter(
            name=name,
            shape=tuple(tensors[name].shape),
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            ready_after=ready_after.get(name),
        )
        for name in order
    )


def workload_of(name: str, step: TracedStep, module: nn.Module) -> Workload:
    """What data-parallel training needs to know of a traced step."""
    fractions = _ready_fractions(step)
    return Workload(
        name=name,
        sample=step.sample,
        parameters=tuple(
            Parameter(
                name=parameter.name,
                num_elements=parameter.num_elements,
                element_bytes=ELEMENT_BYTES[parameter.dtype],
                ready_fraction=fraction,
            )
            for parameter, fraction in zip(step.parameters, fractions, strict=True)
        ),
        buffer_bytes=buffer_bytes(module),
        forward_flop=step.flop(Phase.FORWARD) / step.micro_batch,
        backward_flop=step.flop(Phase.BACKWARD) / step.micro_batch,
        num_operators=step.num_calls(Phase.FORWARD) + step.num_calls(Phase.BACKWARD),
    )


def buffer_bytes(module: nn.Module) -> tuple[int, ...]:
    """Bytes per data type: DDP coalesces the buffers of one type into one broadcast. [B]"""
    sizes: dict[str, int] = {}
    for buffer in module.buffers():
        kind = str(buffer.dtype)
        sizes[kind] = sizes.get(kind, 0) + buffer.numel() * buffer.element_size()
    return tuple(sizes.values())


def _ready_fractions(step: TracedStep) -> list[float]:
    """Share of the backward flop that is done when each gradient is complete."""
    done = [0.0]
    for call in step.calls():
        if call.phase is Phase.BACKWARD:
            done.append(done[-1] + step.operators[call.operator].flop)
    whole = done[-1] or 1.0
    return [
        1.0 if parameter.ready_after is None else done[parameter.ready_after] / whole
        for parameter in step.parameters
    ]


_COMPILER: Final = "torch._dynamo"
_UTILITIES: Final = f"{_COMPILER}.utils"
_DISTRIBUTED: Final = "torch.distributed.tensor"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, what torch and torchvision ask of the compiler in passing is answered without it.

    They import it to say what must not be compiled (optimizers, checkpoints) or could be (pooling of
    regions). Nothing is compiled here, so that a stand-in serves; its submodules, such as the settings
    that tensors without content read, are the real ones. Dispatch asks for the type of distributed
    tensors, to recognise them; there are none. For models that do not ask for the compiler
    themselves, in a process that only traces; a version of torch that wants more of it fails.
    """
    torch = find_spec("torch")
    if _COMPILER in sys.modules or torch is None or torch.submodule_search_locations is None:
        yield
        return
    folder = Path(next(iter(torch.submodule_search_locations)), "_dynamo")
    sys.modules.update(_stand_ins(folder))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{_COMPILER}.")]:
            del sys.modules[name]
        if isinstance(sys.modules.get(_DISTRIBUTED), _Distributed):
            del sys.modules[_DISTRIBUTED]


def _stand_ins(folder: Path) -> dict[str, ModuleType]:
    package, utilities = ModuleType(_COMPILER), _Utilities(_UTILITIES)
    package.__path__ = [str(folder)]
    vars(package).update(disable=_disable, graph_break=lambda: None, utils=utilities)
    vars(utilities).update(is_compile_supported=lambda _: False)
    found: dict[str, ModuleType] = {_COMPILER: package, _UTILITIES: utilities}
    if _DISTRIBUTED not in sys.modules:
        found[_DISTRIBUTED] = _Distributed(_DISTRIBUTED)
    return found


class _Utilities(ModuleType):
    """Whatever is imported from it is there, and is not meant to be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _never


class _Distributed(ModuleType):
    """Knows the name of a type that no tensor has."""

    class DTensor:
        """No tensor is one."""


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nothing is compiled while a step is traced")


def _disable(act: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """What is never compiled is as it should be."""
    return act
