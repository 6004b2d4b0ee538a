"""The command that says whether a step fits into a device."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.errors import NotFeasible, UsageError

_WORKLOAD = typer.Option(help="Workload file, from perfmodel trace.")
_CAPACITY = typer.Option(help="Memory of one device, such as 80GiB; default: that of --device.")
_DEVICE = typer.Option(
    help="Device by its data sheet, such as h100-sxm (perfmodel devices); a profile is scaled to it."
)
_BATCH = typer.Option(help="Samples per forward pass; default: the batch that was traced.")
_DEVICES = typer.Option(help="Devices of a DDP group; more than one adds its buckets.")
_PROFILE = typer.Option(help="Profile, for times in seconds; without it they are relative.")
_KIND = typer.Option(help="cpu or cuda; default: that of --device, or the kind that was traced.")


def memory(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: Annotated[Path, _WORKLOAD],
    device_memory: Annotated[str | None, _CAPACITY] = None,
    device: Annotated[str | None, _DEVICE] = None,
    profile: Annotated[Path | None, _PROFILE] = None,
    micro_batch: Annotated[int | None, _BATCH] = None,
    devices: Annotated[int, _DEVICES] = 1,
    bucket_view: Annotated[
        bool, typer.Option("--gradient-as-bucket-view", help="DDP's gradients live in its buckets.")
    ] = False,
    device_kind: Annotated[str | None, _KIND] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a step fits into a device, the largest batch that does, and what to change first."""
    capacity_bytes = capacity(device_memory, device)
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.memory_inputs import ask, report_of  # noqa: PLC0415
    from perfmodel.report.memory import memory_lines, memory_table, remedies_table  # noqa: PLC0415

    asked = ask(
        workload,
        profile=profile,
        micro_batch=micro_batch,
        devices=devices,
        bucket_view=bucket_view,
        device_kind=device_kind,
        device=device,
    )
    report = report_of(asked, capacity_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        from rich.console import Console  # noqa: PLC0415 - slow to import

        console = Console()
        console.print(memory_table(report))
        for line in memory_lines(report):
            typer.echo(line)
        console.print(remedies_table(report))
    if report.hopeless:
        raise NotFeasible(
            f"{capacity_flag(device_memory)}: not even one sample of {asked.name} fits into "
            f"{device_memory or device}; "
            "see the table for what saves most, or take a larger device"
        )


def capacity(text: str | None, device: str | None) -> int:
    """Bytes of a device: as given, or else by its data sheet.

    Raises
    ------
    UsageError
        If the text has no known unit or is not above zero, the device is unknown, or neither is given.
    """
    from perfmodel.cli.devices import device_sheet  # noqa: PLC0415 - beside their use
    from perfmodel.units import parse_bytes  # noqa: PLC0415

    if text is None:
        if device is None:
            raise UsageError("--device-memory: must be given, such as 80GiB; or name a --device")
        return device_sheet(device).memory.size_bytes
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--device-memory: {error}") from None
    if size_bytes <= 0:
        raise UsageError(f"--device-memory: must be > 0, got {text!r}")
    return size_bytes


def capacity_flag(device_memory: str | None) -> str:
    """The flag that gave the capacity, for messages."""
    return "--device" if device_memory is None else "--device-memory"
