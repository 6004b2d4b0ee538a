"""A traced workload as text."""

from perfmodel.documents.workload import WorkloadDocument
from perfmodel.units import format_bytes, format_flop
from perfmodel.workload.operator import Phase
from perfmodel.workload.step import TracedStep


def trace_lines(document: WorkloadDocument, *, micro_batch: int) -> list[str]:
    """What was traced: size, work and memory of a step at a micro-batch, and caveats."""
    assert document.trace is not None
    step = document.trace.at(micro_batch=micro_batch)
    workload = document.workload
    method = step.method
    return [
        (
            f"{workload.name}: {workload.sample}, {method.precision}, {method.optimizer} "
            f"({method.optimizer_implementation}), checkpointing {method.checkpointing}, "
            f"kernels of {method.device_kind}"
        ),
        (
            f"parameters: {workload.num_parameters:,} trained in {len(step.parameters)} tensors, "
            f"{format_bytes(workload.gradient_bytes)} of gradients; buffers "
            f"{format_bytes(step.buffer_bytes)}; frozen {format_bytes(step.frozen_bytes)}"
        ),
        f"one step of {micro_batch} samples: " + ", ".join(_phase(step, phase) for phase in Phase),
        (
            f"saved for backward: {format_bytes(step.saved_bytes)}; "
            f"{len(step.operators)} unique operators in {len(step.segments)} segments"
        ),
        *(f"caveat: {caveat}" for caveat in _caveats(step)),
    ]


def _phase(step: TracedStep, phase: Phase) -> str:
    return f"{phase.value} {step.num_calls(phase)} calls {format_flop(step.flop(phase))}"


def _caveats(step: TracedStep) -> list[str]:
    caveats = list(step.caveats)
    unused = step.unused_parameters
    if unused:
        named = ", ".join(unused[:3]) + ", ..." * (len(unused) > 3)
        caveats.append(
            f"{len(unused)} parameters get no gradient ({named}): DistributedDataParallel needs "
            "find_unused_parameters=True, which walks the graph in every step"
        )
    if step.method.precision == "fp16":
        caveats.append("a gradient scaler, usual with fp16, is not part of the trace")
    return caveats
