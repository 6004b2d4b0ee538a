"""The command that traces a model."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.checks import within
from perfmodel.cli.options import one_of
from perfmodel.cli.terminal import show_lines

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
    from perfmodel.cli.tracing import traced_document  # noqa: PLC0415
    from perfmodel.workload.step import StepMethod  # noqa: PLC0415

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
    from perfmodel.report.workload import trace_lines  # noqa: PLC0415 - keeps --help fast

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
