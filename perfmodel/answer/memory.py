"""Use case: does a step fit into a device, the largest batch that does, and what to change first."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from perfmodel.answer import architecture_of
from perfmodel.cost.memory import DeviceMemory, TracedMemory, Verdict, overhead_of, verdict
from perfmodel.documents import Shown
from perfmodel.documents.hardware import DataSheet, find_device, sheet_named, shipped_catalogue
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import InvalidDocument, UsageError, check_at_least
from perfmodel.layout import Layout, Recompute
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.units import Bytes, format_bytes
from perfmodel.workload import Phase, Workload
from perfmodel.workload.memory import StepMemory
from perfmodel.workload.step import FUSED, StepMethod

_TRACED_SO: Final = (
    "memory of a trace with it; perfmodel trace writes that file, predict --workload tells its time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A layout of the same step, or a trace with another method, that may need less memory."""

    name: str
    memory: DeviceMemory
    time_ratio: float | None
    """Step over the step as it is, by FLOP; None where communication or kernels decide."""
    note: str


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
    untried: tuple[str, ...]
    """Options of a trace that may save memory, where the model could not be traced with them."""
    evidence: str
    caveats: tuple[str, ...]

    @property
    def fit_probability(self) -> float:
        """Probability that the step runs."""
        return self.found.fit_probability(self.capacity_bytes)

    def _row(self, row: Technique) -> dict[str, object]:
        needed_bytes = row.memory.needed_bytes
        return {
            "name": row.name,
            "needed_bytes": needed_bytes,
            "saved_bytes": self.techniques[0].memory.needed_bytes - needed_bytes,
            "fit_probability": row.memory.fit_probability(self.capacity_bytes),
            "time_ratio": row.time_ratio,
            "note": row.note,
        }

    def as_json(self) -> dict[str, object]:
        """Plain values for other programs; sizes in bytes."""
        return {
            "schema_version": 2,
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
            "untried": list(self.untried),
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
    trace_again: Callable[[StepMethod], WorkloadDocument] | None = None,
) -> MemoryReport:
    """Everything that is known of the memory of a traced step.

    ``trace_again``: Traces the model with another method; None where only its file is known.
    """
    recorded = document.memory
    if recorded is None:
        raise InvalidDocument(
            f"{document.workload.name}: memory must be recorded, got none; trace the model again with perfmodel trace"
        )
    check_at_least("devices", devices, 1)
    batch = micro_batch or document.trace.own_micro_batch or recorded.traced_micro_batches[0]
    traced_kind = document.trace.method.device_kind
    known_kind = traced_kind if machine is None else machine.memory_kind
    kind = device_kind or (known_kind if sheet is None or sheet.kind != "cuda" else sheet.kind)
    unknown = "" if machine is None else architecture_of(machine)
    architecture = unknown if sheet is None else sheet.architecture

    def traced_memory(found: WorkloadDocument, memory: StepMemory) -> TracedMemory:
        overhead = overhead_of(memory, kind, architecture)
        return TracedMemory(
            trace=found.trace, memory=memory, overhead=overhead, bucket_view=bucket_view
        )

    traced = traced_memory(document, recorded)
    layout = Layout(dp=devices, micro_batch=batch)
    [found] = traced.ranks(layout)
    [least] = traced.ranks(replace(layout, micro_batch=1))
    rows, untried = list(techniques(traced, layout, document.workload)), []
    for flag, method in _other_methods(document.trace.method, found).items():
        other = None
        if trace_again is not None:
            with suppress(UsageError):  # of a model that refuses it
                other = trace_again(method)
        if other is None or other.memory is None:
            untried.append(flag)
            continue
        [memory] = traced_memory(other, other.memory).ranks(layout)
        rows.append(Technique(name=flag, memory=memory, time_ratio=None, note=_TRACED_SO))
    return MemoryReport(
        hopeless=verdict(least.fit_probability(capacity_bytes)) is Verdict.DOES_NOT_FIT,
        name=document.workload.name,
        layout=layout,
        capacity_bytes=capacity_bytes,
        found=found,
        largest_batch=traced.largest_batch(layout, capacity_bytes),
        techniques=tuple(rows),
        untried=tuple(untried),
        evidence=traced.overhead.evidence,
        caveats=(*_caveats(recorded, batch, kind, traced_kind), *_device_caveats(sheet, machine)),
    )


def _other_methods(method: StepMethod, found: DeviceMemory) -> dict[str, StepMethod]:
    """Methods that may need less than what was found, by their option of ``perfmodel trace``."""
    others = {}
    if method.precision == "fp32":
        others["--precision bf16"] = replace(method, precision="bf16")
    # A fused update has no temporaries; it changes no moment of another phase.
    if method.optimizer_implementation != FUSED and found.moment.phase is Phase.OPTIMIZER:
        others[f"--optimizer-implementation {FUSED}"] = replace(
            method, optimizer_implementation=FUSED
        )
    return others


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
        caveats.append("memory on CUDA was checked on an H100 and an H200 only")
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


def techniques(traced: TracedMemory, layout: Layout, workload: Workload) -> Iterator[Technique]:
    """Layouts of a step that need less memory, the step as it is first."""
    flop = workload.forward_flop + workload.backward_flop
    rows: list[tuple[str, Layout, float | None, str]] = [("as it is", layout, 1.0, "")]
    if layout.micro_batch > 1:
        halved = replace(layout, micro_batch=-(-layout.micro_batch // 2), accumulation=2)
        note = "same samples per step; small kernels run less efficiently, which is not counted"
        rows.append(("gradient accumulation 2", halved, 1.0, note))
    if traced.memory.blocks:
        rows.append(
            (
                "activation checkpointing per block",
                replace(layout, recompute=Recompute.FULL),
                1 + _share_of_blocks(traced, layout) * workload.forward_flop / (flop or 1.0),
                "forward passes of blocks twice; exact memory: perfmodel trace --checkpointing per-block",
            )
        )
    if layout.dp > 1:
        sharded = (
            (1, "optimizer states sharded over {} (ZeRO-1)", "as many bytes on the wire as DDP"),
            (3, "everything sharded over {} (ZeRO-3, FSDP)", "1.5 times the bytes of DDP"),
        )
        for zero, name, wire in sharded:
            note = f"{wire} [Rajbhandari et al. 2020]; perfmodel predict --layout tells its time"
            rows.append((name.format(layout.dp), replace(layout, zero=zero), None, note))
    for name, changed, time_ratio, note in rows:
        [memory] = traced.ranks(changed)
        yield Technique(name=name, memory=memory, time_ratio=time_ratio, note=note)


def _share_of_blocks(traced: TracedMemory, layout: Layout) -> float:
    """Of the FLOP of a forward pass, those inside blocks of layers."""
    step = traced.trace.at(micro_batch=layout.micro_batch)
    blocks = tuple(f"{block.path}." for block in traced.memory.blocks)
    inside = whole = 0.0
    for call in step.calls():
        if call.phase is Phase.FORWARD:
            flop = step.operators[call.operator].flop
            whole += flop
            inside += flop * f"{call.module}.".startswith(blocks)
    return inside / (whole or 1.0)
