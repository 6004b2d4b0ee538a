"""``perfmodel validate`` and its sub-commands: fresh runs that judge the predictions."""

import os
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE, micro_batches
from perfmodel.cli.progress import shown_progress
from perfmodel.errors import OutOfTolerance, UsageError

DEFAULT_VALIDATION = Path("runs/validation")
DEFAULT_MODELS_VALIDATION = Path("runs/models")
DEFAULT_MEMORY_VALIDATION = Path("runs/memory/validation.json")


def validate(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    *,
    profile: Annotated[Path, typer.Option(help="Profile to judge.")] = DEFAULT_PROFILE,
    budget: Annotated[str, typer.Option(help="quick or standard.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for observations and the verdict.")] = (
        DEFAULT_VALIDATION
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted validation in the folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of runs.")] = 1,
    earlier: Annotated[
        Path | None, typer.Option(help="An earlier validation, whose errors widen the intervals.")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(help="Nodes; start the command on each.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Rank of this node.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of node 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on node 0.")] = None,
) -> None:
    """Run settings that calibration never used and print the tool's own error."""
    if context.invoked_subcommand is not None:
        return
    from calibrate.launch import (  # noqa: PLC0415
        LaunchFlags,
        TorchrunLauncher,
        supervises,
        terminate_as_interrupt,
    )
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.documents.validation import ValidationDocument  # noqa: PLC0415
    from perfmodel.report.tables import summary_lines, validation_table  # noqa: PLC0415
    from validate import validate as use_case  # noqa: PLC0415

    if not supervises(os.environ):
        return
    request = use_case.ValidationRequest(
        profile=ProfileDocument.read(profile),
        folder=out,
        budget=budget,
        seed=seed,
        resume=resume,
        flags=LaunchFlags(
            nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
        ),
        earlier=None if earlier is None else ValidationDocument.read(earlier),
    )
    with terminate_as_interrupt(), shown_progress("validate") as on_progress:
        document = use_case.validate(request, TorchrunLauncher(), on_progress=on_progress)
    _print(validation_table(document))
    for line in summary_lines(document):
        typer.echo(line)
    typer.echo(f"validation: {out / use_case.VALIDATION}")
    if not document.passed:
        failed = ", ".join(gate.name for gate in document.gates if not gate.passed)
        raise OutOfTolerance(
            f"validate: out of tolerance: {failed}; see the table for where, "
            "and perfmodel doctor for what may have disturbed the runs"
        )


def models(
    *,
    profile: Annotated[Path, typer.Option(help="Profile to judge.")] = DEFAULT_PROFILE,
    mode: Annotated[
        str,
        typer.Option(
            help="measured: the models' own operators, timed in place; curves: calibrated curves alone."
        ),
    ] = "measured",
    budget: Annotated[str, typer.Option(help="quick or standard.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for observations and the verdict.")] = (
        DEFAULT_MODELS_VALIDATION
    ),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue, or judge again what was measured, such as in the other mode.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of runs.")] = 1,
) -> None:
    """Run models that no fit has seen and print the error of what their traces predict."""
    from calibrate.launch import (  # noqa: PLC0415
        TorchrunLauncher,
        supervises,
        terminate_as_interrupt,
    )
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.report.models import models_lines, models_table  # noqa: PLC0415
    from validate import models as use_case  # noqa: PLC0415

    if not supervises(os.environ):
        return
    if mode not in ("measured", "curves"):
        raise UsageError(f"--mode: must be measured or curves, got {mode!r}")
    request = use_case.ModelsRequest(
        profile=ProfileDocument.read(profile),
        folder=out,
        mode="measured" if mode == "measured" else "curves",
        budget=budget,
        seed=seed,
        resume=resume,
    )
    with terminate_as_interrupt(), shown_progress("validate") as on_progress:
        document = use_case.validate_models(request, TorchrunLauncher(), on_progress=on_progress)
    _print(models_table(document))
    for line in models_lines(document):
        typer.echo(line)
    typer.echo(f"validation: {out / use_case.file_name(request.mode)}")
    if not document.passed:
        failed = ", ".join(gate.name for gate in document.gates if not gate.passed)
        raise OutOfTolerance(
            f"validate models: out of tolerance: {failed}; see the table for where"
        )


def memory(
    *,
    models: Annotated[
        str,
        typer.Option(help="Models, separated by commas; default: fourteen, LeNet to ResNet-152."),
    ] = "",
    batches: Annotated[str, typer.Option(help="Micro-batches, separated by commas.")] = "2,4",
    out: Annotated[Path, typer.Option(help="File of all runs.")] = DEFAULT_MEMORY_VALIDATION,
) -> None:
    """Train models for real and compare the allocator's peak with what their traces predict."""
    from validate.memory import MODELS, validate_memory, verdict  # noqa: PLC0415

    names = [name.strip() for name in models.split(",") if name.strip()]
    summary = validate_memory(
        names or MODELS, micro_batches("--batches", batches), out=out, on_line=typer.echo
    )
    typer.echo(verdict(summary))
    typer.echo(f"validation: {out}")
    if not summary.passed:
        raise OutOfTolerance("validate memory: out of tolerance; see the lines above for where")


def _print(renderable: object) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import

    Console().print(renderable)
