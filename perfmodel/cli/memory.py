"""Commands about one step on one device: trace it, does it fit, what would make it fit; data sheets."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import show_answer, working
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.units import Bytes, format_bytes
from perfmodel.workload.step import (
    CHECKPOINTING,
    DEFAULT,
    DEVICE_KINDS,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    PRECISIONS,
)

if TYPE_CHECKING:
    from perfmodel.answer.memory import MemoryReport
    from perfmodel.documents.workload import WorkloadDocument
    from perfmodel.workload.step import StepMethod

_TRACED = typer.Option(
    help="Workload file, or a model to trace now: resnet50, torchvision:NAME, timm:NAME, FILE.py:FACTORY, a "
    "Hugging Face config.json."
)
_CAPACITY = opt.size(
    "--device-memory", "Memory of one device; default: that of --device, or of the machine's."
)
_BUCKET_VIEW = typer.Option(
    "--gradient-as-bucket-view", help="DDP's gradients live in its buckets."
)
_OPTIMIZER = opt.choice("--optimizer", tuple(OPTIMIZERS), "sgd (with momentum) or adamw.")
_PRECISION = opt.choice("--precision", PRECISIONS, "fp32, or autocast to bf16 or fp16.")


def memory(
    context: typer.Context,
    *,
    workload: Annotated[str, _TRACED],
    device_memory: Annotated[Bytes | None, _CAPACITY] = None,
    device: opt.Device = None,
    profile: opt.OptionalMachine = None,
    micro_batch: opt.MicroBatch = None,
    devices: opt.Devices = 1,
    bucket_view: Annotated[bool, _BUCKET_VIEW] = False,
    device_kind: opt.DeviceKind = None,
    optimizer: Annotated[str, _OPTIMIZER] = "sgd",
    precision: Annotated[str, _PRECISION] = "fp32",
    sequence_length: opt.SequenceLength = None,
) -> None:
    """Say whether a step fits into a device, the largest batch that does, and what to change first."""
    report = _report(context)
    show_answer(report.as_json(), report)
    if report.hopeless:
        size = format_bytes(report.capacity_bytes)
        given = (
            f"--device: {device or size}" if device_memory is None else f"--device-memory: {size}"
        )
        raise NotFeasible(
            f"{given}: not even one sample of {report.name} "
            "fits; see the table for what saves most, or take a larger device"
        )


def _report(context: typer.Context) -> "MemoryReport":
    """What is known of the memory of a step."""
    from perfmodel.answer.memory import report_of, sheet_of

    given = context.params
    profile, device, capacity_bytes = given["profile"], given["device"], given["device_memory"]
    machine = None if profile is None else opt.profiled(profile)
    sheet = sheet_of(device, machine)
    if capacity_bytes is None:
        if sheet is None:
            named = "" if machine is None else f"; {machine.device_name} has no data sheet"
            raise UsageError(
                f"--device-memory: must be given, such as 80GiB; or name a --device{named}"
            )
        capacity_bytes = sheet.memory.size_bytes
    document, trace_again = _document(
        context, as_on_cuda=sheet is not None and sheet.kind == "cuda"
    )
    return opt.asked(
        report_of,
        context,
        document=document,
        capacity_bytes=capacity_bytes,
        machine=None if machine is None else opt.converted(machine, device=device),
        sheet=sheet,
        trace_again=trace_again,
    )


def _document(
    context: typer.Context, *, as_on_cuda: bool
) -> "tuple[WorkloadDocument, Callable[[StepMethod], WorkloadDocument] | None]":
    """A workload file; or the trace of a model, and what traces it again; on a GPU's data sheet as a GPU runs it."""
    from perfmodel.documents.workload import WorkloadDocument
    from perfmodel.models import is_model_config, traced_document
    from perfmodel.workload.step import USUAL_METHOD

    given = context.params
    workload, optimizer, precision = given["workload"], given["optimizer"], given["precision"]
    path = Path(workload)
    is_stored = path.suffix == ".json" or (path.is_file() and path.suffix != ".py")
    if is_stored and not is_model_config(path):
        own = dict.fromkeys(("optimizer", "precision", "sequence_length"), "the file has its own")
        opt.refuse_typed(context, own, beside="a workload file")
        return WorkloadDocument.read(path), None
    method = replace(USUAL_METHOD, optimizer=optimizer, precision=precision)

    def traced(method: "StepMethod") -> WorkloadDocument:
        with working("trace"):
            names = {"model": workload, "where": "--workload"}
            return opt.asked(
                traced_document, context, method=method, as_on_cuda=as_on_cuda, **names
            )

    document = traced(method)
    trace = document.trace
    samples = given["micro_batch"] or trace.own_micro_batch or trace.traced_micro_batches[0]
    typer.echo(
        f"traced with {optimizer} in {precision} at micro-batch {samples}; --optimizer, --precision and "
        "--micro-batch take others",
        err=True,
    )
    return document, traced


_NAME = typer.Argument(help="Device by identifier, or as its driver reports it; default: all.")


def devices(
    name: Annotated[str | None, _NAME] = None,
    *,
    links: Annotated[bool, typer.Option("--links", help="List links instead.")] = False,
) -> None:
    """Show the data sheets of devices that need not be present, every figure with its source."""
    from perfmodel.documents.hardware import find_device, shipped_catalogue
    from perfmodel.report import memory as sheets

    catalogue = shipped_catalogue()
    sheet = None if name is None else find_device(name, catalogue, flag="DEVICE")
    lines: list[str] = []
    if links:
        table = sheets.links_table(catalogue)
    elif sheet is None:
        table = sheets.devices_table(catalogue)
    else:
        table, lines = sheets.sheet_table(sheet, catalogue), sheets.sheet_lines(sheet, catalogue)
    found = sheets.devices_json(catalogue, sheet)
    show_answer(found, tables=[table], lines=lines)


def machines(name: Annotated[str | None, typer.Argument(help="Show one.")] = None) -> None:
    """List the machines that come with perfmodel, used by name: --machine dgx-a100."""
    from perfmodel.documents.profile import ProfileDocument, shipped_machines
    from perfmodel.errors import refuse_unknown
    from perfmodel.report.profile import (
        device_cost_lines,
        machines_json,
        machines_table,
        measured_lines,
        profile_table,
    )

    shipped = shipped_machines()
    if name is not None:
        refuse_unknown("NAME", name, shipped)
    chosen = shipped if name is None else {name: shipped[name]}
    documents = {each: ProfileDocument.read(path) for each, path in chosen.items()}
    found = {each: document.machine for each, document in documents.items()}
    if name is None:
        tables, lines = [machines_table(found)], measured_lines(found)
    elif found[name].device_costs is None:
        tables, lines = [profile_table(documents[name])], []
    else:
        tables, lines = [], [*device_cost_lines(found[name])]
    show_answer(machines_json(found), tables=tables, lines=lines)


#: Far beyond any device: sizes of tensors must fit into 64 bits.
_size = opt.bounded(1, 2**24)
DEFAULT_FOLDER: Final = Path("runs/workloads")

_MODEL = typer.Argument(
    help="lenet, resnet18, mlp or transformer (reference models); a classification model of torchvision "
    "(torchvision:resnet18 where the name is taken); timm:NAME; FILE.py:FACTORY; a Hugging Face config.json."
)
_SAMPLES = _size(
    "--micro-batch",
    "Samples of one forward pass; default: the batch that comes with the model, else 8. The file "
    "serves other batches too.",
)
_TOKENS = _size("--sequence-length", "Tokens of one sample.")
_IMPLEMENTATION = opt.choice(
    "--optimizer-implementation",
    (DEFAULT, *IMPLEMENTATIONS),
    "loop, foreach or fused; default: what torch chooses on --device-kind (cpu: loop, cuda: foreach).",
)
_CHECKPOINTING = opt.choice(
    "--checkpointing", CHECKPOINTING, "Which activations are computed again."
)
_KERNELS = opt.choice(
    "--device-kind",
    DEVICE_KINDS,
    "Whose kernels: cpu or cuda; as-cuda, where there is no GPU: what a GPU would run, for --machine.",
)


def trace(
    context: typer.Context,
    model: Annotated[str, _MODEL],
    *,
    micro_batch: Annotated[int | None, _SAMPLES] = None,
    image_size: Annotated[int | None, _size("--image-size", "Pixels along each side.")] = None,
    sequence_length: Annotated[int | None, _TOKENS] = None,
    optimizer: Annotated[str, _OPTIMIZER] = "sgd",
    optimizer_implementation: Annotated[str, _IMPLEMENTATION] = DEFAULT,
    precision: Annotated[str, _PRECISION] = "fp32",
    checkpointing: Annotated[str, _CHECKPOINTING] = "none",
    device_kind: Annotated[str, _KERNELS] = "cpu",
    output: Annotated[
        Path | None, opt.file("--output", "Workload file; default runs/workloads/NAME.json.")
    ] = None,
) -> None:
    """Write a training step of a model as a workload file, without weights, data or GPU."""
    from perfmodel.models import traced_document
    from perfmodel.report.memory import trace_lines
    from perfmodel.workload.step import StepMethod

    as_on_cuda = device_kind == "as-cuda"
    kind = "cpu" if as_on_cuda else device_kind
    with working("trace"):
        method = opt.asked(StepMethod, context, device_kind=kind)
        document = opt.asked(traced_document, context, method=method, as_on_cuda=as_on_cuda)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", document.workload.name)
    path = output or DEFAULT_FOLDER / f"{name}.json"
    document.write(path)
    lines = trace_lines(document, as_on_cuda=as_on_cuda)
    show_answer(document, lines=lines, written={"workload": path})
