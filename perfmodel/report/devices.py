"""Data sheets as tables, lines and JSON."""

from typing import Final

from perfmodel.documents.hardware import Catalogue, DataSheet, Figure, Pcie, Peak, Power, Rate, Size
from perfmodel.report.wording import Grid, grid
from perfmodel.units import PREFIXES, format_bytes, format_rate


def devices_grid(catalogue: Catalogue) -> Grid:
    """All devices, one line each; readable on 80 columns."""
    return grid(
        "Devices by data sheet",
        text=("Device",),
        numbers=("GiB", "GB/s", "fp32", "tf32", "16 bit", "fp8", "Link\nGB/s", "W"),
        rows=[_row(sheet) for sheet in catalogue.devices],
        caption="Dense peaks in TFLOP/s, by the type of the factors; 16 bit: fp16, or else bf16. Links: "
        "one direction. Empty: no usable source. One device with its sources: perfmodel devices NAME",
    )


def _row(sheet: DataSheet) -> tuple[str, ...]:
    peaks = sheet.peaks
    shown = (
        peaks.get("fp32"),
        peaks.get("tf32"),
        peaks.get("fp16", peaks.get("bf16")),
        peaks.get("fp8"),
    )
    return (
        sheet.id,
        f"{sheet.memory.size_bytes / PREFIXES['Gi']:.4g}",
        _plain(sheet.bandwidth),
        *("" if peak is None else f"{peak.flop_per_s / PREFIXES['T']:.4g}" for peak in shown),
        _plain(sheet.link),
        "" if sheet.power is None else f"{sheet.power.power_w:.0f}",
    )


def _plain(rate: Rate | None) -> str:
    return "" if rate is None else f"{rate.bytes_per_s / PREFIXES['G']:.4g}"


def links_grid(catalogue: Catalogue) -> Grid:
    """All links; notes stand below names."""
    return grid(
        "Links: one direction, by data sheet",
        text=("Link", "Name"),
        numbers=("Rate",),
        notes=("Of one", "Source"),
        rows=[
            (
                link.id,
                f"{link.name}\n({link.note})" if link.note else link.name,
                _text(link.rate),
                link.per,
                link.rate.source,
            )
            for link in catalogue.links
        ],
    )


def sheet_grid(sheet: DataSheet, catalogue: Catalogue) -> Grid:
    """Every figure of a device with its source and the source's date."""
    return grid(
        f"{sheet.name} ({sheet.architecture}, {sheet.form})",
        text=("Figure",),
        numbers=("Value",),
        notes=("Source", "Its date"),
        rows=[
            (
                _LABELS.get(name, name),
                _text(figure),
                figure.source,
                catalogue.sources[figure.source].date,
            )
            for name, figure in sheet.figures()
        ],
    )


def sheet_lines(sheet: DataSheet, catalogue: Catalogue) -> list[str]:
    """What the table does not hold."""
    names = ", ".join((sheet.id, *sheet.aliases, *sheet.reported))
    found = [f"names: {names}"]
    if sheet.link is not None:
        reach = "pairs joined by a bridge" if sheet.link_joins_pairs else "all devices of a node"
        found.append(f"link: {sheet.link_name}, {reach}")
    bf16 = sheet.peaks.get("bf16")
    if sheet.achieved is not None and bf16 is not None:
        share = sheet.achieved.flop_per_s / bf16.flop_per_s
        found.append(f"fastest measured product: {share:.0%} of the peak in bf16")
    if sheet.note:
        found.append(f"note: {sheet.note}")
    used = dict.fromkeys(figure.source for _, figure in sheet.figures())
    for key in used:
        source = catalogue.sources[key]
        found.append(f"{key}: {source.title} ({source.where})")
    return found


def devices_json(catalogue: Catalogue, sheet: DataSheet | None) -> dict[str, object]:
    """Plain values in SI units; one device, or all with the links."""
    chosen = catalogue.devices if sheet is None else (sheet,)
    written: dict[str, object] = {
        "schema_version": 1,
        "devices": [one.model_dump(mode="json", exclude_none=True) for one in chosen],
        "sources": {key: one.model_dump(mode="json") for key, one in catalogue.sources.items()},
    }
    if sheet is None:
        written["links"] = [link.model_dump(mode="json") for link in catalogue.links]
    return written


_LABELS: Final = {
    "achieved": "fastest bf16 product measured",
    "link": "link between devices",
    "pcie": "link to the host",
}


def _text(figure: Figure | None) -> str:
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
    return ""
