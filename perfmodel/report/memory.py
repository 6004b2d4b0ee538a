"""Memory of a step as tables, lines and JSON."""

from dataclasses import dataclass

from rich import box
from rich.table import Table

from perfmodel.cost.memory import DeviceMemory, MemorySetting, verdict
from perfmodel.cost.techniques import Technique
from perfmodel.units import Bytes, format_bytes, format_duration


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
        if row.step_s is None or not plain_s:
            return None
        return row.step_s / plain_s

    def as_json(self) -> dict[str, object]:
        """Plain values for other programs; sizes in bytes, times in seconds or relative."""
        plain = self.techniques[0]
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
            "techniques": [
                {
                    "name": row.name,
                    "needed_bytes": row.memory.needed_bytes,
                    "saved_bytes": plain.memory.needed_bytes - row.memory.needed_bytes,
                    "fit_probability": row.memory.fit_probability(self.capacity_bytes),
                    "time_ratio": self.time_ratio(row),
                    "step_s": row.step_s if self.in_seconds else None,
                    "memory_evidence": row.memory_basis.value,
                    "time_evidence": row.time_basis.value,
                    "note": row.note,
                }
                for row in self.techniques
            ],
            "caveats": list(self.caveats),
        }


def memory_table(report: MemoryReport) -> Table:
    """One row per part, at the highest moment of the step."""
    moment = report.found.moment
    table = Table(
        title=f"{report.name}, micro-batch {report.setting.micro_batch}, {report.setting.devices} device(s)",
        caption=(
            f"Highest in {moment.phase.value}, {moment.module or 'outside modules'}, {moment.operator}."
        ),
        box=box.SIMPLE,
    )
    table.add_column("part")
    table.add_column("memory", justify="right")
    table.add_column("share", justify="right")
    for name, size_bytes in report.found.parts.items():
        if size_bytes:
            share = size_bytes / report.found.needed_bytes
            table.add_row(name, format_bytes(size_bytes), f"{share:.1%}")
    table.add_row("all", format_bytes(report.found.needed_bytes), "", style="bold")
    return table


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
        *(f"caveat: {caveat}" for caveat in report.caveats),
    ]


def remedies_table(report: MemoryReport) -> Table:
    """What to change first: the largest saving on top, with its price in time."""
    plain = report.techniques[0]
    rows = sorted(report.techniques[1:], key=lambda row: row.memory.needed_bytes)
    table = Table(title="What to change first", box=box.SIMPLE)
    for name in ("change", "memory", "saves", "time", "fits"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for row in rows:
        saved = plain.memory.needed_bytes - row.memory.needed_bytes
        if saved > 0:
            table.add_row(
                row.name,
                format_bytes(row.memory.needed_bytes),
                format_bytes(saved),
                _ratio(report, row),
                verdict(row.memory.fit_probability(report.capacity_bytes)).value,
            )
    return table


def techniques_table(report: MemoryReport) -> Table:
    """Time, memory, gain and evidence of every technique."""
    plain = report.techniques[0]
    table = Table(title=f"{report.name}, micro-batch {report.setting.micro_batch}", box=box.SIMPLE)
    for name in ("technique", "step", "memory", "saves", "evidence (memory; time)"):
        table.add_column(name, justify="right" if name in {"step", "memory", "saves"} else "left")
    for row in report.techniques:
        saved = plain.memory.needed_bytes - row.memory.needed_bytes
        ratio = _ratio(report, row)
        table.add_row(
            row.name,
            f"{format_duration(row.step_s)} ({ratio})"
            if report.in_seconds and row.step_s
            else ratio,
            format_bytes(row.memory.needed_bytes),
            f"{saved / plain.memory.needed_bytes:.0%}",
            f"{row.memory_basis.value}; {row.time_basis.value}",
        )
    return table


def technique_lines(report: MemoryReport) -> list[str]:
    """What each technique assumes, and caveats."""
    notes = [f"{row.name}: {row.note}" for row in report.techniques if row.note]
    return [*notes, *(f"caveat: {caveat}" for caveat in report.caveats)]


def _ratio(report: MemoryReport, row: Technique) -> str:
    ratio = report.time_ratio(row)
    return "not known" if ratio is None else f"x {ratio:.2f}"
