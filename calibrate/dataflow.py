"""Which tensor flows where in a traced step, guessed from shapes; pure.

A trace names operators and their order, not which result feeds which call. A step reads what was
made last: forward takes the latest tensor of the shape that it needs, backward takes them back in
the opposite order and is done with them. A replay that follows this guess allocates, keeps and
frees about what the step does, so that operators find the caches in about the state of the step.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfmodel.workload.operator import Operator, Phase, TensorSpec
from perfmodel.workload.step import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedCall:
    """One call with tensors by number."""

    operator: int
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that no call makes: an input, a state, or one whose origin was not found."""

    spec: TensorSpec
    operator: int
    """The first operator that reads it, and
    ..."""
    position: int
    """... as which of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """Forward and backward pass of a step with their tensors."""

    calls: tuple[LinkedCall, ...]
    released: tuple[tuple[int, ...], ...]
    """By call, the tensors that nobody needs after it."""
    parameters: tuple[int, ...]
    """In the order of the step's parameters."""
    sources: dict[int, Source]
    gradients: tuple[int, ...]
    """What the backward pass makes or sums up, and nobody reads after: it stays until the step's end."""


@dataclass(slots=True, kw_only=True)
class _Linker:
    step: TracedStep
    num_tensors: int = 0
    made: defaultdict[TensorSpec, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Tensors that calls have made and that may be read, the latest last."""
    parameters: defaultdict[TensorSpec, deque[int]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sources: dict[int, Source] = field(default_factory=dict)

    def new(self) -> int:
        self.num_tensors += 1
        return self.num_tensors - 1

    def link(self, operator: int, phase: Phase) -> LinkedCall:
        called = self.step.operators[operator]
        inputs: list[int] = []
        for position in range(len(called.inputs)):
            inputs.append(self._found(called, operator, position, phase, inputs))
        # Who asks for a shape alone is not done with a tensor.
        asks_only = called.read_bytes == 0 and not called.view
        if phase is Phase.BACKWARD and not asks_only:
            for position, (tensor, spec) in enumerate(zip(inputs, called.inputs, strict=True)):
                if tensor in self.made[spec]:
                    self.made[spec].remove(tensor)
                if position in called.mutated:
                    self.made[spec].append(tensor)
        outputs = []
        for spec in called.outputs:
            outputs.append(self.new())
            self.made[spec].append(outputs[-1])
        return LinkedCall(
            operator=operator, phase=phase, inputs=tuple(inputs), outputs=tuple(outputs)
        )

    def _found(
        self, called: Operator, operator: int, position: int, phase: Phase, taken: Sequence[int]
    ) -> int:
        spec = called.inputs[position]
        for tensor in reversed(self.made[spec]):
            if tensor not in taken:
                return tensor
        waiting = self.parameters[spec]
        if waiting:
            # Forward meets the parameters in order, backward in the opposite one.
            at = 0 if phase is Phase.FORWARD else -1
            tensor = waiting[at]
            waiting.rotate(-1 if phase is Phase.FORWARD else 1)
            if tensor not in taken:
                return tensor
        tensor = self.new()
        self.sources[tensor] = Source(spec=spec, operator=operator, position=position)
        return tensor


def linked(step: TracedStep) -> Dataflow:
    """Guess the data flow of the forward and backward pass of a step."""
    linker = _Linker(step=step)
    parameters = [linker.new() for _ in step.parameters]
    for tensor, parameter in reversed(list(zip(parameters, step.parameters, strict=True))):
        # Gradients become ready in the opposite order of use.
        linker.parameters[TensorSpec(shape=parameter.shape, dtype=parameter.dtype)].append(tensor)
    calls = tuple(
        linker.link(call.operator, call.phase)
        for call in step.calls()
        if call.phase is not Phase.OPTIMIZER
    )
    last_read = {tensor: at for at, call in enumerate(calls) for tensor in call.inputs}
    released: list[list[int]] = [[] for _ in calls]
    gradients = []
    for at, call in enumerate(calls):
        for tensor in call.outputs:
            end = last_read.get(tensor, at)
            if calls[end].phase is Phase.BACKWARD and _is_left(tensor, calls[end], step):
                gradients.append(tensor)
            else:
                released[end].append(tensor)
    return Dataflow(
        calls=calls,
        released=tuple(tuple(group) for group in released),
        parameters=tuple(parameters),
        sources=linker.sources,
        gradients=tuple(gradients),
    )


def _is_left(tensor: int, last: LinkedCall, step: TracedStep) -> bool:
    """Whether a tensor's last call makes it, or adds to it in place."""
    written = {last.inputs[position] for position in step.operators[last.operator].mutated}
    return tensor in last.outputs or tensor in written
