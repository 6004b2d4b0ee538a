"""Records of memory that can be added up by hand."""

from perfmodel.workload import Phase
from perfmodel.workload.memory import Block, Moment, Part, PartBytes, StepMemory
from perfmodel.workload.step import AffineBytes


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
    return StepMemory(
        traced_micro_batches=(4, 8),
        moments=(
            moment(
                "optimizer",
                Phase.OPTIMIZER,
                parameters=(20 * unit, 0),
                gradients=(20 * unit, 0),
                optimizer=(20 * unit, 0),
                temporaries=(40 * unit, 0),
            ),
            moment(
                "backward",
                parameters=(20 * unit, 0),
                optimizer=(20 * unit, 0),
                activations=(0, 20 * unit),
            ),
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
