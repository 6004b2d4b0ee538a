"""Data sheets as tables, lines and JSON."""

from collections.abc import Callable
from typing import Final

from perfmodel.documents.hardware import Catalogue, DataSheet, Figure, Pcie, Peak, Power, Rate, Size
from perfmodel.report.tables import Table, table
from perfmodel.units import PREFIXES, format_bytes, format_rate

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
        "schema_version": 1,
        "devices": [one.model_dump(mode="json", exclude_none=True) for one in chosen],
        "sources": {key: one.model_dump(mode="json") for key, one in catalogue.sources.items()},
    }
    if sheet is None:
        written["links"] = [link.model_dump(mode="json") for link in catalogue.links]
    return written
