"""Use case: does a step fit into a device, the largest batch that does, and what to change first."""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from perfmodel import checks
from perfmodel.answer import Question as StepQuestion
from perfmodel.answer import timed_workload
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import layout_costs
from perfmodel.cost.memory import DeviceMemory, TracedMemory, Verdict, overhead_of, verdict
from perfmodel.cost.operators import OperatorDurations
from perfmodel.cost.techniques import Basis, Question, StepTimes, Technique, techniques
from perfmodel.cost.traced import mixed_ratio
from perfmodel.documents import Shown
from perfmodel.documents.hardware import DataSheet, find_device, sheet_named, shipped_catalogue
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import InvalidDocument
from perfmodel.layout import Layout
from perfmodel.machine import Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.step import Cause
from perfmodel.units import Bytes, Seconds, format_bytes
from perfmodel.workload import Phase
from perfmodel.workload.memory import StepMemory

_BASES = {
    Evidence.MEASURED: Basis.MEASURED,
    Evidence.INTERPOLATED: Basis.MEASURED,
    Evidence.EXTRAPOLATED: Basis.SCALED,
    Evidence.INFERRED: Basis.SCALED,
    Evidence.ASSUMED: Basis.ASSUMED,
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryReport(Shown):
    """What is known of the memory of one setting."""

    name: str
    layout: Layout
    capacity_bytes: Bytes
    found: DeviceMemory
    largest_batch: int
    """0 if none fits for sure."""
    hopeless: bool
    """Whether not even one sample has a chance."""
    techniques: tuple[Technique, ...]
    """The first is the step as it is."""
    in_seconds: bool
    """Whether times are seconds; otherwise they are multiples of the step as it is."""
    evidence: str
    caveats: tuple[str, ...]

    @property
    def fit_probability(self) -> float:
        """Probability that the step runs."""
        return self.found.fit_probability(self.capacity_bytes)

    def time_ratio(self, row: Technique) -> float | None:
        """Step time over that of the step as it is, where it is known."""
        plain_s = self.techniques[0].step_s
        return row.step_s / plain_s if row.step_s is not None and plain_s else None

    def _row(self, row: Technique) -> dict[str, object]:
        needed_bytes = row.memory.needed_bytes
        return {
            "name": row.name,
            "needed_bytes": needed_bytes,
            "saved_bytes": self.techniques[0].memory.needed_bytes - needed_bytes,
            "fit_probability": row.memory.fit_probability(self.capacity_bytes),
            "time_ratio": self.time_ratio(row),
            "step_s": row.step_s if self.in_seconds else None,
            "memory_evidence": row.memory_basis.value,
            "time_evidence": row.time_basis.value,
            "note": row.note,
        }

    def as_json(self) -> dict[str, object]:
        """Plain values for other programs; sizes in bytes, times in seconds or relative."""
        return {
            "workload": self.name,
            "micro_batch": self.layout.micro_batch,
            "devices": self.layout.dp,
            "capacity_bytes": self.capacity_bytes,
            "needed_bytes": self.found.needed_bytes,
            "spread_bytes": self.found.spread_bytes,
            "parts_bytes": dict(self.found.parts),
            "peak": {
                "phase": self.found.moment.phase.value,
                "module": self.found.moment.module,
                "operator": self.found.moment.operator,
            },
            "fit_probability": self.fit_probability,
            "verdict": verdict(self.fit_probability).value,
            "largest_micro_batch": self.largest_batch,
            "techniques": [self._row(row) for row in self.techniques],
            "caveats": list(self.caveats),
        }


def sheet_of(device: str | None, machine: MeasuredMachine | None) -> DataSheet | None:
    """Data sheet of a device by name, else of the machine's; None if there is none."""
    if device is not None:
        return find_device(device, shipped_catalogue())
    return None if machine is None else sheet_named(machine.device_name, shipped_catalogue())


def report_of(  # noqa: PLR0913 - one parameter per part of the question
    document: WorkloadDocument,
    capacity_bytes: Bytes,
    *,
    machine: MeasuredMachine | None = None,
    micro_batch: int | None = None,
    devices: int = 1,
    bucket_view: bool = False,
    device_kind: str | None = None,
    sheet: DataSheet | None = None,
) -> MemoryReport:
    """Everything that is known of the memory of a traced step; times in seconds need a machine."""
    recorded = document.memory
    if recorded is None:
        raise InvalidDocument(
            f"{document.workload.name}: memory must be recorded, got none; trace the model again with perfmodel trace"
        )
    checks.at_least("devices", devices, 1)
    batch = micro_batch or document.trace.own_micro_batch or recorded.traced_micro_batches[0]
    traced_kind = document.trace.method.device_kind
    kind = device_kind or (traced_kind if sheet is None or sheet.kind != "cuda" else sheet.kind)
    traced = TracedMemory(
        trace=document.trace,
        memory=recorded,
        overhead=overhead_of(recorded, kind),
        bucket_view=bucket_view,
    )
    question = Question(
        traced=traced,
        layout=Layout(dp=devices, micro_batch=batch),
        times=_relative_times(document) if machine is None else _times(document, machine, batch),
        shares=_shares(document, batch),
        in_seconds=machine is not None,
        is_mixed=document.trace.method.precision != "fp32",
    )
    [found] = traced.ranks(question.layout)
    [least] = traced.ranks(dataclasses.replace(question.layout, micro_batch=1))
    return MemoryReport(
        hopeless=verdict(least.fit_probability(capacity_bytes)) is Verdict.DOES_NOT_FIT,
        name=document.workload.name,
        layout=question.layout,
        capacity_bytes=capacity_bytes,
        found=found,
        largest_batch=traced.largest_batch(question.layout, capacity_bytes),
        techniques=tuple(techniques(question, capacity_bytes)),
        in_seconds=question.in_seconds,
        evidence=traced.overhead.evidence,
        caveats=(
            *_caveats(recorded, batch, kind, traced_kind),
            *_device_caveats(sheet, machine),
        ),
    )


def _caveats(memory: StepMemory, batch: int, kind: str, traced_kind: str) -> list[str]:
    caveats = []
    if memory.beyond_range(batch):
        least, most = memory.traced_micro_batches
        caveats.append(
            f"micro-batch {batch} is far from the traced {least} and {most}: kernels may choose other "
            "workspaces; trace again with --micro-batch"
        )
    if kind != traced_kind:
        caveats.append(
            f"traced with the kernels of {traced_kind}: temporaries on {kind} may differ; "
            f"trace again with --device-kind {kind}"
        )
    if kind == "cuda":
        caveats.append("memory on CUDA has not been validated on a GPU yet")
    return caveats


def _device_caveats(sheet: DataSheet | None, machine: MeasuredMachine | None) -> list[str]:
    if sheet is None:
        return []
    label = (
        f"memory of {sheet.name} is the {format_bytes(sheet.memory.size_bytes)} of its data sheet; drivers "
        "report up to 6 % less where error correction takes its share: give --device-memory to be exact"
    )
    rescaling = None if machine is None else machine.rescaling
    return [label, *(() if rescaling is None else rescaling.notes)]


def _relative_times(document: WorkloadDocument) -> StepTimes:
    """Shares of a step by FLOP: without a profile nothing is known in seconds."""
    forward, backward = document.workload.forward_flop, document.workload.backward_flop
    whole = (forward + backward) or 1.0
    return StepTimes(
        forward_s=forward / whole,
        backward_s=backward / whole,
        optimizer_s=0.0,
        basis=Basis.ASSUMED,
    )


def _times(document: WorkloadDocument, profile: MeasuredMachine, batch: int) -> StepTimes:
    calibrated = profile.workload(document.workload.name)
    same = (
        calibrated is not None
        and calibrated.workload.num_parameters == document.workload.num_parameters
    )
    # On one device the order of gradients, in which trace and calibration may differ, is no matter.
    found = (
        timed_workload(profile, document.workload.name)
        if same
        else timed_workload(profile, document.workload, trace=document.trace)
    )
    question = StepQuestion(machine=profile, workload=found, layout=Layout(micro_batch=batch))
    step, costs = answer(question), layout_costs(question)
    # Of the device, or of the host that issues its work: whichever binds.
    causes: dict[Cause, Seconds] = defaultdict(float)
    for span in step.trace.spans():
        causes[span.operation.issues or span.operation.cause] += span.end_s - span.start_s
    weakest = _BASES[Evidence.weakest(step.evidence.values())]
    plain = StepTimes(
        forward_s=causes[Cause.FORWARD],
        backward_s=causes[Cause.BACKWARD],
        optimizer_s=causes[Cause.OPTIMIZER],
        basis=weakest,
        fused_s=_fused_s(document, profile, batch, causes[Cause.OPTIMIZER]),
        graphed_s=sum(float(time_s[0]) for time_s in costs.terms.compute_s.values())
        if profile.asynchronous
        else None,
    )
    scaled = Basis.SCALED if profile.rescaling is None else Basis.DATA_SHEET
    return dataclasses.replace(
        plain,
        mixed_s=_mixed_s(document, profile, batch, plain),
        mixed_basis=max(weakest, scaled, key=list(Basis).index),
    )


def _mixed_s(
    document: WorkloadDocument, profile: MeasuredMachine, batch: int, plain: StepTimes
) -> Seconds | None:
    """The step under autocast, as products change from one precision to the other. [s]"""
    if profile.operators is None:
        return None
    step = document.trace.at(micro_batch=batch)
    durations = OperatorDurations(profile.operators, use_measured=False)
    forward, backward = (
        mixed_ratio(step, durations, profile, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    if forward is None or backward is None:
        return None
    return forward * plain.forward_s + backward * plain.backward_s + plain.optimizer_s


def _fused_s(
    document: WorkloadDocument, profile: MeasuredMachine, batch: int, optimizer_s: Seconds
) -> Seconds | None:
    """The optimizer's phase, changed as the curves change from its implementation to the fused one. [s]"""
    if profile.operators is None:
        return None
    step = document.trace.at(micro_batch=batch)
    method = dataclasses.replace(step.method, optimizer_implementation="fused")
    durations = OperatorDurations(profile.operators, use_measured=False)
    own, fused = (
        durations.optimizer(each) for each in (step, dataclasses.replace(step, method=method))
    )
    if Evidence.ASSUMED in (own.evidence, fused.evidence) or own.time_s <= 0:
        return None
    return optimizer_s * fused.time_s / own.time_s


def _shares(document: WorkloadDocument, batch: int) -> dict[str, float]:
    """Share of the forward FLOP that each block holds."""
    assert document.memory is not None
    step = document.trace.at(micro_batch=batch)
    done = dict.fromkeys((block.path for block in document.memory.blocks), 0.0)
    whole = 0.0
    for call in step.calls():
        if call.phase is Phase.FORWARD:
            flop = step.operators[call.operator].flop
            whole += flop
            path = call.module
            while path and path not in done:
                path = path.rpartition(".")[0]
            if path:
                done[path] += flop
    return {path: flop / (whole or 1.0) for path, flop in done.items()}
