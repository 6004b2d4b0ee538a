"""The command that compares techniques of one device."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.memory import capacity, capacity_flag
from perfmodel.errors import NotFeasible, UsageError

if TYPE_CHECKING:
    from perfmodel.cost.techniques import HostLink


_WORKLOAD = typer.Option(help="Workload file, from perfmodel trace.")
_CAPACITY = typer.Option(help="Memory of one device, such as 80GiB; default: that of --device.")
_DEVICE = typer.Option(
    help="Device by its data sheet, such as h100-sxm (perfmodel devices); times are scaled to it."
)
_PROFILE = typer.Option(help="Profile, for times in seconds; needed.")
_BATCH = typer.Option(help="Samples per forward pass; default: as traced.")
_DEVICES = typer.Option(help="Devices of a DDP group.")
_KIND = typer.Option(help="cpu or cuda; default: that of --device, or the kind that was traced.")
_HOST_LINK = typer.Option(
    help="Between host and device, each way; default: PCIe of --device, or else PCIe 4, less 20 %."
)
_HOST_MEMORY = typer.Option(help="Host memory bandwidth of one device's share.")


def techniques(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: Annotated[Path, _WORKLOAD],
    device_memory: Annotated[str | None, _CAPACITY] = None,
    device: Annotated[str | None, _DEVICE] = None,
    profile: Annotated[Path | None, _PROFILE] = None,
    micro_batch: Annotated[int | None, _BATCH] = None,
    devices: Annotated[int, _DEVICES] = 1,
    device_kind: Annotated[str | None, _KIND] = None,
    host_link: Annotated[str | None, _HOST_LINK] = None,
    host_memory: Annotated[str, _HOST_MEMORY] = "40GB/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare mixed precision, accumulation, checkpointing, offload and streaming in time and memory."""
    capacity_bytes = capacity(device_memory, device)
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.memory_inputs import ask, report_of  # noqa: PLC0415
    from perfmodel.cost.memory import Verdict, verdict  # noqa: PLC0415
    from perfmodel.report.memory import technique_lines, techniques_table  # noqa: PLC0415

    link = _link(host_link, host_memory, device)
    if profile is None:
        # Transfers take seconds; shares of a step cannot be compared with them.
        raise UsageError(
            "--profile: techniques need times in seconds; give a profile from perfmodel calibrate, or use "
            "perfmodel memory for relative ones"
        )
    asked = ask(
        workload,
        profile=profile,
        micro_batch=micro_batch,
        devices=devices,
        device_kind=device_kind,
        link=link,
        device=device,
    )
    report = report_of(asked, capacity_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        from rich.console import Console  # noqa: PLC0415 - slow to import

        Console().print(techniques_table(report))
        for line in technique_lines(report):
            typer.echo(line)
    verdicts = {verdict(row.memory.fit_probability(capacity_bytes)) for row in report.techniques}
    if verdicts == {Verdict.DOES_NOT_FIT}:
        raise NotFeasible(
            f"{capacity_flag(device_memory)}: {asked.name} at micro-batch "
            f"{report.setting.micro_batch} fits into {device_memory or device} with none of "
            "the techniques; take a smaller batch or a larger device"
        )


def _link(host_link: str | None, host_memory: str, device: str | None) -> "HostLink":
    from perfmodel.cost.techniques import HostLink  # noqa: PLC0415 - numpy comes with it

    link_bytes_per_s = (
        _host_link_of(device) if host_link is None else _bandwidth("--host-link", host_link)
    )
    return HostLink(
        to_device_bytes_per_s=link_bytes_per_s,
        to_host_bytes_per_s=link_bytes_per_s,
        host_memory_bytes_per_s=_bandwidth("--host-memory", host_memory),
    )


def _host_link_of(device: str | None) -> float:
    from perfmodel.cli.devices import device_sheet  # noqa: PLC0415 - beside their use
    from perfmodel.cli.memory_inputs import DEFAULT_LINK  # noqa: PLC0415
    from perfmodel.hardware.catalogue import (  # noqa: PLC0415
        host_link_bytes_per_s,
        shipped_catalogue,
    )

    known = (
        None if device is None else host_link_bytes_per_s(device_sheet(device), shipped_catalogue())
    )
    return known or DEFAULT_LINK.to_device_bytes_per_s


def _bandwidth(flag: str, text: str) -> float:
    from perfmodel.units import parse_bandwidth  # noqa: PLC0415 - beside its use

    try:
        bytes_per_s = parse_bandwidth(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if bytes_per_s <= 0:
        raise UsageError(f"{flag}: must be > 0, got {text!r}")
    return bytes_per_s
