"""A step under any layout on a calibrated machine: its program, and the ranks of its exchanges."""

from typing import Final

import numpy as np

from perfmodel.cost.network import Group
from perfmodel.layout import Layout, Order
from perfmodel.machine.measured import LayoutCost, MeasuredMachine, MeasuredWorkload
from perfmodel.step import Cause, StepProgram
from perfmodel.step.compile import compile_step

#: Kinds of collectives by what they are for.
KINDS: Final = {
    Cause.ALL_REDUCE: "all_reduce",
    Cause.BROADCAST: "broadcast",
    Cause.ALL_GATHER: "all_gather",
    Cause.REDUCE_SCATTER: "reduce_scatter",
    Cause.TENSOR: "all_reduce",
    Cause.P2P: "send_recv",
}


def is_ddp(layout: Layout) -> bool:
    """Whether a layout is data parallelism alone, as DistributedDataParallel does it."""
    return layout == Layout(
        dp=layout.dp,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        bucket_cap_mb=layout.bucket_cap_mb,
        wrapper=layout.wrapper,
    )


def beside(layout: Layout) -> Layout:
    """As many ranks that exchange gradients alone as compute together: those of a pipeline stage."""
    if is_ddp(layout):
        return layout
    ranks = layout.world_size // layout.pp
    return Layout(dp=ranks, micro_batch=layout.micro_batch, accumulation=layout.accumulation)


PIPELINE: Final = "pipeline"
#: Families by what they exchange, and the operation that carries what they add to it.
CARRIERS: Final = {
    "fsdp": Cause.BUCKET,
    "zero": Cause.BROADCAST,
    "tensor": Cause.TENSOR,
    PIPELINE: Cause.P2P,
}


def families(layout: Layout) -> tuple[str, ...]:
    """What a layout is beyond DistributedDataParallel."""
    uses = (layout.zero > 1, layout.zero == 1, layout.tp > 1, layout.pp > 1)
    return tuple(name for name, used in zip(CARRIERS, uses, strict=True) if used)


def ranks_beside(family: str, layout: Layout) -> int:
    """Ranks that do a family's exchanges at the same time: of one pipeline stage, or the stages."""
    return layout.pp if family == PIPELINE else layout.world_size // layout.pp


def layout_cost(machine: MeasuredMachine, family: str, layout: Layout) -> LayoutCost | None:
    """What a family adds to an exchange, between the measured numbers of ranks; None if never run."""
    found = [cost for cost in machine.layouts if cost.family == family]
    if not found:
        return None
    world_size = ranks_beside(family, layout)
    ranks = [cost.world_size for cost in found]
    between = {
        name: float(np.interp(world_size, ranks, [getattr(cost, name) for cost in found]))
        for name in ("call_s", "byte_s", "log_error")
    }
    return LayoutCost(family=family, world_size=world_size, **between)


def step_program(
    machine: MeasuredMachine, workload: MeasuredWorkload, layout: Layout
) -> StepProgram:
    """The step of a layout."""
    if is_ddp(layout):
        return compile_step(workload.workload, layout, asynchronous=machine.asynchronous)
    # Operators and their division double the start of a prediction that needs neither.
    from perfmodel.cost.shares import divided_program  # noqa: PLC0415

    return divided_program(machine, workload, layout)


def groups(layout: Layout) -> dict[Cause, Group]:
    """Ranks of every exchange: how many, and how far apart in the numbering of all."""
    inner = layout.tp * layout.cp
    is_data_inside = layout.order is Order.DATA_INSIDE
    data = Group(layout.replicas, inner * (1 if is_data_inside else layout.pp))
    return {
        **dict.fromkeys(KINDS, data),
        Cause.TENSOR: Group(layout.tp),
        Cause.P2P: Group(min(layout.pp, 2), inner * (layout.dp if is_data_inside else 1)),
    }
