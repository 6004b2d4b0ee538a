"""A model source as a workload, a symbolic step and its memory: two recorded steps joined.

Of a deep model a few of its equal layers are recorded. A stack with one layer more runs every operator of that
layer once more. What is counted grows by the same amount:

    value(depth, layer) = constant + a depth + b layer        [B], calls, indices of paths

Three depths are recorded. Two of them predict the third exactly, or the whole model is recorded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn

from perfmodel.errors import UntraceableModel, UsageError
from perfmodel.step import collector_paused
from perfmodel.tracing.cuda import AsOnCuda
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
        # A factory may leave gradients off, or look for NaN among values, which a trace does not have.
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):  # type: ignore[no-untyped-call]
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


#: Layers of the models that are recorded; the whole is recorded unless it has more than all of them together.
DEPTHS: Final = (3, 4, 5)
LEAST_DEPTH: Final = sum(DEPTHS) + 1

#: What stays the same from layer to layer, and whole numbers that grow.
_Item: TypeAlias = tuple[Any, tuple[int, ...]]
#: Torchvision writes ``encoder_layer_3``.
_INDEX: Final = re.compile(r"(?<![^._])\d+(?![^.])")


class IrregularLayersError(Exception):
    """The layers do not repeat as they would have to."""


def deepened(steps: Sequence[RecordedStep], depth: int) -> RecordedStep:
    """The step of ``depth`` layers from those of ``DEPTHS`` layers.

    Raises ``IrregularLayersError`` if the first two do not predict the third.
    """
    first, second, third = steps
    if _parts(_grown(first, second, 1)) != _parts(third):
        raise IrregularLayersError
    found = _grown(second, third, depth - DEPTHS[-1])
    # Gaps that the caching allocator keeps grow with the layers, in whole blocks: within some percent.
    more = (depth - DEPTHS[-1]) / (DEPTHS[-1] - DEPTHS[0])

    def gap_bytes(before: Bytes, after: Bytes) -> Bytes:
        before, after = before - first.peak_bytes, after - third.peak_bytes
        return max(0, round(after + (after - before) * more))

    return replace(
        found,
        reserved_bytes=found.peak_bytes + gap_bytes(first.reserved_bytes, third.reserved_bytes),
        allocated_bytes=found.peak_bytes + gap_bytes(first.allocated_bytes, third.allocated_bytes),
    )


def _parts(step: RecordedStep) -> tuple[Any, ...]:
    """All that is predicted."""
    ready, blocks = list(step.ready_after.items()), list(step.blocks.items())
    return step.operators, step.calls, ready, blocks, step.saved_bytes, step.in_use.tolist()


def _grown(one: RecordedStep, other: RecordedStep, more: int) -> RecordedStep:
    """The step with ``more`` layers than ``other``, which has one more than ``one``."""
    calls: list[Call] = []
    in_use: list[tuple[int, ...]] = []
    for phase in Phase:
        for key, numbers in _extended(_called(one, phase), _called(other, phase), more):
            operator, path, num_indices = key
            module = _path(path, numbers[:num_indices])
            calls.append(Call(operator=operator, phase=phase, module=module))
            in_use.append(numbers[num_indices:])
    if len(one.operators) != len(other.operators):
        raise IrregularLayersError
    ready = _named(
        {name: (after,) for name, after in one.ready_after.items()},
        {name: (after,) for name, after in other.ready_after.items()},
        more,
    )
    return replace(
        other,
        operators=tuple(
            _operator(*pair, more) for pair in zip(one.operators, other.operators, strict=True)
        ),
        calls=tuple(calls),
        ready_after={name: after for name, (after,) in ready.items()},
        saved_bytes=other.saved_bytes + more * (other.saved_bytes - one.saved_bytes),
        in_use=np.array(in_use, dtype=np.int64),
        blocks={name: (a, b) for name, (a, b) in _named(one.blocks, other.blocks, more).items()},
    )


def _extended(one: Sequence[_Item], other: Sequence[_Item], more: int) -> list[_Item]:
    """Items of ``more`` layers than ``other`` has, in their order.

    Behind the second layer of the stretch that repeats, neither first nor last, its third is put in again
    and again.
    """
    period = len(other) - len(one)
    alike = [a[0] == b[0] for a, b in zip(one, other, strict=False)]
    alike_at_end = [a[0] == b[0] for a, b in zip(reversed(one), reversed(other), strict=False)]
    begins = len(one) - (alike_at_end.index(False) if False in alike_at_end else len(one))
    at = min(alike.index(False) if False in alike else len(one), begins + 2 * period)
    if period < 0 or at < max(begins, period):
        raise IrregularLayersError
    block, before = other[at : at + period], other[at - period : at]
    if [key for key, _ in block] != [key for key, _ in before]:
        raise IrregularLayersError

    found = [
        (key, _moved(v, more, v, a)) for (_, a), (key, v) in zip(one[:at], other, strict=False)
    ]
    for layer in range(more + 1):
        found += [
            (key, _moved(_moved(now, more, last, a), layer, now, last))
            for (_, a), (_, last), (key, now) in zip(
                one[at - period : at], before, block, strict=True
            )
        ]
    rest = zip(one[at:], other[at + period :], strict=True)
    return [*found, *((key, _moved(v, more, v, a)) for (_, a), (key, v) in rest)]


def _moved(
    value: tuple[int, ...], times: int, after: tuple[int, ...], before: tuple[int, ...]
) -> tuple[int, ...]:
    """A value that changes by a difference, ``times`` over."""
    return tuple(v + times * (b - a) for v, b, a in zip(value, after, before, strict=True))


def _called(step: RecordedStep, phase: Phase) -> list[_Item]:
    """Calls of a phase, with the indices of their module and what is in use."""
    items: list[_Item] = []
    for call, row in zip(step.calls, step.in_use.tolist(), strict=True):
        if call.phase is phase:
            path, indices = _template(call.module)
            items.append(((call.operator, path, len(indices)), (*indices, *row)))
    return items


def _named(
    one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]], more: int
) -> dict[str, tuple[int, ...]]:
    """Numbers by the paths of modules."""

    def items(named: Mapping[str, tuple[int, ...]]) -> list[_Item]:
        parts = [(*_template(name), numbers) for name, numbers in named.items()]
        return [((path, len(at)), (*at, *numbers)) for path, at, numbers in parts]

    found = {}
    for key, numbers in _extended(items(one), items(other), more):
        path, num_indices = key
        found[_path(path, numbers[:num_indices])] = numbers[num_indices:]
    return found


def _template(path: str) -> tuple[str, tuple[int, ...]]:
    """A path without its indices, and these."""
    return _INDEX.sub("#", path), tuple(map(int, _INDEX.findall(path)))


def _path(template: str, indices: Sequence[int]) -> str:
    left = iter(indices)
    return re.sub("#", lambda _: str(next(left)), template)


class _Lists:
    """Arguments of an operator with more tensors in each of their lists; the tensors are gathered."""

    def __init__(self, one: Operator, other: Operator, more: int) -> None:
        self._pair, self._more = (one, other), more
        self.inputs: dict[int, TensorSpec] = {}
        self.mutated: dict[int, None] = {}

    def grown(self, one: Any, other: Any) -> Any:
        if isinstance(one, dict) and "tensor" in one:
            return self._tensors([one], [other])[0]
        if not isinstance(one, list) or not isinstance(other, list):
            if one != other:
                raise IrregularLayersError
            return other
        if one and all(isinstance(item, dict) and "tensor" in item for item in (*one, *other)):
            return self._tensors(one, other)
        if len(one) != len(other):
            raise IrregularLayersError
        return [self.grown(*pair) for pair in zip(one, other, strict=True)]

    def _tensors(self, *lists: list[dict[str, int]]) -> list[dict[str, int]]:
        items: list[list[_Item]] = [
            [((of.inputs[at], at in of.mutated), (at,)) for at in (item["tensor"] for item in each)]
            for of, each in zip(self._pair, lists, strict=True)
        ]
        found = []
        for key, (at,) in _extended(items[0], items[1], self._more):
            self.inputs[at], is_written = key
            self.mutated |= {at: None} if is_written else {}
            found.append({"tensor": at})
        return found


def _operator(one: Operator, other: Operator, more: int) -> Operator:
    """An operator on lists of parameters has more of them; others are the same."""
    if one == other:
        return other
    before, after = json.loads(one.arguments), json.loads(other.arguments)
    if (one.name, one.view, [*before[1]]) != (other.name, other.view, [*after[1]]):
        raise IrregularLayersError
    lists = _Lists(one, other, more)
    positional = lists.grown(before[0], after[0])
    named = {name: lists.grown(before[1][name], value) for name, value in after[1].items()}
    outputs = _extended([(s, ()) for s in one.outputs], [(s, ()) for s in other.outputs], more)
    return Operator.of(
        other.name,
        tuple(lists.inputs[at] for at in range(len(lists.inputs))),
        tuple(spec for spec, _ in outputs),
        json.dumps([positional, named]),
        mutated=tuple(lists.mutated),
        view=other.view,
    )
