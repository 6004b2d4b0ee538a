"""Memory of a step as tables, lines and JSON."""

from dataclasses import dataclass

from perfmodel.cost.memory import DeviceMemory, MemorySetting, verdict
from perfmodel.cost.techniques import Technique
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.report.tables import Table, table
from perfmodel.report.wording import caveat_lines, counted
from perfmodel.units import Bytes, format_bytes, format_duration, format_flop
from perfmodel.workload.operator import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What is known of the memory of one setting."""

    name: str
    setting: MemorySetting
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
            "micro_batch": self.setting.micro_batch,
            "devices": self.setting.devices,
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


def memory_table(report: MemoryReport) -> Table:
    """One row per part, at the highest moment of the step."""
    moment, needed_bytes = report.found.moment, report.found.needed_bytes
    parts = [(name, size) for name, size in report.found.parts.items() if size]
    return table(
        f"{report.name}, micro-batch {report.setting.micro_batch}, "
        f"{counted(report.setting.devices, 'device')}",
        [*parts, ("all", needed_bytes)],
        {
            "<Part": "0",
            "Memory": "1:bytes",
            "Share": lambda part: "" if part[0] == "all" else f"{part[1] / needed_bytes:.1%}",
        },
        caption=f"Highest in {moment.phase.value}, {moment.module or 'outside modules'}, "
        f"{moment.operator}.",
    )


def memory_lines(report: MemoryReport) -> list[str]:
    """Verdict, largest batch, evidence, caveats."""
    largest = report.largest_batch
    return [
        (
            f"{verdict(report.fit_probability).value}: {format_bytes(report.found.needed_bytes)} "
            f"+- {format_bytes(report.found.spread_bytes)} of {format_bytes(report.capacity_bytes)}, "
            f"fits with probability {report.fit_probability:.1%}"
        ),
        f"largest micro-batch that fits for sure: {largest or 'none'}",
        f"evidence: {report.evidence}",
        *caveat_lines(report.caveats),
    ]


def remedies_table(report: MemoryReport) -> Table:
    """What to change first: the largest saving on top, with its cost in time."""
    plain_bytes = report.techniques[0].memory.needed_bytes
    found = sorted(report.techniques[1:], key=lambda row: row.memory.needed_bytes)
    return table(
        "What to change first",
        [row for row in found if row.memory.needed_bytes < plain_bytes],
        {
            "<Change": "name",
            "Memory": "memory.needed_bytes",
            "Saves": lambda row: format_bytes(plain_bytes - row.memory.needed_bytes),
            "Time": lambda row: _ratio(report, row),
            "<Fits": lambda row: verdict(row.memory.fit_probability(report.capacity_bytes)).value,
        },
    )


def techniques_table(report: MemoryReport) -> Table:
    """Time, memory, gain and evidence of every technique."""
    plain_bytes = report.techniques[0].memory.needed_bytes

    def step(row: Technique) -> str:
        if report.in_seconds and row.step_s:
            return f"{format_duration(row.step_s)} ({_ratio(report, row)})"
        return _ratio(report, row)

    return table(
        f"{report.name}, micro-batch {report.setting.micro_batch}",
        report.techniques,
        {
            "<Technique": "name",
            "Step": step,
            "Memory": "memory.needed_bytes",
            "Saves": lambda row: f"{(plain_bytes - row.memory.needed_bytes) / plain_bytes:.0%}",
            "<Evidence (memory; time)": lambda row: (
                f"{row.memory_basis.value}; {row.time_basis.value}"
            ),
        },
    )


def technique_lines(report: MemoryReport) -> list[str]:
    """What each technique assumes, and caveats."""
    notes = [f"{row.name}: {row.note}" for row in report.techniques if row.note]
    return [*notes, *caveat_lines(report.caveats)]


def _ratio(report: MemoryReport, row: Technique) -> str:
    ratio = report.time_ratio(row)
    return "not known" if ratio is None else f"x {ratio:.2f}"


def trace_lines(document: WorkloadDocument, *, micro_batch: int) -> list[str]:
    """What was traced: size, work and memory of a step at a micro-batch, and caveats."""
    assert document.trace is not None
    step = document.trace.at(micro_batch=micro_batch)
    workload, method = document.workload, step.method
    phases = [
        f"{phase.value} {step.num_calls(phase)} calls {format_flop(step.flop(phase))}"
        for phase in Phase
    ]
    caveats = list(step.caveats)
    unused = step.unused_parameters
    if unused:
        named = ", ".join(unused[:3]) + ", ..." * (len(unused) > 3)
        caveats.append(
            f"{len(unused)} parameters get no gradient ({named}): DistributedDataParallel needs "
            "find_unused_parameters=True, which walks the graph in every step"
        )
    if method.precision == "fp16":
        caveats.append("a gradient scaler, usual with fp16, is not part of the trace")
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
        f"one step of {micro_batch} samples: {', '.join(phases)}",
        (
            f"saved for backward: {format_bytes(step.saved_bytes)}; "
            f"{len(step.operators)} unique operators in {len(step.segments)} segments"
        ),
        *caveat_lines(caveats),
    ]
