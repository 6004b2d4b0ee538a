"""Memory of a step, and data sheets of devices, as tables, lines and JSON."""

from collections.abc import Callable, Iterator
from typing import Final

from perfmodel.answer.memory import MemoryReport
from perfmodel.cost.memory import verdict
from perfmodel.documents.hardware import Catalogue, DataSheet, Figure, Pcie, Peak, Power, Rate, Size
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.report import Table, caveat_lines, counted, table
from perfmodel.units import PREFIXES, format_bytes, format_flop, format_rate
from perfmodel.workload import Phase


def memory_table(report: MemoryReport) -> Table:
    """One row per part, at the highest moment of the step."""
    needed_bytes = report.found.needed_bytes
    parts = [(name, size) for name, size in report.found.parts.items() if size]
    return table(
        f"{report.name}, micro-batch {report.layout.micro_batch}, "
        f"{counted(report.layout.dp, 'device')}",
        [*parts, ("all", needed_bytes)],
        {
            "<Part": "0",
            "Memory": "1:bytes",
            "Share": lambda part: "" if part[0] == "all" else f"{part[1] / needed_bytes:.1%}",
        },
    )


def memory_lines(report: MemoryReport, *, verbose: bool = False) -> Iterator[str]:
    """The highest moment, verdict, largest batch, evidence, caveats; all that changes assume if ``verbose``."""
    largest, moment = report.largest_batch, report.found.moment
    yield f"highest in {moment.phase.value}, {moment.module or 'outside modules'}, {moment.operator}"
    yield (
        f"{verdict(report.fit_probability).value}: {format_bytes(report.found.needed_bytes)} "
        f"+- {format_bytes(report.found.spread_bytes)} of {format_bytes(report.capacity_bytes)}, "
        f"fits with probability {report.fit_probability:.1%}"
    )
    yield f"largest micro-batch that fits for sure: {largest or 'none'}"
    yield from (f"not tried, may need less: perfmodel trace {flag}" for flag in report.untried)
    yield f"evidence: {report.evidence}"
    yield from (f"{row.name}: {row.note}" for row in report.techniques if verbose and row.note)
    yield from caveat_lines(report.caveats, verbose=verbose)


def remedies_table(report: MemoryReport) -> Table:
    """What to change first: the largest saving on top, with its cost in time by FLOP."""
    plain_bytes = report.techniques[0].memory.needed_bytes
    found = sorted(report.techniques[1:], key=lambda row: row.memory.needed_bytes)
    return table(
        "What to change first",
        [row for row in found if row.memory.needed_bytes < plain_bytes],
        {
            "<Change": "name",
            "Memory": "memory.needed_bytes",
            "Saves": lambda row: format_bytes(plain_bytes - row.memory.needed_bytes),
            "Time": lambda row: f"x {row.time_ratio:.2f}" if row.time_ratio else "not known",
            "<Fits": lambda row: verdict(row.memory.fit_probability(report.capacity_bytes)).value,
        },
    )


def trace_lines(document: WorkloadDocument, *, as_on_cuda: bool = False) -> Iterator[str]:
    """What was traced: size, work and memory of a step at the first micro-batch, and caveats."""
    micro_batch, _ = document.trace.traced_micro_batches
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
    yield (
        f"{workload.name}: {workload.sample}, {method.precision}, {method.optimizer} "
        f"({method.optimizer_implementation}), checkpointing {method.checkpointing}, "
        f"kernels {'as on CUDA' if as_on_cuda else f'of {method.device_kind}'}"
    )
    yield (
        f"parameters: {workload.num_parameters:,} trained in {len(step.parameters)} tensors, "
        f"{format_bytes(workload.gradient_bytes)} of gradients; buffers "
        f"{format_bytes(step.buffer_bytes)}; frozen {format_bytes(step.frozen_bytes)}"
    )
    yield f"one step of {micro_batch} samples: {', '.join(phases)}"
    yield (
        f"saved for backward: {format_bytes(step.saved_bytes)}; "
        f"{len(step.operators)} unique operators in {len(step.segments)} segments"
    )
    yield from caveat_lines(caveats, verbose=True)


_LABELS: Final = {
    "achieved": "fastest bf16 product measured",
    "link": "link between devices",
    "pcie": "link to the host",
}


def devices_table(catalogue: Catalogue) -> Table:
    """All devices, one line each; readable on 80 columns."""

    def rate(found: Rate | None) -> str:
        return "" if found is None else f"{found.bytes_per_s / PREFIXES['G']:.4g}"

    def peak(*names: str) -> Callable[[DataSheet], str]:
        def show(sheet: DataSheet) -> str:
            found = next((sheet.peaks[name] for name in names if name in sheet.peaks), None)
            return "" if found is None else f"{found.flop_per_s / PREFIXES['T']:.4g}"

        return show

    return table(
        "Devices by data sheet",
        catalogue.devices,
        {
            "<Device": "id",
            "GiB": lambda sheet: f"{sheet.memory.size_bytes / PREFIXES['Gi']:.4g}",
            "GB/s": lambda sheet: rate(sheet.bandwidth),
            "fp32": peak("fp32"),
            "tf32": peak("tf32"),
            "16 bit": peak("fp16", "bf16"),
            "fp8": peak("fp8"),
            "Link\nGB/s": lambda sheet: rate(sheet.link),
            "W": lambda sheet: "" if sheet.power is None else f"{sheet.power.power_w:.0f}",
        },
        caption="Dense peaks in TFLOP/s, by the type of the factors; 16 bit: fp16, or else bf16. Links: "
        "one direction. Empty: no usable source. One device with its sources: perfmodel devices NAME",
    )


def links_table(catalogue: Catalogue) -> Table:
    """All links; notes stand below names."""
    return table(
        "Links: one direction, by data sheet",
        catalogue.links,
        {
            "<Link": "id",
            "<Name": lambda link: f"{link.name}\n({link.note})" if link.note else link.name,
            "Rate": "rate.bytes_per_s",
            "<Of one": "per",
            "<Source": "rate.source",
        },
    )


def sheet_table(sheet: DataSheet, catalogue: Catalogue) -> Table:
    """Every figure of a device with its source and the source's date."""
    return table(
        f"{sheet.name} ({sheet.architecture}, {sheet.form})",
        sheet.figures(),
        {
            "<Figure": lambda found: _LABELS.get(found[0], found[0]),
            "Value": lambda found: _text(found[1]),
            "<Source": "1.source",
            "<Its date": lambda found: catalogue.sources[found[1].source].date,
        },
    )


def _text(figure: Figure) -> str:
    match figure:
        case Size():
            return format_bytes(figure.size_bytes)
        case Rate():
            return format_rate(figure.bytes_per_s, "B")
        case Peak():
            return format_rate(figure.flop_per_s, "FLOP")
        case Power():
            return f"{figure.power_w:.0f} W"
        case Pcie():
            return f"PCIe {figure.generation}"
    raise AssertionError(figure)


def sheet_lines(sheet: DataSheet, catalogue: Catalogue) -> list[str]:
    """What the table does not hold."""
    found = [f"names: {', '.join((sheet.id, *sheet.aliases, *sheet.reported))}"]
    if sheet.link is not None:
        reach = "pairs joined by a bridge" if sheet.link_joins_pairs else "all devices of a node"
        found.append(f"link: {sheet.link_name}, {reach}")
    bf16 = sheet.peaks.get("bf16")
    if sheet.achieved is not None and bf16 is not None:
        share = sheet.achieved.flop_per_s / bf16.flop_per_s
        found.append(f"fastest measured product: {share:.0%} of the peak in bf16")
    if sheet.note:
        found.append(f"note: {sheet.note}")
    sources = {figure.source: catalogue.sources[figure.source] for _, figure in sheet.figures()}
    return [*found, *(f"{key}: {each.title} ({each.where})" for key, each in sources.items())]


def devices_json(catalogue: Catalogue, sheet: DataSheet | None) -> dict[str, object]:
    """Plain values in SI units; one device, or all with the links."""
    chosen = catalogue.devices if sheet is None else (sheet,)
    written: dict[str, object] = {
        "devices": [one.model_dump(mode="json", exclude_none=True) for one in chosen],
        "sources": {key: one.model_dump(mode="json") for key, one in catalogue.sources.items()},
    }
    if sheet is None:
        written["links"] = [link.model_dump(mode="json") for link in catalogue.links]
    return written
