"""A traced step under any layout on a calibrated machine: its program, and what its operations cost."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from perfmodel.cost import Samples, Terms
from perfmodel.cost.collectives import library_of
from perfmodel.cost.machine import CostModel, contention
from perfmodel.cost.network import Group
from perfmodel.layout import Layout, Order
from perfmodel.machine import Evidence
from perfmodel.machine.measured import LayoutCost, MeasuredMachine, MeasuredWorkload
from perfmodel.step import Cause, StepProgram
from perfmodel.step.compile import compile_step
from perfmodel.units import Bytes

#: Uncertainty, in log, per doubling of the ranks that share matrices: shares are read from curves. A prior.
_UNCERTAINTY_PER_HALVING: Final = 0.05
#: The same of each family of parallelism that was never run on this machine: a prior.
_UNJUDGED: Final = 0.05
#: Kinds of collectives by what they are for.
_KINDS: Final = {
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
_FAMILIES: Final = {
    "fsdp": Cause.BUCKET,
    "zero": Cause.BROADCAST,
    "tensor": Cause.TENSOR,
    PIPELINE: Cause.P2P,
}


def families(layout: Layout) -> tuple[str, ...]:
    """What a layout is beyond DistributedDataParallel."""
    uses = (layout.zero > 1, layout.zero == 1, layout.tp > 1, layout.pp > 1)
    return tuple(name for name, used in zip(_FAMILIES, uses, strict=True) if used)


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
    call_s, byte_s, log_error = (
        float(np.interp(world_size, ranks, [getattr(cost, name) for cost in found]))
        for name in ("call_s", "byte_s", "log_error")
    )
    return LayoutCost(
        family=family, world_size=world_size, call_s=call_s, byte_s=byte_s, log_error=log_error
    )


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
    between_stages = inner
    replicas = inner
    if layout.order is Order.DATA_INSIDE:
        between_stages *= layout.dp
    else:
        replicas *= layout.pp
    data = Group(layout.replicas, replicas)
    return {
        **dict.fromkeys(
            (Cause.ALL_REDUCE, Cause.BROADCAST, Cause.ALL_GATHER, Cause.REDUCE_SCATTER), data
        ),
        Cause.TENSOR: Group(layout.tp),
        Cause.P2P: Group(min(layout.pp, 2), between_stages),
    }


def step_terms(
    costs: CostModel,
    workload: MeasuredWorkload,
    layout: Layout,
    program: StepProgram,
    *,
    loader_samples_per_s: float | None = None,
) -> Terms:
    """What the operations of a step cost: as many ranks beside each other, every exchange by its group."""
    terms = costs.terms(workload, beside(layout), loader_samples_per_s=loader_samples_per_s)
    if is_ddp(layout):
        return terms
    members = groups(layout)
    found = {
        _FAMILIES[family]: cost
        for family in families(layout)
        if (cost := layout_cost(costs.profile, family, layout))
    }
    blocking = library_of(costs.profile.backend).by_processors

    others = _groups_beside(workload, layout, members) if blocking else {}

    def exchange(cause: Cause) -> Callable[[Bytes | Samples], Samples]:
        # What DDP's all-reduces cost in a step over alone holds for all that runs beside compute.
        scale = cause is Cause.ALL_REDUCE or (
            not blocking and cause in (Cause.ALL_GATHER, Cause.REDUCE_SCATTER)
        )
        own = found.get(cause)
        slowed = others.get(cause, 1.0)

        def time_s(size_bytes: Bytes | Samples) -> Samples:
            kind, group = _KINDS[cause], members[cause]
            alone_s = slowed * costs.collective_s(kind, size_bytes, group, in_step=scale)
            return alone_s if own is None else alone_s + own.call_s + own.byte_s * size_bytes

        return time_s

    compute_s = dict(terms.compute_s)
    copied = found.get(Cause.BUCKET)
    if layout.tp > 1 and Cause.TENSOR not in found:
        error = _UNCERTAINTY_PER_HALVING * math.log2(layout.tp)
        factors = np.exp(error * costs.deviates("tensor shares"))
        compute_s |= {
            cause: compute_s[cause] * factors for cause in (Cause.FORWARD, Cause.BACKWARD)
        }
    return replace(
        terms,
        compute_s=compute_s,
        bucket_s=terms.bucket_s * 0 + copied.call_s if copied else terms.bucket_s,
        bucket_s_per_byte=terms.bucket_s_per_byte * 0 + copied.byte_s
        if copied
        else terms.bucket_s_per_byte,
        all_reduce_s=exchange(Cause.ALL_REDUCE),
        broadcast_s=exchange(Cause.BROADCAST),
        exchange_s={cause: exchange(cause) for cause in _KINDS},
        evidence=_evidence(costs, layout, program, terms.evidence["compute"])
        | {
            name: terms.evidence[name]
            for name in ("interference", "stragglers")
            if name in terms.evidence
        },
    )


def _groups_beside(
    workload: MeasuredWorkload, layout: Layout, members: Mapping[Cause, Group]
) -> dict[Cause, float]:
    """Factors on collectives by other groups of the stage that exchange at the same time.

    A library that works on the processors shares them as compute does: a collective of g of the n ranks
    of a stage was measured with g ranks at work, and runs with n.
    """
    ranks = beside(layout).world_size
    return {
        cause: contention(workload, layout.micro_batch, ranks, than=group.size)
        for cause, group in members.items()
        if cause is not Cause.P2P
    }


def _evidence(
    costs: CostModel, layout: Layout, program: StepProgram, compute: Evidence
) -> dict[str, Evidence]:
    """Of every term; what was never run in this form is extrapolated at best."""
    found = {"compute": compute}
    sizes: dict[Cause, list[Bytes]] = {}
    for operation in program.operations:
        if operation.cause in _KINDS and operation.size_bytes:
            sizes.setdefault(operation.cause, []).append(operation.size_bytes)
    members = groups(layout)
    used = {cause: of_cause for cause, of_cause in sizes.items() if members[cause].size > 1}
    for name, causes in (
        ("communication", (Cause.ALL_REDUCE, Cause.ALL_GATHER, Cause.REDUCE_SCATTER)),
        ("tensor collectives", (Cause.TENSOR,)),
        ("pipeline sends", (Cause.P2P,)),
    ):
        kinds = [
            costs.network.evidence(used[cause], members[cause], kind=_KINDS[cause])
            for cause in causes
            if cause in used
        ]
        if kinds:
            found[name] = Evidence.weakest(kinds)
    known = [layout_cost(costs.profile, name, layout) for name in families(layout)]
    found["work of the layout's library"] = (
        Evidence.INTERPOLATED if all(known) else Evidence.ASSUMED
    )
    if layout.tp > 1:
        found["compute"] = Evidence.weakest((compute, Evidence.EXTRAPOLATED))
    return found


def form_factors(costs: CostModel, layout: Layout) -> Samples:
    """Factors by which steps of such layouts missed their prediction, or may. Draw 0 is 1."""
    known = [layout_cost(costs.profile, name, layout) for name in families(layout)]
    errors = [_UNJUDGED if cost is None else cost.log_error for cost in known]
    factors: Samples = np.exp(math.hypot(*errors) * costs.deviates(f"form {layout}"))
    return factors
