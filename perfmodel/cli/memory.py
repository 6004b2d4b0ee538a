"""Commands about the memory of one device: whether a step fits, and what would make it fit."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from perfmodel.checks import within
from perfmodel.cli.options import bandwidth_bytes_per_s, one_of, size_bytes
from perfmodel.cli.output import show, show_lines
from perfmodel.errors import NotFeasible, UsageError

if TYPE_CHECKING:
    from perfmodel.cost.techniques import HostLink

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
    from perfmodel.cli.memory_inputs import ask, report_of
    from perfmodel.report.memory import memory_lines, memory_table, remedies_table

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
    from perfmodel.cli.memory_inputs import ask, report_of
    from perfmodel.cost.memory import Verdict, verdict
    from perfmodel.report.memory import technique_lines, techniques_table

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
    if text is not None:
        return size_bytes("--device-memory", text)
    if device is None:
        raise UsageError("--device-memory: must be given, such as 80GiB; or name a --device")
    return device_sheet(device).memory.size_bytes


def _capacity_flag(device_memory: str | None) -> str:
    return "--device" if device_memory is None else "--device-memory"


def _link(host_link: str | None, host_memory: str, device: str | None) -> "HostLink":
    from perfmodel.cost.techniques import HostLink

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
    from perfmodel.cli.memory_inputs import DEFAULT_LINK
    from perfmodel.cost.rescaling import host_link_bytes_per_s, shipped_catalogue

    known = (
        None if device is None else host_link_bytes_per_s(device_sheet(device), shipped_catalogue())
    )
    return known or DEFAULT_LINK.to_device_bytes_per_s


if TYPE_CHECKING:
    from perfmodel.documents.hardware import DataSheet
    from perfmodel.machine.measured import MeasuredMachine


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
    from perfmodel.cost.rescaling import find_device, shipped_catalogue
    from perfmodel.report.devices import (
        devices_grid,
        devices_json,
        links_grid,
        sheet_grid,
        sheet_lines,
    )
    from perfmodel.report.tables import rich_table

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
    from perfmodel.cost.rescaling import find_device, shipped_catalogue

    return find_device(name, shipped_catalogue())


def on_device(profile: "MeasuredMachine", sheet: "DataSheet | None") -> "MeasuredMachine":
    """The profile, brought to another device if one is asked for."""
    if sheet is None:
        return profile
    from perfmodel.cost.rescaling import (
        rescaled_profile,
        shipped_catalogue,
    )

    return rescaled_profile(profile, sheet, shipped_catalogue())


if TYPE_CHECKING:
    from perfmodel.documents.workload import WorkloadDocument

#: Far beyond any device; sizes of tensors must fit into 64 bits.
MOST_OF_A_SIZE = 2**24
DEFAULT_FOLDER = Path("runs/workloads")

_MODEL = typer.Argument(
    help="lenet, resnet18, mlp or transformer (reference models); a classification model of torchvision "
    "(torchvision:resnet18 where the name is taken); FILE.py:FACTORY; a Hugging Face config.json."
)
_CHOICES = {
    "--optimizer": ("sgd", "adamw"),
    "--optimizer-implementation": ("loop", "foreach", "fused"),
    "--precision": ("fp32", "bf16", "fp16"),
    "--checkpointing": ("none", "full", "per-block"),
    "--device-kind": ("cpu", "cuda"),
}


def trace(  # noqa: PLR0913 - one parameter per flag
    model: Annotated[str, _MODEL],
    *,
    micro_batch: Annotated[
        int, typer.Option(help="Samples of one forward pass; the file serves other batches too.")
    ] = 8,
    image_size: Annotated[int | None, typer.Option(help="Pixels along each side.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one sample.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd (with momentum) or adamw.")] = "sgd",
    optimizer_implementation: Annotated[
        str, typer.Option(help="loop, foreach or fused.")
    ] = "foreach",
    precision: Annotated[str, typer.Option(help="fp32, or autocast to bf16 or fp16.")] = "fp32",
    checkpointing: Annotated[
        str, typer.Option(help="Compute activations again: none, full or per-block.")
    ] = "none",
    device_kind: Annotated[str, typer.Option(help="Whose kernels: cpu or cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Workload file; default runs/workloads/NAME.json.")
    ] = None,
) -> None:
    """Write a training step of a model as a workload file, without weights, data or GPU."""
    _check_choices(
        {
            "--optimizer": optimizer,
            "--optimizer-implementation": optimizer_implementation,
            "--precision": precision,
            "--checkpointing": checkpointing,
            "--device-kind": device_kind,
        }
    )
    _check_sizes(
        {
            "--micro-batch": micro_batch,
            "--image-size": image_size,
            "--sequence-length": sequence_length,
        }
    )
    # What follows imports torch.
    from perfmodel.cli.tracing import traced_document
    from perfmodel.workload.step import StepMethod

    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation=optimizer_implementation,
        precision=precision,
        checkpointing=checkpointing,
        device_kind=device_kind,
    )
    document = traced_document(
        model,
        method,
        micro_batch=micro_batch,
        image_size=image_size,
        sequence_length=sequence_length,
        argv=sys.argv,
    )
    _show_and_write(document, output, micro_batch=micro_batch)


def _show_and_write(document: "WorkloadDocument", output: Path | None, *, micro_batch: int) -> None:
    from perfmodel.report.memory import trace_lines

    show_lines(trace_lines(document, micro_batch=micro_batch))
    path = (
        output
        or DEFAULT_FOLDER / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', document.workload.name)}.json"
    )
    document.write(path)
    typer.echo(f"workload: {path}")


def _check_choices(chosen: dict[str, str]) -> None:
    for flag, value in chosen.items():
        one_of(flag, value, _CHOICES[flag])


def _check_sizes(sizes: dict[str, int | None]) -> None:
    for flag, number in sizes.items():
        if number is not None:
            within(f"{flag}:", number, 1, MOST_OF_A_SIZE)
