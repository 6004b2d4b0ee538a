"""A traced step repeated operator by operator, in its order and with its allocations.

Alone an operator finds its data in the cache, on evicted data nothing: both are wrong inside a step.
In the order of the step it finds what the step leaves it.
"""

import json
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from calibrate.device import Clock
from calibrate.probes import Session, repeats_within
from calibrate.probes.training import host_steps, trained
from calibrate.ranks import one_line_of
from calibrate.replays import Dataflow, linked
from calibrate.task import ModelTask, ReplayTask, TraceTask
from perfmodel.documents.observation import (
    IsolatedOperator,
    OperatorsObservation,
    ReplayObservation,
    TimedOperator,
    WorkloadObservation,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.files import unsealed
from perfmodel.tracing.reference import REFERENCES
from perfmodel.tracing.source import make_optimizer
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.units import Seconds
from perfmodel.workload import Operator, Phase, TensorSpec, base_name
from perfmodel.workload.step import TracedStep, calls_signature, parameters_signature, signature

_TRACED_SAMPLES: Final = 4
#: Spread of made-up values: small enough that products of many layers stay finite.
_SCALE = 0.05
#: Operators that leave their backward pass a workspace only where gradients are wanted; without it that
#: pass reads memory that is not there.
_KEEPS_FOR_BACKWARD = ("aten.mkldnn_rnn_layer.default",)
#: What hands on the values of its first input.
_COPIES = frozenset({"clone", "_to_copy", "_unsafe_view"})
_INDEX_TYPES = frozenset({"int64", "int32"})


def resolved(name: str) -> Callable[..., Any]:
    """The kernel that a recorded name such as "aten.add.Tensor" stands for."""
    namespace, operator, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    return found


def bound_by_python(name: str) -> Callable[..., Any] | None:
    """The function that modules call for an operator, if there is one.

    ``torch.ops`` reads a schema in every call: twice the time of a small operator.
    """
    namespace, operator, _ = name.split(".")
    holders = (torch._C._VariableFunctions, torch._C._nn, Tensor)  # noqa: SLF001
    found = (getattr(holder, operator, None) for holder in holders)
    return next(filter(None, found), None) if namespace == "aten" else None


class ReplayedOperator:
    """An operator with its arguments read; only the tensors are missing."""

    def __init__(self, operator: Operator, device: torch.device) -> None:
        self.operator = operator
        self._function: Callable[..., Any] | None
        try:
            self._general = resolved(operator.name)
            self._function = bound_by_python(operator.name) or self._general
        except AttributeError:  # traced with another torch, or an operator of the model's own
            self._function = None
        positional, keyword = json.loads(operator.arguments)
        self._positional: list[Any] = positional
        self._keyword: dict[str, Any] = keyword
        self._device = device

    def bound(self, tensors: Sequence[Tensor]) -> Callable[[], Any]:
        """The call on tensors that match ``operator.inputs``, ready to be timed."""
        function = self._function
        if function is None:
            raise ValueError(f"{self.operator.name}: this torch does not know it")
        positional = [self._value(value, tensors) for value in self._positional]
        keyword = {key: self._value(value, tensors) for key, value in self._keyword.items()}
        if self.operator.name in _KEEPS_FOR_BACKWARD:

            def differentiable() -> Any:
                with torch.enable_grad():
                    return self._general(*positional, **keyword)

            return differentiable
        if function is self._general:
            return lambda: function(*positional, **keyword)

        def called() -> Any:
            try:
                return function(*positional, **keyword)
            except TypeError:  # other arguments than those of the schema: now and ever after
                self._function = self._general
                return self._general(*positional, **keyword)

        return called

    def _value(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, list):
            return [self._value(item, tensors) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        match kind:
            case "tensor":
                return tensors[content]
            case "device":
                return self._device
            case "dtype" | "layout" | "memory_format":
                return getattr(torch, content)
            case _:
                raise ValueError(
                    f"{self.operator.name}: an argument of type {content} was not kept"
                )


def returned_tensors(operator: Operator, result: Any) -> list[Tensor]:
    """Tensors of a result in the order of ``operator.outputs``; none of an operator in place.

    Made up are those that fused operators leave undefined, but rules of shapes name (gradients of an LSTM's states),
    and seeds of cuDNN's attention: its backward pass, called alone, refuses its own.
    """
    flat = tree_leaves(list(result) if isinstance(result, tuple | list) else [result])
    found = [value for value in flat if value is None or isinstance(value, Tensor)]
    if len(found) > len(operator.outputs):  # the first images have no gradient, nor a place for it
        found = [value for value in found if value is not None]
    device = next((value.device for value in found if value is not None), torch.device("cpu"))
    is_seeded = "cudnn_attention" in operator.name
    if operator.outputs and len(found) < len(operator.outputs):
        raise ValueError(
            f"{operator.name}: must return {len(operator.outputs)} tensors, got {len(found)}"
        )
    return [
        made_up(spec, device) if value is None or (is_seeded and not spec.shape) else value
        for spec, value in zip(operator.outputs, found, strict=False)
    ]


def made_up(spec: TensorSpec, device: torch.device, *, below: int = 1) -> Tensor:
    """A tensor of a shape, type and layout: small random numbers, or integers from 0 to ``below``.

    Integers are distinct where there are enough: what is added up at one place takes its turns.
    """
    dtype = getattr(torch, spec.dtype)
    stride = spec.stride if spec.stride is not None else _contiguous(spec.shape)
    reach = [(size - 1) * step for size, step in zip(spec.shape, stride, strict=True)]
    length = 1 + sum(reach) if all(spec.shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        fan = math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 1
        scale = min(_SCALE, 1 / math.sqrt(max(1, fan)))
        storage = torch.empty(length, device=device, dtype=dtype).normal_(0.0, scale)
    elif dtype is torch.bool:
        storage = torch.ones(length, device=device, dtype=dtype)
    else:
        below = max(1, below)
        storage = (
            torch.randint(0, below, (length,), device=device, dtype=dtype)
            if length > below
            else torch.randperm(below, device=device)[:length].to(dtype)
        )
    return storage.as_strided(spec.shape, stride)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def index_limits(operator: Operator) -> dict[int, int]:
    """Exclusive upper bounds of the integers that inputs may hold, by position, of those that it looks up by.

    The names of the schema tell which they are: ``gather`` and ``scatter_reduce_`` are alike there.
    """
    if not any(spec.dtype in _INDEX_TYPES for spec in operator.inputs):
        return {}
    try:
        schema = resolved(operator.name)._schema  # type: ignore[attr-defined] # noqa: SLF001
    except AttributeError:  # traced with another torch, or an operator of the model's own
        return {}
    positional, keyword = json.loads(operator.arguments)
    names = (argument.name for argument in schema.arguments)
    given = dict(zip(names, positional, strict=False)) | keyword
    bounds: list[tuple[Any, int]] = []
    match given:
        case {"indices": index, "num_weights": int(count)}:
            bounds = [(index, count)]
        case {"indices": index, "weight": {"tensor": int(table)}}:
            bounds = [(index, operator.inputs[table].shape[0])]
        case {"self": {"tensor": int(source)}}:
            bounds = _bounds_inside(operator.inputs[source].shape, given)
    limits: dict[int, int] = {}
    for index, limit in bounds:
        match index:
            case {"tensor": int(position)} if operator.inputs[position].dtype in _INDEX_TYPES:
                limits[position] = min(limit, limits.get(position, limit))
    return limits


def _bounds_inside(shape: Sequence[int], given: dict[str, Any]) -> list[tuple[Any, int]]:
    """Arguments that address elements of a tensor of this shape, and exclusive upper bounds."""
    match given:
        case {"indices": list(each)}:  # one for each dimension from the first on, or none
            return list(zip(each, shape, strict=False))
        case {"index": index, "dim": int(dimension)}:
            return [(index, shape[dimension] if shape else 1)]
        case {"index": index}:
            return [(index, math.prod(shape))]
        case {"target": index} if shape:  # classes come after the samples, if there are several
            return [(index, shape[:2][-1])]
    return []


def limits_of_sources(flow: Dataflow, step: TracedStep) -> dict[int, int]:
    """Exclusive upper bounds of the integers in tensors that calls look up by, or by views or copies of them."""
    by_operator = [index_limits(operator) for operator in step.operators]
    origin: dict[int, int] = {}
    limits: dict[int, int] = {}
    for call in flow.calls:
        operator = step.operators[call.operator]
        read = [origin.get(number, number) for number in call.inputs]
        for position, limit in by_operator[call.operator].items():
            number = read[position]
            limits[number] = min(limit, limits.get(number, limit))
        if read and (operator.view or base_name(operator.name) in _COPIES):
            origin.update(dict.fromkeys(call.outputs, read[0]))
    return limits


#: Calls that are issued behind one idle kernel of this length, on devices that have a queue.
_HELD_CALLS = 64
_HOLD_S: Seconds = 0.01
#: By whether the device may wait for its host in one of them.
_MINIMUM_PASSES: Final = {False: 2, True: 3}
_MAXIMUM_PASSES = 30
#: A gradient as training has them.
_ORDINARY = 1e-3
#: What looks rows of a table up by indices: the others have a gradient of 0, which AdamW takes up to twice as long for.
_LOOKUPS = frozenset({"embedding", "_embedding_bag"})


@contextmanager
def without_denormals() -> Iterator[None]:
    """Made-up values fade to denormal numbers, which training does not have and which are slow."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Passes:
    """Forward and backward pass of a step, call by call."""

    def __init__(self, session: Session, step: TracedStep) -> None:
        self.flow: Dataflow = linked(step)
        self.failed: set[int] = set()
        """Operators that cannot be repeated from their record."""
        self._session = session
        self._operators = [
            ReplayedOperator(operator, session.device) for operator in step.operators
        ]
        limits = limits_of_sources(self.flow, step)
        self.lasting = {
            number: made_up(source.spec, session.device, below=limits.get(number, 1))
            for number, source in self.flow.sources.items()
        }
        """Tensors that no call makes."""
        parameters = self.flow.parameters.items()
        self.parameters = {number: made_up(spec, session.device) for number, spec in parameters}
        """In the order of the step's parameters."""
        self.lasting.update(self.parameters)

    def new_clock(self) -> Clock:
        """A clock of the device for one pass."""
        return self._session.measured.clock()

    def run(self, clock: Clock) -> None:
        """Make every call between two marks."""
        tensors = dict(self.lasting)
        device = self._session.measured
        for index, (call, released) in enumerate(
            zip(self.flow.calls, self.flow.released, strict=True)
        ):
            if index % _HELD_CALLS == 0:
                # Marks in an empty queue would show how fast the host is.
                device.synchronise()
                device.hold(_HOLD_S)
            try:
                inputs = [tensors[number] for number in call.inputs]
                results = self._timed(call.operator, inputs, clock)
                tensors.update(zip(call.outputs, results, strict=True))
            except Exception as error:
                name = self._operators[call.operator].operator.name
                raise RuntimeError(f"{name} in the {call.phase} pass: {error!r}") from error
            del inputs, results
            for number in released:
                tensors.pop(number, None)

    def durations_s(self, clock: Clock) -> list[Seconds]:
        """Of each call, and of whatever was marked in pairs after them. [s]"""
        instants_s = clock.seconds()
        pairs = zip(instants_s[::2], instants_s[1::2], strict=True)
        marked_s = (end - start for start, end in pairs)
        calls = (self._operators[call.operator].operator for call in self.flow.calls)
        found_s = [next(marked_s) if self._is_marked(each) else 0.0 for each in calls]
        return [*found_s, *marked_s]

    def _is_marked(self, operator: Operator) -> bool:
        """Views take no time of a device with a queue, whose marks do."""
        return not (operator.view and self._session.asynchronous)

    def _timed(self, operator: int, inputs: list[Tensor], clock: Clock) -> list[Tensor]:
        """Results of one call between two marks; empty tensors where it cannot be repeated."""
        replayed = self._operators[operator]
        act = None
        if operator not in self.failed:
            try:
                act = replayed.bound(inputs)
            except ValueError:
                self.failed.add(operator)
        result: Any = None
        # A view costs a step next to nothing; from here it would cost a call.
        is_timed = not replayed.operator.view
        if is_timed:
            clock.mark()
        if act is not None:
            try:
                result = act()
            except (RuntimeError, IndexError, TypeError, ValueError):
                self.failed.add(operator)
        if self._is_marked(replayed.operator):
            if not is_timed:
                clock.mark()
            clock.mark()
        if operator not in self.failed:
            try:
                return returned_tensors(replayed.operator, result)
            except ValueError:
                self.failed.add(operator)
        return [made_up(s, self._session.device) for s in replayed.operator.outputs]


class Replay:
    """One step, its optimizer included, that can be repeated."""

    def __init__(self, session: Session, step: TracedStep) -> None:
        """Make the buffers and repeat the step once."""
        self._session = session
        self._step = step
        self._passes = Passes(session, step)
        self._parameters = [nn.Parameter(values) for values in self._passes.parameters.values()]
        self._optimizer = make_optimizer(
            self._parameters,
            name=step.method.optimizer,
            implementation=step.method.optimizer_implementation,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._looked_up: dict[int, int] = {}
        """Rows of each table that a step names at most, by the number of its tensor; nothing else reads it."""
        readers = Counter(number for call in self._passes.flow.calls for number in call.inputs)
        for call in self._passes.flow.calls:
            operator = step.operators[call.operator]
            if base_name(operator.name) in _LOOKUPS and readers[call.inputs[0]] == 1:
                self._looked_up[call.inputs[0]] = operator.inputs[1].num_elements
        self.failed = self._passes.failed
        with without_denormals():
            self._once()  # it loads kernels
        self.calls_s: dict[tuple[int, Phase], list[Seconds]] = defaultdict(list)
        """By operator and phase, in each pass the mean over its calls. [s]"""
        self.phases_s: dict[Phase, list[Seconds]] = defaultdict(list)
        """In each pass the sum over the calls of a phase; the optimizer as one call over all parameters. [s]"""

    def for_about(self, target_s: Seconds) -> None:
        """Repeat the step for about this time, and keep its times."""
        device = self._session.measured
        least = _MINIMUM_PASSES[device.asynchronous]
        with without_denormals():
            begun_s = device.now()
            self._keep(self._once())
            passed_s = device.now() - begun_s
            most = min(_MAXIMUM_PASSES, device.most_repeats // 4)
            num_passes = repeats_within(target_s, [passed_s], minimum=least, maximum=most)
            for _ in range(num_passes - 1):
                self._keep(self._once())

    @torch.no_grad()
    def _once(self) -> list[Seconds]:
        """Repeat the step; how long each call takes, and the optimizer as the last. [s]"""
        clock = self._passes.new_clock()
        self._passes.run(clock)
        for number, parameter, traced in zip(
            self._passes.parameters, self._parameters, self._step.parameters, strict=True
        ):
            if traced.ready_after is not None:
                # What made-up values lead to is not as training has it: some quotients take several times as long.
                parameter.grad = torch.full_like(parameter, _ORDINARY)
                if number in self._looked_up:
                    parameter.grad[self._looked_up[number] :] = 0.0
        self._session.synchronise()
        self._session.measured.hold(_HOLD_S)
        clock.mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark()
        return self._passes.durations_s(clock)

    def _keep(self, durations_s: Sequence[Seconds]) -> None:
        *calls_s, optimizer_s = durations_s
        found: dict[tuple[int, Phase], list[Seconds]] = defaultdict(list)
        sums_s = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0, Phase.OPTIMIZER: optimizer_s}
        for call, duration_s in zip(self._passes.flow.calls, calls_s, strict=True):
            found[call.operator, call.phase].append(duration_s)
            sums_s[call.phase] += duration_s
        for key, values_s in found.items():
            self.calls_s[key].append(sum(values_s) / len(values_s))
        for phase, sum_s in sums_s.items():
            self.phases_s[phase].append(sum_s)


#: Share of the time of a task in which operators run one by one, where its model trains in the rest.
_REPLAYED: Final = 1 / 3


def measure_replay(session: Session, task: ReplayTask) -> ReplayObservation:
    """Trace or read the step of a task, train its model if its code is at hand, and repeat it.

    Several ranks, all of which must call it, train alone.
    """
    traced, step = _replayed_step(session, task)
    of_step: dict[str, Any] = {
        "task": task.name,
        "round": task.round,
        "workload": task.workload,
        "micro_batch": task.micro_batch,
        "parameters": parameters_signature(step),
        "calls": calls_signature(step),
    }
    ranks = task.world_size
    if ranks > 1:
        together_s, _ = trained(session, task.code, step, target_s=task.target_s, world_size=ranks)
        return ReplayObservation(**of_step, world_size=ranks, trained_s=together_s)
    own_s, issued_s, untrained = None, None, ""
    try:
        own_s, issued_s = trained(
            session, task.code, step, target_s=task.target_s * (1 - _REPLAYED)
        )
    # Code of a user's may raise anything; its operators are timed all the same.
    except Exception as error:  # noqa: BLE001
        untrained = one_line_of(error)
    session.measured.release()
    # Operators of a GPU take as long in every round.
    if own_s and task.round > 0 and session.asynchronous:
        return ReplayObservation(**of_step, trained_s=own_s, issued_s=issued_s)
    replay = Replay(session, step)
    replay.for_about(task.target_s * (_REPLAYED if own_s else 1))
    counts = step.call_counts()
    if task.round > 0:
        traced = None  # the same in every round: once is enough on disk
    return ReplayObservation(
        **of_step,
        operators=tuple(
            TimedOperator(
                signature=signature(step.operators[position]),
                phase=phase,
                num_calls=counts[position, phase],
                times_s=tuple(times_s),
            )
            for (position, phase), times_s in replay.calls_s.items()
            if position not in replay.failed
        ),
        forward_s=tuple(replay.phases_s[Phase.FORWARD]),
        backward_s=tuple(replay.phases_s[Phase.BACKWARD]),
        optimizer_s=tuple(replay.phases_s[Phase.OPTIMIZER]),
        trained_s=own_s,
        issued_s=issued_s,
        untrained=untrained,
        failed=tuple(sorted({step.operators[position].name for position in replay.failed})),
        traced=traced and traced.step,
    )


def _replayed_step(session: Session, task: ReplayTask) -> tuple[TracedModel | None, TracedStep]:
    """The step of a task at its micro-batch, and its trace if it was made here."""
    if task.document is None:
        reference = REFERENCES[task.workload]
        torch.backends.cudnn.benchmark = reference.cudnn_benchmark
        method = reference.method(session.device.type)
        with session.measured.without():
            traced = trace_model(reference, method, micro_batch=2)
        return traced, traced.step.at(micro_batch=task.micro_batch)
    with unsealed():  # whoever gave the order has read it
        document = WorkloadDocument.read(Path(task.document))
    return None, document.trace.at(micro_batch=task.micro_batch)


def measure_workload(session: Session, task: TraceTask) -> WorkloadObservation:
    """Trace a reference model; its gradients are ready when the work before them, by its trace, is done."""
    reference = REFERENCES[task.workload]
    with session.measured.without():
        traced = trace_model(reference, reference.method("cpu"), micro_batch=_TRACED_SAMPLES)
    return WorkloadObservation(task=task.name, round=task.round, workload=traced.workload)


#: Of the passes through a drawn model: a median needs no more.
_KEPT_PASSES = 7


def measure_model(session: Session, task: ModelTask) -> OperatorsObservation:
    """Time the operators of a drawn model inside its step."""
    from calibrate.random_models import draw  # noqa: PLC0415 - torchvision may be missing

    # What is calibrated does not change with what else is installed.
    model = draw(task.seed, task.index, on_gpu=session.asynchronous, with_timm=False)
    with tempfile.TemporaryDirectory() as folder, session.measured.without():
        traced = model.traced(Path(folder), session.device.type)
    step = traced.step.at(micro_batch=model.micro_batch)
    replay, counts = Replay(session, step), step.call_counts()
    replay.for_about(task.target_s)
    operators = tuple(
        IsolatedOperator(
            operator=step.operators[operator],
            phase=phase,
            times_s=tuple(times_s[-_KEPT_PASSES:]),
            num_calls=counts[operator, phase],
        )
        for (operator, phase), times_s in replay.calls_s.items()
        if operator not in replay.failed
    )
    del replay
    is_behind = session.asynchronous
    host = host_steps(session, model, step, target_s=task.target_s) if is_behind else None
    return OperatorsObservation(
        task=task.name,
        round=task.round,
        model=model.name,
        operators=operators,
        optimizers=(),
        host=host,
    )
