"""A traced step under any layout: its program, and the work of its units by the curves of its operators."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from perfmodel.cost.accumulation import additions
from perfmodel.cost.collectives import library_of
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.step_curves import LawDurations
from perfmodel.cost.step_work import mode_of
from perfmodel.errors import CalibrationUnavailable, NotFeasible
from perfmodel.layout import Layout, Recompute
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, TracedWorkload
from perfmodel.step import StepProgram
from perfmodel.step.compile import compile_divided
from perfmodel.step.division import (
    Unit,
    UnitShares,
    constant_dimensions,
    divide,
    divided,
    num_elements,
    units,
)
from perfmodel.units import Bytes, Seconds
from perfmodel.workload import ELEMENT_BYTES, Operator, Phase
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import SymbolicStep


def divided_program(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout, *, backward_s: Seconds
) -> StepProgram:
    """The step of a layout that is more than data parallelism, by ``cost.machine.step_program``.

    ``backward_s``: What a backward pass of one rank was measured to take.
    """
    if machine.operators is None and machine.device_costs is None:
        raise CalibrationUnavailable(
            f"--layout: {str(layout)!r} needs operators, but the profile holds none; calibrate again"
        )
    if not isinstance(workload, TracedWorkload):
        raise NotFeasible(
            f"--layout: --workload must be a file of perfmodel trace for anything but dp=N, got "
            f"{workload.workload.name} with {str(layout)!r}"
        )
    # ZeroRedundancyOptimizer stands behind DistributedDataParallel, with its buckets.
    passes = replace(layout, zero=0) if layout.zero == 1 else layout
    # These tell how work is divided; what is known of the whole is multiplied by the shares.
    durations = _durations(machine, workload.trace, layout.micro_batch)

    def accumulated(sizes_bytes: Sequence[Bytes]) -> float:
        return additions(machine, passes, sizes_bytes) / (backward_s or 1.0)

    divisions = divide(
        workload.trace,
        workload.memory,
        workload.workload.parameters,
        passes,
        unit_shares(workload.trace, workload.memory, passes, durations, accumulated),
    )
    return compile_divided(
        passes,
        divisions,
        num_shards=layout.dp if layout.zero == 1 else 0,
        asynchronous=machine.asynchronous,
        blocking=library_of(machine.backend).by_processors,
        buffer_bytes=workload.workload.buffer_bytes,
    )


def _durations(
    machine: MeasuredMachine, trace: SymbolicStep, micro_batch: int
) -> OperatorDurations | LawDurations:
    """Durations of parts of a step: by curves of operators, or by the law where whole steps are all that is known."""
    if machine.law is None:
        assert machine.operators is not None
        return OperatorDurations(machine.operators, use_measured=False)
    _, memory_format = mode_of(trace)
    return LawDurations(
        costs=machine.law,
        step=trace.at(micro_batch=micro_batch),
        memory_format=memory_format,
    )


def unit_shares(
    trace: SymbolicStep,
    memory: StepMemory | None,
    layout: Layout,
    durations: OperatorDurations | LawDurations,
    accumulated: Callable[[Sequence[Bytes]], float],
) -> UnitShares:
    """Time of every unit on one rank over that of the whole step on a rank that shares nothing.

    What was measured of a whole pass is multiplied by a share, so that curves only tell how work is
    divided:

        share(unit) = time(unit / tp) / sum of time(unit) over all units

    ``accumulated``: Part of a whole backward pass, in each micro-batch, that adds up gradients of such sizes.
    """
    step = trace.at(micro_batch=layout.micro_batch)
    every = units(trace, memory)
    counts = step.call_counts()
    shards = layout.shards if layout.zero else 1

    def pass_s(unit: Unit, phase: Phase, tp: int) -> Seconds:
        calls: list[tuple[Operator, int]] = []
        in_pass: list[int] = []
        for call in unit.calls:
            if call.phase is phase:
                operator = step.operators[call.operator]
                if call.divisible or layout.sequence_parallel:
                    operator = divided(operator, constant_dimensions(trace, call.operator), tp)
                calls.append((operator, call.times))
                in_pass.append(counts[call.operator, phase])
        return durations.phase(calls, phase, in_pass=in_pass).time_s if calls else 0.0

    def update_s(unit: Unit, tp: int, shards: int) -> Seconds:
        # Shards are flat parts of every parameter, as FSDP2 cuts them.
        held = tuple(
            replace(p, shape=(max(1, -(-num_elements(p, tp) // shards)),))
            for p in (step.parameters[i] for i in unit.parameters)
        )
        return durations.optimizer_work_s(replace(step, parameters=held))

    def gradients_bytes(unit: Unit) -> list[Bytes]:
        return [
            max(1, -(-num_elements(p, layout.tp) // shards)) * ELEMENT_BYTES[p.dtype]
            for p in (step.parameters[i] for i in unit.parameters)
        ]

    forward_s, backward_s = (
        sum(pass_s(unit, phase, 1) for unit in every) or 1.0
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    forward = [pass_s(unit, Phase.FORWARD, layout.tp) for unit in every]
    backward = [pass_s(unit, Phase.BACKWARD, layout.tp) for unit in every]
    if layout.recompute is Recompute.FULL:
        backward = [
            own_s + (again_s if unit.block is not None else 0.0)
            for own_s, again_s, unit in zip(backward, forward, every, strict=True)
        ]
    whole_s = sum(update_s(unit, 1, 1) for unit in every) or 1.0
    return UnitShares(
        forward=tuple(own_s / forward_s for own_s in forward),
        backward=tuple(
            own_s / backward_s + accumulated(gradients_bytes(unit))
            for own_s, unit in zip(backward, every, strict=True)
        ),
        optimizer=tuple(update_s(unit, layout.tp, shards) / whole_s for unit in every),
    )
