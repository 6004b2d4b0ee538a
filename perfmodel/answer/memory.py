"""Use case: does a step fit into a device, the largest batch that does, and what to change first."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel import checks
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import answer
from perfmodel.answer.measured import architecture_of
from perfmodel.cost.memory import (
    FITS_ABOVE,
    DeviceMemory,
    Parts,
    TracedMemory,
    Verdict,
    overhead_of,
    verdict,
)
from perfmodel.documents import Shown
from perfmodel.documents.hardware import DataSheet, find_device, sheet_named, shipped_catalogue
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import InvalidDocument
from perfmodel.layout import Layout, Recompute
from perfmodel.machine import Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.step import Cause
from perfmodel.units import Bytes, Seconds, format_bytes
from perfmodel.workload import Phase
from perfmodel.workload.memory import Block, Moment, Part, StepMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Time of the phases of a step. [s]"""

    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    evidence: Evidence

    @property
    def step_s(self) -> Seconds:
        """All phases. [s]"""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One change with its memory and its time."""

    name: str
    memory: DeviceMemory
    step_s: Seconds | None
    """``None`` where it is unknown. [s]"""
    memory_evidence: str
    time_evidence: Evidence
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
            "memory_evidence": row.memory_evidence,
            "time_evidence": row.time_evidence.value,
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
    known_kind = traced_kind if machine is None else machine.memory_kind
    kind = device_kind or (known_kind if sheet is None or sheet.kind != "cuda" else sheet.kind)
    unknown = "" if machine is None else architecture_of(machine)
    traced = TracedMemory(
        trace=document.trace,
        memory=recorded,
        overhead=overhead_of(recorded, kind, unknown if sheet is None else sheet.architecture),
        bucket_view=bucket_view,
    )
    layout = Layout(dp=devices, micro_batch=batch)
    plain = PlainStep(
        traced=traced,
        layout=layout,
        times=_relative_times(document) if machine is None else _times(document, machine, batch),
        shares=_shares(document, batch),
    )
    [found] = traced.ranks(layout)
    [least] = traced.ranks(replace(layout, micro_batch=1))
    return MemoryReport(
        hopeless=verdict(least.fit_probability(capacity_bytes)) is Verdict.DOES_NOT_FIT,
        name=document.workload.name,
        layout=layout,
        capacity_bytes=capacity_bytes,
        found=found,
        largest_batch=traced.largest_batch(layout, capacity_bytes),
        techniques=tuple(techniques(plain, capacity_bytes)),
        in_seconds=machine is not None,
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


def _relative_times(document: WorkloadDocument) -> StepTimes:
    """Shares of a step by FLOP: without a profile nothing is known in seconds."""
    forward, backward = document.workload.forward_flop, document.workload.backward_flop
    whole = (forward + backward) or 1.0
    return StepTimes(
        forward_s=forward / whole,
        backward_s=backward / whole,
        optimizer_s=0.0,
        evidence=Evidence.ASSUMED,
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
    step = answer(Question(machine=profile, workload=found, layout=Layout(micro_batch=batch)))
    # Of the device, or of the host that issues its work: whichever binds.
    causes: dict[Cause, Seconds] = defaultdict(float)
    for span in step.trace.spans():
        causes[span.operation.issues or span.operation.cause] += span.end_s - span.start_s
    return StepTimes(
        forward_s=causes[Cause.FORWARD],
        backward_s=causes[Cause.BACKWARD],
        optimizer_s=causes[Cause.OPTIMIZER],
        evidence=Evidence.weakest(step.evidence.values()),
    )


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


#: Entries of a moment's parts that a technique changes.
Change = Callable[[Moment, Parts], Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """The step as it is, which techniques change."""

    traced: TracedMemory
    layout: Layout
    """Data parallelism alone."""
    times: StepTimes
    """Seconds, or shares of the step."""
    shares: Mapping[str, float]
    """Of each block in the forward and backward time."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of layers that could be computed again."""
        return self.traced.memory.blocks

    def technique(  # noqa: PLR0913 - one per column of the table
        self,
        name: str,
        change: Change = lambda _moment, _parts: {},
        *,
        note: str = "",
        layout: Layout | None = None,
        again: Collection[str] = (),
        step_s: Seconds | None = None,
        time_evidence: Evidence = Evidence.ASSUMED,
        memory_evidence: str = "derived from the trace",
    ) -> Technique:
        """One row: the highest moment of a layout, after a change, and a time where it is known.

        ``again``: Paths of blocks that are computed again.
        """
        layout = layout or self.layout
        [moments] = self.traced.stages(layout, again=again)
        changed = [(moment, parts | change(moment, parts)) for moment, parts in moments]
        return Technique(
            name=name,
            memory=DeviceMemory.highest(changed, self.traced.overhead_under(layout)),
            step_s=step_s,
            memory_evidence=memory_evidence,
            time_evidence=time_evidence,
            note=note,
        )

    def with_again_s(self, blocks: Sequence[Block]) -> Seconds:
        """The step with the forward passes of some blocks twice. [s]"""
        again = sum(self.shares.get(block.path, 0.0) for block in blocks)
        return self.times.step_s + again * self.times.forward_s


def techniques(plain: PlainStep, capacity_bytes: Bytes) -> list[Technique]:
    """Every technique that applies to a device with so much memory, the plain step first."""
    times, blocks, layout = plain.times, plain.blocks, plain.layout
    as_it_is = plain.technique("as it is", step_s=times.step_s, time_evidence=times.evidence)
    rows = [as_it_is]
    if layout.micro_batch > 1:
        # Gradients stay from the first half on.
        halved = replace(layout, micro_batch=-(-layout.micro_batch // 2), accumulation=2)
        rows.append(
            plain.technique(
                "gradient accumulation 2",
                layout=halved,
                step_s=times.step_s,
                note="same samples per step; small kernels run less efficiently, which is not counted",
            )
        )
    if blocks:
        rows.append(
            plain.technique(
                "activation checkpointing per block",
                layout=replace(layout, recompute=Recompute.FULL),
                step_s=plain.with_again_s(blocks),
                time_evidence=times.evidence,
                note="exact figures: perfmodel trace --checkpointing per-block",
            )
        )
    if len(blocks) > 1:
        fits = as_it_is.memory.fit_probability(capacity_bytes) >= FITS_ABOVE
        rows.append(_selective_checkpointing(plain, None if fits else capacity_bytes))
    rows.append(
        plain.technique(
            "activation checkpointing of the whole model",
            step_s=times.step_s + times.forward_s,
            time_evidence=times.evidence,
            note="everything comes back at once when backward starts: the peak stays",
        )
    )
    if plain.traced.trace.method.precision == "fp32":
        rows.append(_mixed_precision(plain))
    rows.append(
        plain.technique(
            "fused optimizer",
            _in_place,
            note="updates in place without temporaries; its time: perfmodel trace "
            "--optimizer-implementation fused",
        )
    )
    return rows + _sharded(plain) if layout.dp > 1 else rows


def _selective_checkpointing(plain: PlainStep, capacity_bytes: Bytes | None) -> Technique:
    """As few blocks as make the step fit, best saving per time first; half without a capacity."""

    def saved_per_time(block: Block) -> float:
        batch = plain.layout.micro_batch
        saved = max(0, block.saved.at(batch)) - max(0, block.input.at(batch))
        return saved / max(plain.shares.get(block.path, 0.0), 1e-9)

    order = sorted(plain.blocks, key=saved_per_time, reverse=True)

    def first(count: int) -> Technique:
        return plain.technique(
            f"activation checkpointing of {count} of {len(order)} blocks",
            again={block.path for block in order[:count]},
            step_s=plain.with_again_s(order[:count]),
            time_evidence=plain.times.evidence,
            note="selective: the blocks that save most per time, as few as fit, or half",
        )

    if capacity_bytes is not None:
        for row in map(first, range(1, len(order))):
            if row.memory.fit_probability(capacity_bytes) >= FITS_ABOVE:
                return row
    return first(len(order) // 2)


def _mixed_precision(plain: PlainStep) -> Technique:
    return plain.technique(
        "mixed precision bf16 (autocast)",
        lambda _, parts: {
            Part.ACTIVATIONS: parts[Part.ACTIVATIONS] // 2 + parts[Part.PARAMETERS] // 2,
            Part.TEMPORARIES: parts[Part.TEMPORARIES] // 2,
        },
        memory_evidence="assumed",
        note="halves activations, keeps a bf16 copy of the weights; exact memory, and its time: perfmodel "
        "trace --precision bf16",
    )


def _in_place(moment: Moment, parts: Parts) -> Parts:
    is_update = moment.phase is Phase.OPTIMIZER
    return {Part.TEMPORARIES: 0 if is_update else parts[Part.TEMPORARIES]}


def _sharded(plain: PlainStep) -> list[Technique]:
    """ZeRO-1 and ZeRO-3."""
    devices = plain.layout.dp
    return [
        plain.technique(
            f"optimizer states sharded over {devices} (ZeRO-1)",
            layout=replace(plain.layout, zero=1),
            note="as many bytes on the wire as DDP [Rajbhandari et al. 2020]; communication is not "
            "counted here",
        ),
        plain.technique(
            f"everything sharded over {devices} (ZeRO-3, FSDP)",
            layout=replace(plain.layout, zero=3),
            note="1.5 times the bytes of DDP on the wire [Rajbhandari et al. 2020], not counted here",
        ),
    ]
