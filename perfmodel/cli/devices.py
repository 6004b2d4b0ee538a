"""The command that shows data sheets, and what ``--device`` means to others."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.terminal import show, show_lines

if TYPE_CHECKING:
    from perfmodel.documents.catalogue import DataSheet
    from perfmodel.documents.profile import ProfileDocument


def devices(
    name: Annotated[
        str | None,
        typer.Argument(help="Device by identifier, or as its driver reports it; default: all."),
    ] = None,
    *,
    links: Annotated[bool, typer.Option("--links", help="List links instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the data sheets of devices that need not be present, every figure with its source."""
    from perfmodel.hardware.catalogue import (  # noqa: PLC0415 - keeps --help fast
        find_device,
        shipped_catalogue,
    )
    from perfmodel.report.devices import (  # noqa: PLC0415
        devices_grid,
        devices_json,
        links_grid,
        sheet_grid,
        sheet_lines,
    )
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    catalogue = shipped_catalogue()
    sheet = None if name is None else find_device(name, catalogue, flag="DEVICE")
    if as_json:
        typer.echo(json.dumps(devices_json(catalogue, sheet), indent=1))
    elif links:
        show(rich_table(links_grid(catalogue)))
    elif sheet is None:
        show(rich_table(devices_grid(catalogue)))
    else:
        show(rich_table(sheet_grid(sheet, catalogue)))
        show_lines(sheet_lines(sheet, catalogue))


def device_sheet(name: str) -> "DataSheet":
    """The device of ``--device``.

    Raises
    ------
    UsageError
        If the catalogue does not know it, or knows several.
    """
    from perfmodel.hardware.catalogue import find_device, shipped_catalogue  # noqa: PLC0415

    return find_device(name, shipped_catalogue())


def on_device(profile: "ProfileDocument", sheet: "DataSheet | None") -> "ProfileDocument":
    """The profile, brought to another device if one is asked for."""
    if sheet is None:
        return profile
    from perfmodel.hardware.catalogue import shipped_catalogue  # noqa: PLC0415 - on demand
    from perfmodel.hardware.rescale import rescaled_profile  # noqa: PLC0415

    return rescaled_profile(profile, sheet, shipped_catalogue())
