"""A model source as a workload, a symbolic step and its memory: two recorded steps joined."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import nn

from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.step import collector_paused
from perfmodel.tracing.cuda_casts import AsOnCuda
from perfmodel.tracing.depth import DEPTHS, LEAST_DEPTH, IrregularLayersError, deepened
from perfmodel.tracing.source import ModelSource, default_implementation
from perfmodel.tracing.step import (
    RecordedStep,
    TrainedModel,
    build_model,
    built,
    record_step,
    without_content,
)
from perfmodel.units import Bytes
from perfmodel.workload import ELEMENT_BYTES, Call, Operator, Parameter, Phase, TensorSpec, Workload
from perfmodel.workload.memory import Block, Moment, Part, PartBytes, StepMemory, upper_envelope
from perfmodel.workload.step import (
    CUDA_DEFAULT,
    DEFAULT,
    AffineBytes,
    Dimension,
    Segment,
    StepMethod,
    SymbolicOperator,
    SymbolicStep,
    SymbolicTensor,
    TracedParameter,
    TracedStep,
    compressed,
    merged_arguments,
    through,
)

#: Of a micro-batch, where neither the user nor the model says.
_SAMPLES: Final = 8
_RETRACE = "the step cannot be scaled to other micro-batches; trace it with --micro-batch at each"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A traced model: the workload, its operators and its memory, with the micro-batch left open."""

    workload: Workload
    step: SymbolicStep
    memory: StepMemory


def has_gpu() -> bool:
    """Whether a trace can be made on a CUDA device."""
    return torch.cuda.is_available()


def trace_model(
    source: ModelSource,
    method: StepMethod,
    *,
    micro_batch: int | None = None,
    casts: AsOnCuda | None = None,
) -> TracedModel:
    """Trace one optimizer step at a micro-batch and at twice as many samples.

    The first is the batch that comes with the model, unless it is told or that is a single sample. Batches of
    one are never traced: normalisation refuses them, and their layouts are ambiguous.
    ``casts``: CUDA's rules of autocast, where there is no such device.
    """
    if method.device_kind == "cuda" and not has_gpu():
        raise UsageError(
            "--device-kind: cuda needs a CUDA device, got none (autograd asks the driver); use as-cuda: "
            "the work is the same, kernels of attention and normalisation have other names"
        )
    if method.optimizer_implementation == DEFAULT:
        chosen = CUDA_DEFAULT if casts else default_implementation(method.device_kind)
        method = replace(method, optimizer_implementation=chosen)
    with without_content(method.device_kind), collector_paused():
        try:
            least = max(2, micro_batch or _SAMPLES)
            steps = _recorded(_shallow(source, method, casts), source, least)
            module = built(source)
        except IrregularLayersError:
            model = build_model(source, method, casts=casts)
            own = source.own_samples() or 1
            least = max(2, micro_batch or (own if own > 1 else _SAMPLES))
            steps, module = _recorded([model], source, least), model.module
    step = _joined_step(source, method, module, *steps)
    return TracedModel(
        workload=_workload(source.name, step.at(micro_batch=least), module),
        step=step,
        memory=joined_memory(module, *steps),
    )


def trace_once(
    source: ModelSource, method: StepMethod, *, micro_batch: int, casts: AsOnCuda
) -> TracedStep:
    """One optimizer step at one micro-batch, as CUDA runs it: shapes alone, in a third of the time."""

    def recorded() -> tuple[TrainedModel, RecordedStep]:
        model = build_model(source, method, casts=casts)
        return model, record_step(model, micro_batch)

    with collector_paused():
        try:
            with torch.device("meta"):
                model, step = recorded()
        except UntraceableModel:  # its constructor reads values
            with without_content(method.device_kind):
                model, step = recorded()
    return TracedStep(
        micro_batch=micro_batch,
        sample=step.sample,
        method=method,
        operators=step.operators,
        segments=(Segment(count=1, calls=step.calls),),
        parameters=_parameters(model.module, step.ready_after),
        saved_bytes=step.saved_bytes,
        buffer_bytes=sum(b.nbytes for b in model.module.buffers()),
        frozen_bytes=sum(p.nbytes for p in model.module.parameters() if not p.requires_grad),
        caveats=source.caveats,
    )


def _shallow(source: ModelSource, method: StepMethod, casts: AsOnCuda | None) -> list[TrainedModel]:
    """Models of a few of the equal layers of a deep one."""
    if source.with_depth is None or source.depth < LEAST_DEPTH:
        raise IrregularLayersError
    return [build_model(source.with_depth(depth), method, casts=casts) for depth in DEPTHS]


def _recorded(
    models: Sequence[TrainedModel], source: ModelSource, least: int
) -> tuple[RecordedStep, RecordedStep]:
    """A step at a micro-batch and at twice as many samples; of the whole model, or as its layers repeat."""

    def record(micro_batch: int, ran_at: int | None = None) -> RecordedStep:
        steps = [record_step(model, micro_batch, ran_at=ran_at) for model in models]
        return steps[0] if len(steps) == 1 else deepened(steps, source.depth)

    return record(least), record(2 * least, ran_at=least)


def _joined_step(
    source: ModelSource,
    method: StepMethod,
    module: nn.Module,
    first: RecordedStep,
    second: RecordedStep,
) -> SymbolicStep:
    tensors, operators, calls = _joined_calls(first, second)
    if list(first.ready_after.items()) != list(second.ready_after.items()):
        raise UntraceableModel(
            f"{source.name}: gradients become ready in another order at micro-batch "
            f"{second.micro_batch} than at {first.micro_batch}; make the model independent of the batch"
        )
    batches = first.micro_batch, second.micro_batch
    return SymbolicStep(
        traced_micro_batches=batches,
        own_micro_batch=source.own_samples(),
        sample=first.sample,
        method=method,
        tensors=tensors,
        operators=operators,
        segments=compressed(calls),
        parameters=_parameters(module, first.ready_after),
        saved=_line(batches, first.saved_bytes, second.saved_bytes),
        buffer_bytes=sum(b.nbytes for b in module.buffers()),
        frozen_bytes=sum(p.nbytes for p in module.parameters() if not p.requires_grad),
        caveats=source.caveats,
    )


def _joined_calls(
    first: RecordedStep, second: RecordedStep
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicOperator, ...], list[Call]]:
    """Tensors, operators and calls of two recordings of one step; equal pairs give one operator.

    The optimizer knows no batch, and is that of the first.
    """
    batches = first.micro_batch, second.micro_batch
    tensors: dict[SymbolicTensor, int] = {}
    operators: dict[SymbolicOperator, int] = {}
    pairs: dict[tuple[int, int], int] = {}

    def positions(ones: tuple[TensorSpec, ...], others: tuple[TensorSpec, ...]) -> tuple[int, ...]:
        if len(ones) != len(others):
            raise ValueError(
                f"there are {len(ones)} tensors at one micro-batch and {len(others)} at another"
            )
        return tuple(
            tensors.setdefault(_joined_tensor(one, other, batches), len(tensors))
            for one, other in zip(ones, others, strict=True)
        )

    def joined(at: Call, one: Operator, other: Operator) -> Call:
        position = pairs.get((id(one), id(other)))
        if position is None:
            try:
                operator = SymbolicOperator(
                    name=one.name,
                    inputs=positions(one.inputs, other.inputs),
                    outputs=positions(one.outputs, other.outputs),
                    arguments=one.arguments
                    if one.arguments == other.arguments
                    else json.dumps(
                        merged_arguments(
                            json.loads(one.arguments),
                            json.loads(other.arguments),
                            micro_batches=batches,
                        )
                    ),
                    mutated=one.mutated,
                    view=one.view,
                )
            except ValueError as error:
                raise UntraceableModel(
                    f"module {at.module!r}, operator {one.name}: {error}: {_RETRACE}"
                ) from error
            position = operators.setdefault(operator, len(operators))
            pairs[id(one), id(other)] = position
        return Call(operator=position, phase=at.phase, module=at.module)

    ones, others = (
        [call for call in step.calls if call.phase is not Phase.OPTIMIZER]
        for step in (first, second)
    )
    calls = []
    for at, there in zip(ones, others, strict=False):
        one, other = first.operators[at.operator], second.operators[there.operator]
        if (at.phase, at.module, one.name) != (there.phase, there.module, other.name):
            raise UntraceableModel(
                f"module {at.module!r}: runs {one.name} at micro-batch {batches[0]} and {other.name} at "
                f"{batches[1]}: {_RETRACE}"
            )
        calls.append(joined(at, one, other))
    if len(ones) != len(others):
        raise UntraceableModel(
            f"the step runs {len(ones)} operators at micro-batch {batches[0]} and {len(others)} at "
            f"{batches[1]}: {_RETRACE}"
        )
    for at in first.calls[len(ones) :]:
        operator = first.operators[at.operator]
        calls.append(joined(at, operator, operator))
    return tuple(tensors), tuple(operators), calls


def _joined_tensor(one: TensorSpec, other: TensorSpec, batches: tuple[int, int]) -> SymbolicTensor:
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        raise ValueError(
            f"a tensor is {one.shape} {one.dtype} and then {other.shape} {other.dtype}"
        )
    if (one.stride is None) != (other.stride is None):
        raise ValueError("a tensor is contiguous at one micro-batch and not at another")

    def lines(ones: tuple[int, ...], others: tuple[int, ...]) -> tuple[Dimension, ...]:
        return tuple(
            through(((batches[0], a), (batches[1], b))) for a, b in zip(ones, others, strict=True)
        )

    return SymbolicTensor(
        shape=lines(one.shape, other.shape),
        dtype=one.dtype,
        stride=None if one.stride is None else lines(one.stride, other.stride or ()),
    )


def joined_memory(module: nn.Module, first: RecordedStep, second: RecordedStep) -> StepMemory:
    """The memory of two recordings as one record with the micro-batch left open."""
    names, others = ([s.operators[c.operator].name for c in s.calls] for s in (first, second))
    if names != others:
        raise UntraceableModel(
            f"memory at micro-batch {first.micro_batch} and {second.micro_batch}: "
            "the steps must run the same operators; make the model independent of the batch"
        )
    batches = first.micro_batch, second.micro_batch
    parts = dict(module.named_modules())
    blocks = []
    for path, (input_bytes, saved_bytes) in first.blocks.items():
        input_there, saved_there = second.blocks[path]
        blocks.append(
            Block(
                path=path,
                parameter_bytes=sum(p.nbytes for p in parts[path].parameters()),
                input=_line(batches, input_bytes, input_there),
                saved=_line(batches, saved_bytes, saved_there),
            )
        )
    return StepMemory(
        traced_micro_batches=batches,
        moments=tuple(
            Moment(
                phase=first.calls[index].phase,
                module=first.calls[index].module,
                operator=names[index],
                parts=tuple(
                    PartBytes(part=part, size=_line(batches, int(here), int(there)))
                    for part, here, there in zip(
                        Part, first.in_use[index], second.in_use[index], strict=True
                    )
                ),
            )
            for index in _highest(first, second)
        ),
        reserved_ratio=max(1.0, first.reserved_ratio, second.reserved_ratio),
        blocks=tuple(blocks),
    )


def _highest(first: RecordedStep, second: RecordedStep) -> list[int]:
    """Calls of each phase at which more memory is in use than at any other, for some micro-batch."""
    batches = first.micro_batch, second.micro_batch
    slopes = np.rint((second.in_use - first.in_use) / (batches[1] - batches[0])).astype(np.int64)
    constants = (first.in_use - slopes * batches[0]).sum(axis=1)
    found = []
    for phase in Phase:
        calls = [index for index, call in enumerate(first.calls) if call.phase is phase]
        totals = [
            AffineBytes(constant_bytes=int(constants[i]), per_sample_bytes=int(slopes[i].sum()))
            for i in calls
        ]
        found += [calls[position] for position in upper_envelope(totals)]
    return found


def _line(batches: tuple[int, int], first: Bytes, second: Bytes) -> AffineBytes:
    slope = round((second - first) / (batches[1] - batches[0]))
    return AffineBytes(constant_bytes=first - slope * batches[0], per_sample_bytes=slope)


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


def _workload(name: str, step: TracedStep, module: nn.Module) -> Workload:
    """What data-parallel training needs to know of a traced step.

    A gradient is ready when so much of the backward FLOP is done as came before it. DDP coalesces
    the buffers of one data type into one broadcast.
    """
    done = [0.0]
    for call in step.calls():
        if call.phase is Phase.BACKWARD:
            done.append(done[-1] + step.operators[call.operator].flop)
    buffers: dict[torch.dtype, int] = {}
    for buffer in module.buffers():
        buffers[buffer.dtype] = buffers.get(buffer.dtype, 0) + buffer.nbytes
    return Workload(
        name=name,
        sample=step.sample,
        parameters=tuple(
            Parameter(
                name=parameter.name,
                num_elements=parameter.num_elements,
                element_bytes=ELEMENT_BYTES[parameter.dtype],
                ready_fraction=1.0
                if parameter.ready_after is None
                else done[parameter.ready_after] / (done[-1] or 1.0),
            )
            for parameter in step.parameters
        ),
        buffer_bytes=tuple(buffers.values()),
        forward_flop=step.flop(Phase.FORWARD) / step.micro_batch,
        backward_flop=step.flop(Phase.BACKWARD) / step.micro_batch,
        num_operators=step.num_calls(Phase.FORWARD) + step.num_calls(Phase.BACKWARD),
    )
