"""``perfmodel validate`` and its sub-commands: fresh runs that judge the predictions."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import (
    MasterAddress,
    MasterPort,
    NodeRank,
    Nodes,
    OrderSeed,
    Patience,
    ProfileToJudge,
    Resume,
    names,
    one_of,
    patience_s,
    whole_numbers,
)
from perfmodel.cli.progress import measurement
from perfmodel.cli.terminal import refuse_failed_gates, show, show_lines

DEFAULT_VALIDATION = Path("runs/validation")
DEFAULT_BATCH_VALIDATION = Path("runs/batch")
DEFAULT_MODELS_VALIDATION = Path("runs/models")
DEFAULT_MEMORY_VALIDATION = Path("runs/memory/validation.json")


def validate(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    *,
    profile: ProfileToJudge = DEFAULT_PROFILE,
    budget: Annotated[str, typer.Option(help="quick or standard.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for observations and the verdict.")] = (
        DEFAULT_VALIDATION
    ),
    resume: Resume = False,
    patience: Patience = None,
    seed: OrderSeed = 1,
    earlier: Annotated[
        Path | None, typer.Option(help="An earlier validation, whose errors widen the intervals.")
    ] = None,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddress = None,
    master_port: MasterPort = None,
) -> None:
    """Run settings that calibration never used and print the tool's own error."""
    if context.invoked_subcommand is not None:
        return
    from calibrate.launch import TorchrunLauncher  # noqa: PLC0415 - keeps predict fast
    from calibrate.topology import LaunchFlags  # noqa: PLC0415 - keeps predict fast
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.documents.validation import ValidationDocument  # noqa: PLC0415
    from perfmodel.report.tables import summary_lines, validation_table  # noqa: PLC0415
    from validate import validate as use_case  # noqa: PLC0415

    request = use_case.ValidationRequest(
        profile=ProfileDocument.read(profile),
        folder=out,
        budget=budget,
        seed=seed,
        resume=resume,
        patience_s=patience_s(patience),
        flags=LaunchFlags(
            nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
        ),
        earlier=None if earlier is None else ValidationDocument.read(earlier),
    )
    with measurement("validate") as on_progress:
        document = use_case.validate(request, TorchrunLauncher(), on_progress=on_progress)
    show(validation_table(document))
    show_lines([*summary_lines(document), f"validation: {out / use_case.VALIDATION}"])
    refuse_failed_gates(
        "validate",
        document.gates,
        see="the table for where, and perfmodel doctor for what may have disturbed the runs",
    )


def models(  # noqa: PLR0913 - one parameter per flag
    *,
    profile: ProfileToJudge = DEFAULT_PROFILE,
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
    patience: Patience = None,
    seed: OrderSeed = 1,
) -> None:
    """Run models that no fit has seen and print the error of what their traces predict."""
    from calibrate.launch import TorchrunLauncher  # noqa: PLC0415 - keeps predict fast
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.report.models import models_lines, models_table  # noqa: PLC0415
    from validate import models as use_case  # noqa: PLC0415

    chosen: use_case.Mode = one_of("--mode", mode, get_args(use_case.Mode))
    request = use_case.ModelsRequest(
        profile=ProfileDocument.read(profile),
        folder=out,
        mode=chosen,
        budget=budget,
        seed=seed,
        resume=resume,
        patience_s=patience_s(patience),
    )
    with measurement("validate") as on_progress:
        document = use_case.validate_models(request, TorchrunLauncher(), on_progress=on_progress)
    show(models_table(document))
    show_lines([*models_lines(document), f"validation: {out / use_case.file_name(request.mode)}"])
    refuse_failed_gates("validate models", document.gates)


def batch(
    *,
    profile: ProfileToJudge = DEFAULT_PROFILE,
    workload: Annotated[
        str, typer.Option(help="Model whose noise scale was calibrated.")
    ] = "lenet",
    budget: Annotated[
        str,
        typer.Option(help="quick, standard or thorough: about 4, 10 or 90 minutes for lenet."),
    ] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for observations and the verdict.")] = (
        DEFAULT_BATCH_VALIDATION
    ),
    resume: Resume = False,
    seed: Annotated[int, typer.Option(help="Seed of the trainings.")] = 1,
) -> None:
    """Train to a target at several batches and print the error of predicted steps."""
    from calibrate.launch import TorchrunLauncher  # noqa: PLC0415 - keeps predict fast
    from perfmodel.documents.profile import ProfileDocument  # noqa: PLC0415
    from perfmodel.report.batch import judged_grid, judged_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from validate import batch as use_case  # noqa: PLC0415

    request = use_case.BatchRequest(
        profile=ProfileDocument.read(profile),
        folder=out,
        workload=workload,
        budget=budget,
        seed=seed,
        resume=resume,
    )
    with measurement("validate") as on_progress:
        document = use_case.validate_batch(request, TorchrunLauncher(), on_progress=on_progress)
    show(rich_table(judged_grid(document)))
    show_lines([*judged_lines(document), f"validation: {out / use_case.VALIDATION}"])


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

    micro_batches = whole_numbers("--batches", batches)
    chosen = names(models) or MODELS
    if unfamiliar := [name for name in chosen if name not in MODELS]:
        from perfmodel.cli.tracing import refuse_unknown_models  # noqa: PLC0415 - torch

        refuse_unknown_models("--models", unfamiliar, known=MODELS)
    with measurement("validate memory"):
        summary = validate_memory(
            chosen, micro_batches, out=out, on_line=lambda line: show_lines([line])
        )
    show_lines([*verdict(summary), f"validation: {out}"])
    refuse_failed_gates("validate memory", summary.gates, see="the lines above for where")
