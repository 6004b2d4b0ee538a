"""One traced optimizer step: its operators, the order of their calls, and the parameters' gradients."""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from perfmodel.errors import WrongArgument, check_at_least, check_within
from perfmodel.units import Bytes, Flop
from perfmodel.workload import Call, Operator, Phase, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One update rule of ``torch.optim``."""

    torch_name: str
    """Its class there."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Beside parameters and learning rate."""
    states: int
    """Elements that it keeps per parameter."""
    passes: int
    """Elements that it reads and writes per parameter and step."""
    implementations: tuple[str, ...] = ("loop", "foreach", "fused")


#: Each reads parameter, gradient and its states, and writes all but the gradient.
OPTIMIZERS: Final[Mapping[str, Optimizer]] = MappingProxyType(
    {
        "sgd": Optimizer(torch_name="SGD", arguments={"momentum": 0.9}, states=1, passes=5),
        "adamw": Optimizer(torch_name="AdamW", states=2, passes=7),
    }
)
ADAMW: Final = OPTIMIZERS["adamw"]
IMPLEMENTATIONS: Final = tuple(
    dict.fromkeys(each for row in OPTIMIZERS.values() for each in row.implementations)
)
#: In place of one of them: whatever torch chooses on the device for a loop that asks for nothing.
DEFAULT: Final = "default"
#: Updates in one kernel, without temporaries.
FUSED: Final = "fused"
#: What it chooses on a GPU.
CUDA_DEFAULT: Final = "foreach"


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """``constant + per_sample * micro_batch``, a whole number."""

    constant: int
    per_sample: int

    def at(self, micro_batch: int) -> int:
        """The value at one micro-batch."""
        return self.constant + self.per_sample * micro_batch


Dimension: TypeAlias = int | Affine


def through(points: tuple[tuple[int, int], tuple[int, int]]) -> Dimension:
    """The line through two points (micro-batch, value), over whole numbers; ``ValueError`` if none is."""
    (first_batch, first), (second_batch, second) = points
    if first == second:
        return first
    per_sample, rest = divmod(second - first, second_batch - first_batch)
    if rest:
        raise ValueError(
            f"a size is {first} at micro-batch {first_batch} and {second} at {second_batch}: "
            "it does not grow by a whole number per sample"
        )
    return Affine(constant=first - per_sample * first_batch, per_sample=per_sample)


def value_at(dimension: Dimension, micro_batch: int) -> int:
    """The value of a dimension at one micro-batch."""
    return dimension.at(micro_batch) if isinstance(dimension, Affine) else dimension


def merged_arguments(first: Any, second: Any, *, micro_batches: tuple[int, int]) -> Any:
    """Arguments of one call, seen at two micro-batches, with every differing integer as a line.

    A line is written ``{"affine": [constant, per_sample]}``. Numbers with a fraction (such as
    1 / micro-batch in the gradient of a mean) do not move any cost: the first one stays.
    """
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second)
    )
    if numbers and isinstance(first, int) and isinstance(second, int):
        line = through(((micro_batches[0], first), (micro_batches[1], second)))
        return {"affine": [line.constant, line.per_sample]} if isinstance(line, Affine) else line
    if numbers:
        return first
    merge = functools.partial(merged_arguments, micro_batches=micro_batches)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge(one, other) for one, other in zip(first, second, strict=True)]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: merge(first[key], second[key]) for key in first}
    if first != second:
        raise ValueError(f"an argument is {first!r} at one micro-batch and {second!r} at another")
    return first


def arguments_at(arguments: str, micro_batch: int) -> str:
    """JSON of arguments with every line replaced by its value."""
    if '"affine"' not in arguments:
        return arguments
    return json.dumps(_filled(json.loads(arguments), micro_batch))


def _filled(value: Any, micro_batch: int) -> Any:
    if isinstance(value, list):
        return [_filled(item, micro_batch) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"affine"}:
            constant, per_sample = value["affine"]
            return constant + per_sample * micro_batch
        return {key: _filled(item, micro_batch) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineBytes:
    """A size that grows with the micro-batch. [B]"""

    constant_bytes: Bytes
    per_sample_bytes: Bytes

    def at(self, micro_batch: int) -> Bytes:
        """The size at one micro-batch. [B]"""
        return self.constant_bytes + self.per_sample_bytes * micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMethod:
    """How a step is carried out; each changes which operators run."""

    optimizer: str
    """Either "sgd" (with momentum) or "adamw"."""
    optimizer_implementation: str
    """One of "loop", "foreach" and "fused"; a trace may be asked for "default"."""
    precision: str
    """Either "fp32", or "bf16" or "fp16" for autocast."""
    checkpointing: str
    """One of "none", "full" (the whole model) and "per-block"."""
    device_kind: str
    """Whose kernels were dispatched to: "cpu" or "cuda"."""

    @property
    def words(self) -> str:
        """Precision and optimizer, for a table."""
        precision = self.precision if self.precision == "fp32" else f"{self.precision} autocast"
        return f"{precision}, {self.optimizer} ({self.optimizer_implementation})"


#: What may be asked of a trace.
PRECISIONS: Final = ("fp32", "bf16", "fp16")
CHECKPOINTING: Final = ("none", "full", "per-block")
DEVICE_KINDS: Final = ("cpu", "cuda", "as-cuda")
#: Of a user who chooses nothing.
USUAL_METHOD: Final = StepMethod(
    optimizer="sgd",
    optimizer_implementation=DEFAULT,
    precision="fp32",
    checkpointing="none",
    device_kind="cpu",
)


#: Operators of one step; 126 layers of 405 G parameters call some 20,000. Five bidirectional layers of GRU, which run
#: place by place on a processor, call some 480,000 over 1,024 places.
MOST_CALLS: Final = 500_000
_WHAT: Final = attrgetter("operator", "phase")


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
        for repetition in range(self.count):
            by = repetition * self.step
            if by == 0:
                yield from self.calls
                continue
            paths = {
                path: shifted(path, prefix=self.prefix, by=by)
                for path in dict.fromkeys(call.module for call in self.calls)
            }
            for call in self.calls:
                yield Call(operator=call.operator, phase=call.phase, module=paths[call.module])


def shifted(module: str, *, prefix: str, by: int) -> str:
    """A module path with the index that follows a prefix moved; other paths stay."""
    if by == 0 or not module.startswith(prefix):
        return module
    index, dot, rest = module[len(prefix) :].partition(".")
    return f"{prefix}{int(index) + by}{dot}{rest}" if index.isdecimal() else module


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
class _Step:
    sample: str
    """What one sample is, such as "3x224x224 image"."""
    method: StepMethod
    segments: tuple[Segment, ...]
    parameters: tuple[TracedParameter, ...]
    """In the order in which backward produces their gradients; those without one at the end."""
    buffer_bytes: Bytes
    frozen_bytes: Bytes
    """Parameters that are not trained. [B]"""
    caveats: tuple[str, ...] = ()
    """What was assumed in tracing."""

    def calls(self) -> Iterator[Call]:
        """Every call in the order of execution."""
        for segment in self.segments:
            yield from segment.expanded()

    def num_calls(self, phase: Phase) -> int:
        """Operators dispatched in one phase."""
        return sum(count for (_, at), count in self.call_counts().items() if at is phase)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of parameters that get no gradient."""
        return tuple(p.name for p in self.parameters if p.ready_after is None)

    def call_counts(self) -> dict[tuple[int, Phase], int]:
        """How often each operator runs in each phase."""
        counts: Counter[tuple[int, Phase]] = Counter()
        for segment in self.segments:
            for key, times in Counter(map(_WHAT, segment.calls)).items():
                counts[key] += times * segment.count
        return counts

    def modules_entered(self) -> list[int]:
        """Modules that Python calls before each operator of the forward pass, since the operator before it."""
        forward = [call.module for call in self.calls() if call.phase is Phase.FORWARD]
        paths = [module.split(".") if module else [] for module in forward]
        entered = []
        for before, path in pairwise([[], *paths]):
            both = takewhile(lambda pair: pair[0] == pair[1], zip(before, path, strict=False))
            entered.append(len(path) - sum(1 for _ in both))
        return entered


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep(_Step):
    """One optimizer step of one micro-step at a micro-batch."""

    micro_batch: int
    operators: tuple[Operator, ...]
    saved_bytes: Bytes
    """What the forward pass keeps for the backward pass, apart from parameters and buffers. [B]"""

    def flop(self, phase: Phase) -> Flop:
        """Floating point operations of one phase. [FLOP]"""
        return sum(
            count * self.operators[operator].flop
            for (operator, at), count in self.call_counts().items()
            if at is phase
        )


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
        return Operator.of(
            self.name, inputs, outputs, arguments, mutated=self.mutated, view=self.view
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicStep(_Step):
    """A traced step with the micro-batch left open."""

    traced_micro_batches: tuple[int, int]
    """Where it was traced; between and near them shapes are exact."""
    tensors: tuple[SymbolicTensor, ...]
    operators: tuple[SymbolicOperator, ...]
    saved: AffineBytes
    own_micro_batch: int | None = None
    """Samples of the batch that came with the model, if one did."""

    def __post_init__(self) -> None:
        """Refuse a position of a tensor or of an operator that the step does not have, and steps too long to divide."""
        num_calls = 0
        for segment in self.segments:
            check_at_least("count", segment.count, 1)
            # An empty one counts, too: it would repeat nothing for ever.
            num_calls += segment.count * max(1, len(segment.calls))
        if num_calls > MOST_CALLS:
            raise WrongArgument(
                "calls",
                f"must be <= {MOST_CALLS:,}, got {num_calls}; trace a shorter sequence, or fewer layers or experts",
            )
        for operator in self.operators:
            for tensor in operator.inputs + operator.outputs:
                check_within("tensor", tensor, 0, len(self.tensors) - 1)
            for position in operator.mutated:
                check_within("mutated", position, 0, len(operator.inputs) - 1)
        for segment in self.segments:
            for call in segment.calls:
                check_within("operator", call.operator, 0, len(self.operators) - 1)

    def at(self, *, micro_batch: int) -> TracedStep:
        """The step at a micro-batch of at least 1."""
        check_at_least("micro_batch", micro_batch, 1)
        tensors = [tensor.at(micro_batch) for tensor in self.tensors]
        common = {field.name: getattr(self, field.name) for field in fields(_Step)}
        return TracedStep(
            micro_batch=micro_batch,
            operators=tuple(operator.at(micro_batch, tensors) for operator in self.operators),
            saved_bytes=self.saved.at(micro_batch),
            **common,
        )


_LONGEST_PERIOD = 4096


def compressed(calls: Sequence[Call]) -> tuple[Segment, ...]:
    """The same calls as segments; ``expanded`` of all segments gives them back in order.

    Stretches that repeat are chosen by the calls that they save, the largest first.
    """
    taken = np.zeros(len(calls), dtype=bool)
    repeated: dict[int, Segment] = {}
    for _, period, first, count, spare in sorted(_stretches(calls)):
        if taken[first + spare : first + count * period].any():
            continue
        # Where a run begins decides whether its module paths fit.
        for start in range(first, first + spare + 1):
            stop = start + count * period
            if taken[start:stop].any():
                continue
            segment = _repeated(calls[start:stop], period)
            if segment is not None:
                taken[start:stop] = True
                repeated[start] = segment
                break
    segments, at = [], 0
    for start, segment in sorted(repeated.items()):
        if at < start:
            segments.append(Segment(count=1, calls=tuple(calls[at:start])))
        segments.append(segment)
        at = start + segment.count * len(segment.calls)
    if at < len(calls):
        segments.append(Segment(count=1, calls=tuple(calls[at:])))
    return tuple(segments)


def _stretches(calls: Sequence[Call]) -> Iterator[tuple[int, int, int, int, int]]:
    """Of calls that repeat: minus the calls saved, period, first start, repetitions, later starts."""
    # A number per call that is equal for calls that differ in an index of their path only.
    known: dict[tuple[object, ...], int] = {}
    numbers = []
    for call in calls:
        path = ["#" if part.isdigit() else part for part in call.module.split(".")]
        numbers.append(known.setdefault((call.operator, call.phase, *path), len(known)))
    tokens = np.array(numbers, dtype=np.int64)
    for period in range(1, min(_LONGEST_PERIOD, len(calls) // 2) + 1):
        same = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            saved, spare = divmod(stop - start, period)
            if saved:
                yield -saved * period, period, start, saved + 1, spare


def _repeated(calls: Sequence[Call], period: int) -> Segment | None:
    """Calls as repetitions of the first ``period``, or ``None`` if no single index tells them apart."""
    block = tuple(calls[:period])
    prefix, step = "", 0
    for one, other in zip(block, calls[period : 2 * period], strict=True):
        if one.module != other.module:
            parts, others = one.module.split("."), other.module.split(".")
            at = next(i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b)
            prefix = "".join(f"{part}." for part in parts[:at])
            step = int(others[at]) - int(parts[at])
            break
    for at, call in enumerate(calls):
        repetition, offset = divmod(at, period)
        if call.module != shifted(block[offset].module, prefix=prefix, by=repetition * step):
            return None
    return Segment(count=len(calls) // period, calls=block, prefix=prefix, step=step)


@functools.lru_cache(maxsize=8192)
def signature(operator: Operator) -> str:
    """Equal for operators with the same name, tensors and arguments; 16 hexadecimal digits."""
    tensors = [[spec.shape, spec.dtype, spec.stride] for spec in operator.inputs]
    text = json.dumps([operator.name, tensors, operator.arguments])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters_signature(step: TracedStep | SymbolicStep) -> str:
    """Equal for steps whose optimizers have the same to do; 16 hexadecimal digits."""
    shapes = [[parameter.shape, parameter.dtype] for parameter in step.parameters]
    method = step.method
    text = json.dumps([method.optimizer, method.optimizer_implementation, shapes])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def calls_signature(step: TracedStep) -> str:
    """Equal for steps that call the same operators as often in each phase; 16 hexadecimal digits."""
    counts: Counter[tuple[str, str]] = Counter()
    for (position, phase), count in step.call_counts().items():
        counts[signature(step.operators[position]), phase.value] += count
    return hashlib.sha256(json.dumps(sorted(counts.items())).encode()).hexdigest()[:16]
