"""Records of memory that can be added up by hand."""

from dataclasses import replace

from perfmodel.cost.memory import TracedMemory
from perfmodel.machine import Overhead
from perfmodel.workload import Call, Phase
from perfmodel.workload.memory import Block, Moment, Part, PartBytes, StepMemory
from perfmodel.workload.step import (
    AffineBytes,
    Segment,
    SymbolicOperator,
    SymbolicStep,
    SymbolicTensor,
    TracedParameter,
)
from tests.perfmodel.traces import traced


def moment(operator: str, phase: Phase = Phase.BACKWARD, **parts: tuple[int, int]) -> Moment:
    """A moment from ``part=(constant, per sample)``."""
    return Moment(
        phase=phase,
        module="",
        operator=operator,
        parts=tuple(
            PartBytes(
                part=Part[name.upper()],
                size=AffineBytes(constant_bytes=constant, per_sample_bytes=per_sample),
            )
            for name, (constant, per_sample) in parts.items()
        ),
    )


def step_memory(unit: int = 1) -> StepMemory:
    """Optimizer moment: 100 units; backward: 40 + 20 per sample; two blocks of 10 units."""
    held = (20 * unit, 0)
    states = {"parameters": held, "optimizer": held}
    return StepMemory(
        traced_micro_batches=(4, 8),
        moments=(
            moment(
                "optimizer", Phase.OPTIMIZER, **states, gradients=held, temporaries=(40 * unit, 0)
            ),
            moment("backward", Phase.BACKWARD, **states, activations=(0, 20 * unit)),
        ),
        blocks=tuple(
            Block(
                path=f"layers.{index}",
                parameter_bytes=10 * unit,
                input=AffineBytes(constant_bytes=0, per_sample_bytes=unit),
                saved=AffineBytes(constant_bytes=0, per_sample_bytes=8 * unit),
            )
            for index in range(2)
        ),
    )


def step_trace(unit: int = 1) -> SymbolicStep:
    """The step of that memory: a parameter of 10 units in each of two blocks."""
    blocks = ("layers.0", "layers.1")
    return replace(
        traced(),
        traced_micro_batches=(4, 8),
        tensors=(SymbolicTensor(shape=(1,), dtype="float32"),),
        operators=(
            SymbolicOperator(
                name="aten.relu.default", inputs=(0,), outputs=(0,), arguments="[[],{}]"
            ),
        ),
        segments=(
            Segment(
                count=1,
                calls=tuple(Call(operator=0, phase=Phase.FORWARD, module=path) for path in blocks),
            ),
        ),
        parameters=tuple(
            TracedParameter(name=f"{path}.weight", shape=(10 * unit,), dtype="int8", ready_after=0)
            for path in reversed(blocks)
        ),
    )


def traced_memory(
    overhead: Overhead,
    unit: int = 1,
    *,
    bucket_view: bool = False,
) -> TracedMemory:
    """Both on a device."""
    return TracedMemory(
        trace=step_trace(unit),
        memory=step_memory(unit),
        overhead=overhead,
        bucket_view=bucket_view,
    )
