"""Commands about the memory of one device: whether a step fits, and what would make it fit."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from perfmodel.cli.options import bandwidth_bytes_per_s, size_bytes
from perfmodel.cli.terminal import show, show_lines
from perfmodel.errors import NotFeasible, UsageError

if TYPE_CHECKING:
    from perfmodel.cost.technique_times import HostLink

_Workload: TypeAlias = Annotated[Path, typer.Option(help="Workload file, from perfmodel trace.")]
_Capacity: TypeAlias = Annotated[
    str | None, typer.Option(help="Memory of one device, such as 80GiB; default: that of --device.")
]
_Device: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Device by its data sheet, such as h100-sxm; a profile is scaled to it."),
]
_MicroBatch: TypeAlias = Annotated[
    int | None, typer.Option(help="Samples per forward pass; default: the batch that was traced.")
]
_Devices: TypeAlias = Annotated[
    int, typer.Option(help="Devices of a DDP group; more than one adds its buckets.")
]
_Kind: TypeAlias = Annotated[
    str | None,
    typer.Option(help="cpu or cuda; default: that of --device, or the kind that was traced."),
]
_AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_RELATIVE = typer.Option(help="Profile, for times in seconds; without it they are relative.")
_SECONDS = typer.Option(help="Profile, for times in seconds; needed.")
_LINK = typer.Option(
    help="Between host and device, each way; default: PCIe of --device, or else PCIe 4, less 20 %."
)
_HOST_MEMORY = typer.Option(help="Host memory bandwidth of one device's share.")


def memory(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: _Workload,
    device_memory: _Capacity = None,
    device: _Device = None,
    profile: Annotated[Path | None, _RELATIVE] = None,
    micro_batch: _MicroBatch = None,
    devices: _Devices = 1,
    bucket_view: Annotated[
        bool, typer.Option("--gradient-as-bucket-view", help="DDP's gradients live in its buckets.")
    ] = False,
    device_kind: _Kind = None,
    as_json: _AsJson = False,
) -> None:
    """Say whether a step fits into a device, the largest batch that does, and what to change first."""
    capacity_bytes = _capacity_bytes(device_memory, device)
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
        show(memory_table(report))
        show_lines(memory_lines(report))
        show(remedies_table(report))
    if report.hopeless:
        raise NotFeasible(
            f"{_capacity_flag(device_memory)}: not even one sample of {asked.name} fits into "
            f"{device_memory or device}; "
            "see the table for what saves most, or take a larger device"
        )


def techniques(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: _Workload,
    device_memory: _Capacity = None,
    device: _Device = None,
    profile: Annotated[Path | None, _SECONDS] = None,
    micro_batch: _MicroBatch = None,
    devices: _Devices = 1,
    device_kind: _Kind = None,
    host_link: Annotated[str | None, _LINK] = None,
    host_memory: Annotated[str, _HOST_MEMORY] = "40GB/s",
    as_json: _AsJson = False,
) -> None:
    """Compare mixed precision, accumulation, checkpointing, offload and streaming in time and memory."""
    capacity_bytes = _capacity_bytes(device_memory, device)
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
        device=device,
        link=link,
    )
    report = report_of(asked, capacity_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        show(techniques_table(report))
        show_lines(technique_lines(report))
    verdicts = {verdict(row.memory.fit_probability(capacity_bytes)) for row in report.techniques}
    if verdicts == {Verdict.DOES_NOT_FIT}:
        raise NotFeasible(
            f"{_capacity_flag(device_memory)}: {asked.name} at micro-batch "
            f"{report.setting.micro_batch} fits into {device_memory or device} with none of the "
            "techniques; take a smaller batch or a larger device"
        )


def _capacity_bytes(text: str | None, device: str | None) -> int:
    """Memory of a device: as given, or else by its data sheet."""
    from perfmodel.cli.devices import device_sheet  # noqa: PLC0415 - beside its use

    if text is not None:
        return size_bytes("--device-memory", text)
    if device is None:
        raise UsageError("--device-memory: must be given, such as 80GiB; or name a --device")
    return device_sheet(device).memory.size_bytes


def _capacity_flag(device_memory: str | None) -> str:
    return "--device" if device_memory is None else "--device-memory"


def _link(host_link: str | None, host_memory: str, device: str | None) -> "HostLink":
    from perfmodel.cost.technique_times import HostLink  # noqa: PLC0415 - numpy comes with it

    link_bytes_per_s = (
        _host_link_of(device)
        if host_link is None
        else bandwidth_bytes_per_s("--host-link", host_link)
    )
    return HostLink(
        to_device_bytes_per_s=link_bytes_per_s,
        to_host_bytes_per_s=link_bytes_per_s,
        host_memory_bytes_per_s=bandwidth_bytes_per_s("--host-memory", host_memory),
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
