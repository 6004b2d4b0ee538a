"""Commands about the memory of one device: whether a step fits, and what would make it fit."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from perfmodel.cli.options import bandwidth_bytes_per_s, size_bytes
from perfmodel.cli.terminal import show
from perfmodel.errors import NotFeasible, UsageError

if TYPE_CHECKING:
    from perfmodel.cost.techniques import HostLink

_Workload: TypeAlias = Annotated[Path, typer.Option(help="Workload file, from perfmodel trace.")]
_Capacity: TypeAlias = Annotated[str, typer.Option(help="Memory of one device, such as 80GiB.")]
_MicroBatch: TypeAlias = Annotated[
    int | None, typer.Option(help="Samples per forward pass; default: the batch that was traced.")
]
_Devices: TypeAlias = Annotated[
    int, typer.Option(help="Devices of a DDP group; more than one adds its buckets.")
]
_Kind: TypeAlias = Annotated[
    str | None, typer.Option(help="cpu or cuda; default: the kind that was traced.")
]
_AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_RELATIVE = typer.Option(help="Profile, for times in seconds; without it they are relative.")
_SECONDS = typer.Option(help="Profile, for times in seconds; needed.")
_LINK = typer.Option(help="Between host and device, each way; data-sheet PCIe 4, less 20 %.")
_HOST_MEMORY = typer.Option(help="Host memory bandwidth of one device's share.")


def memory(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: _Workload,
    device_memory: _Capacity,
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
    capacity_bytes = size_bytes("--device-memory", device_memory)
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
    )
    report = report_of(asked, capacity_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        show(memory_table(report))
        for line in memory_lines(report):
            typer.echo(line)
        show(remedies_table(report))
    if report.hopeless:
        raise NotFeasible(
            f"--device-memory: not even one sample of {asked.name} fits into {device_memory}; "
            "see the table for what saves most, or take a larger device"
        )


def techniques(  # noqa: PLR0913 - one parameter per flag
    *,
    workload: _Workload,
    device_memory: _Capacity,
    profile: Annotated[Path | None, _SECONDS] = None,
    micro_batch: _MicroBatch = None,
    devices: _Devices = 1,
    device_kind: _Kind = None,
    host_link: Annotated[str, _LINK] = "25GB/s",
    host_memory: Annotated[str, _HOST_MEMORY] = "40GB/s",
    as_json: _AsJson = False,
) -> None:
    """Compare mixed precision, accumulation, checkpointing, offload and streaming in time and memory."""
    capacity_bytes = size_bytes("--device-memory", device_memory)
    # What follows imports numpy and pydantic: too slow for --help.
    from perfmodel.cli.memory_inputs import ask, report_of  # noqa: PLC0415
    from perfmodel.cost.memory import Verdict, verdict  # noqa: PLC0415
    from perfmodel.report.memory import technique_lines, techniques_table  # noqa: PLC0415

    link = _link(host_link, host_memory)
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
    )
    report = report_of(asked, capacity_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        show(techniques_table(report))
        for line in technique_lines(report):
            typer.echo(line)
    verdicts = {verdict(row.memory.fit_probability(capacity_bytes)) for row in report.techniques}
    if verdicts == {Verdict.DOES_NOT_FIT}:
        raise NotFeasible(
            f"--device-memory: {asked.name} at micro-batch {report.setting.micro_batch} fits into "
            f"{device_memory} with none of the techniques; take a smaller batch or a larger device"
        )


def _link(host_link: str, host_memory: str) -> "HostLink":
    from perfmodel.cost.techniques import HostLink  # noqa: PLC0415 - numpy comes with it

    link_bytes_per_s = bandwidth_bytes_per_s("--host-link", host_link)
    return HostLink(
        to_device_bytes_per_s=link_bytes_per_s,
        to_host_bytes_per_s=link_bytes_per_s,
        host_memory_bytes_per_s=bandwidth_bytes_per_s("--host-memory", host_memory),
    )
