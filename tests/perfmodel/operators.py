"""Operators and prices of a machine whose truth is known."""

import json
import math
from collections.abc import Iterable

import numpy as np

from calibrate.fit.operators import fit_operators
from perfmodel.documents.observation import IsolatedOperator, OperatorsObservation
from perfmodel.machine.measured import MeasuredOperator, MeasuredStep, OperatorCosts
from perfmodel.workload import Operator, Phase, TensorSpec
from tests.existing import existing

#: What the made-up machine can do.
FLOP_PER_S = 1e11
BYTES_PER_S = 1e10
START_S = 5e-6


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, dtype="float32")


def operator(
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *others: object,
    mutated: tuple[int, ...] = (),
    view: bool = False,
) -> Operator:
    positional = [*({"tensor": index} for index in range(len(inputs))), *others]
    arguments = json.dumps([positional, {}])
    return Operator.of(name, inputs, outputs, arguments, mutated=mutated, view=view)


def matmul(rows: int, inner: int, columns: int) -> Operator:
    return operator(
        "aten.mm.default", (spec(rows, inner), spec(inner, columns)), (spec(rows, columns),)
    )


def addition(size: int) -> Operator:
    return operator("aten.add.Tensor", (spec(size), spec(size)), (spec(size),))


def measured_step(
    names: Iterable[tuple[str, str]],
    time_s: float,
    *,
    micro_batch: int = 1,
    parameters: str = "",
    optimizer_s: float = 1.0,
) -> MeasuredStep:
    """A step of operators, by signature and phase, that took so long each. [s]"""
    return MeasuredStep(
        workload="any",
        micro_batch=micro_batch,
        parameters=parameters,
        operators=tuple(
            MeasuredOperator(signature=name, phase=phase, time_s=time_s) for name, phase in names
        ),
        optimizer_s=optimizer_s,
        relative_error=0.01,
    )


def true_time_s(called: Operator) -> float:
    """Time on the made-up machine: a start, and the slower of arithmetic and memory."""
    moved = called.read_bytes + called.written_bytes
    return START_S + max(called.flop / FLOP_PER_S, moved / BYTES_PER_S)


def observation(seed: int = 0, noise: float = 0.02) -> OperatorsObservation:
    """Noisy timings of products and additions on the made-up machine."""
    rng = np.random.default_rng(seed)
    members = [matmul(*(int(math.exp(rng.uniform(2, 7))) for _ in range(3))) for _ in range(60)] + [
        addition(int(math.exp(rng.uniform(5, 16)))) for _ in range(40)
    ]
    timed = tuple(
        IsolatedOperator(
            operator=member,
            phase=Phase.FORWARD,
            times_s=tuple(true_time_s(member) * math.exp(rng.normal(0, noise)) for _ in range(2)),
        )
        for member in members
    )
    return OperatorsObservation(task="layers", round=0, operators=timed, optimizers=())


def recurring(entry: OperatorsObservation, num_calls: int, part: float) -> OperatorsObservation:
    """The same operators where a pass calls each several times, in a part of the time."""
    often = tuple(
        each.model_copy(
            update={"num_calls": num_calls, "times_s": tuple(part * s for s in each.times_s)}
        )
        for each in entry.operators
    )
    return entry.model_copy(update={"operators": often})


def costs_of_the_made_up_machine(seed: int = 0) -> OperatorCosts:
    return existing(fit_operators([observation(seed)], workloads=(), rates=()))
