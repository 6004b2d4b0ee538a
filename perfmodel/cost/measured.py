"""A traced step under any layout on a calibrated machine: its program, and what its operations cost."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from perfmodel.cost.machine import CostModel
from perfmodel.cost.network import Group
from perfmodel.cost.terms import Samples, Terms
from perfmodel.layout.layout import Layout, Order
from perfmodel.machine.machine import Evidence
from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload
from perfmodel.step.compile import compile_step
from perfmodel.step.program import Cause, StepProgram
from perfmodel.units import Bytes

#: Uncertainty, in log, per doubling of the ranks that share matrices: shares are read from curves. A prior.
_UNCERTAINTY_PER_HALVING: Final = 0.05
#: The same of each family of parallelism that no run on this machine has judged: a prior.
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
    """As many ranks that exchange gradients alone: ranks slow each other down whatever they exchange."""
    if is_ddp(layout):
        return layout
    return Layout(
        dp=layout.world_size, micro_batch=layout.micro_batch, accumulation=layout.accumulation
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

    def exchange(cause: Cause) -> Callable[[Bytes | Samples], Samples]:
        # What DDP's all-reduces cost in a step over alone holds for all that runs beside compute.
        scale = cause not in (Cause.TENSOR, Cause.P2P, Cause.BROADCAST)
        return lambda size_bytes: costs.collective_s(
            _KINDS[cause], size_bytes, members[cause], in_step=scale
        )

    compute_s = dict(terms.compute_s)
    if layout.tp > 1:
        error = _UNCERTAINTY_PER_HALVING * math.log2(layout.tp)
        factors = np.exp(error * costs.deviates("tensor shares"))
        compute_s |= {
            cause: compute_s[cause] * factors for cause in (Cause.FORWARD, Cause.BACKWARD)
        }
    return replace(
        terms,
        compute_s=compute_s,
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
    if layout.zero:
        found["sharding work of the host"] = Evidence.ASSUMED
    if layout.tp > 1:
        found["compute"] = Evidence.weakest((compute, Evidence.EXTRAPOLATED))
    return found


def form_factors(costs: CostModel, layout: Layout) -> Samples:
    """Factors of what no run on this machine has judged: sharding, shared matrices, stages. Draw 0 is 1."""
    families = (layout.zero > 0) + (layout.tp > 1) + (layout.pp > 1)
    factors: Samples = np.exp(_UNJUDGED * math.sqrt(families) * costs.deviates(f"form {layout}"))
    return factors
