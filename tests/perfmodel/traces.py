"""A traced step small enough to price by hand."""

from perfmodel.workload import Call, Parameter, Phase, Workload
from perfmodel.workload.step import (
    Affine,
    AffineBytes,
    Segment,
    SymbolicOperator,
    SymbolicStep,
    SymbolicTensor,
    TracedParameter,
)
from tests.perfmodel.tracing.method import SGD_LOOP

WIDTH = 256


def _product(name: str, inputs: tuple[int, int], output: int) -> SymbolicOperator:
    arguments = '[[{"tensor": 0}, {"tensor": 1}], {}]'
    return SymbolicOperator(name=name, inputs=inputs, outputs=(output,), arguments=arguments)


def traced(*, mystery: bool = False) -> SymbolicStep:
    """One linear layer: its product forward, that of its gradient backward."""
    name = "aten.mystery.default" if mystery else "aten.mm.default"
    return SymbolicStep(
        traced_micro_batches=(2, 4),
        sample=f"{WIDTH} numbers",
        method=SGD_LOOP,
        tensors=(
            SymbolicTensor(shape=(Affine(constant=0, per_sample=64), WIDTH), dtype="float32"),
            SymbolicTensor(shape=(WIDTH, WIDTH), dtype="float32"),
            SymbolicTensor(shape=(WIDTH, Affine(constant=0, per_sample=64)), dtype="float32"),
        ),
        operators=(_product(name, (0, 1), 0), _product("aten.mm.default", (2, 0), 1)),
        segments=(
            Segment(
                count=1,
                calls=tuple(
                    Call(operator=operator, phase=phase, module="")
                    for operator, phase in (
                        *((0, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD)),
                    )
                ),
            ),
        ),
        parameters=(
            TracedParameter(name="w", shape=(WIDTH, WIDTH), dtype="float32", ready_after=1),
        ),
        saved=AffineBytes(constant_bytes=0, per_sample_bytes=0),
        buffer_bytes=0,
        frozen_bytes=0,
    )


WORKLOAD = Workload(
    name="linear",
    sample=f"{WIDTH} numbers",
    parameters=(Parameter(name="w", num_elements=WIDTH**2),),
    forward_flop=1.0,
    backward_flop=2.0,
    num_operators=3,
)
