"""Commands that measure: doctor, calibrate, fit, validate. They import torch-side code lazily."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.progress import shown_progress
from perfmodel.errors import OutOfTolerance, UsageError

DEFAULT_CALIBRATION = Path("runs/calibration")
DEFAULT_PROFILE = DEFAULT_CALIBRATION / "profile.json"
DEFAULT_VALIDATION = Path("runs/validation")


def doctor() -> None:
    """Say what this machine is, and what would spoil a measurement."""
    from calibrate.doctor import diagnose, render  # noqa: PLC0415 - keeps predict fast
    from calibrate.environment import describe_environment, torch_facts  # noqa: PLC0415

    environment = describe_environment(torch_facts() if find_spec("torch") else None)
    typer.echo(render(diagnose(environment), environment=environment))


def calibrate(  # noqa: PLR0913 - one parameter per flag
    *,
    budget: Annotated[
        str, typer.Option(help="quick, standard or thorough: about 2, 10 or 30 minutes.")
    ] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for raw observations and the profile.")] = (
        DEFAULT_CALIBRATION
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: Annotated[
        int | None, typer.Option(help="Ranks per node; default: every GPU, or every core up to 8.")
    ] = None,
    models: Annotated[
        str, typer.Option(help="Reference models to run, separated by commas.")
    ] = "lenet,resnet18,mlp,transformer",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted calibration in the folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of measurements.")] = 0,
    nnodes: Annotated[int | None, typer.Option(help="Nodes; start the command on each.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Rank of this node.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of node 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on node 0.")] = None,
    from_runs: Annotated[
        Path | None, typer.Option(help="Measure nothing: infer from the step times of a CSV.")
    ] = None,
    columns: Annotated[
        Path | None, typer.Option(help="TOML: names, units, constants of that CSV.")
    ] = None,
    device_type: Annotated[
        str, typer.Option(help="Device of those runs: A100, H100, V100 or B200.")
    ] = "A100",
) -> None:
    """Measure this machine by real training and write its profile."""
    if from_runs is not None:
        _infer(from_runs, columns=columns, device=device_type, out=out, seed=seed)
        return
    if columns is not None:
        raise UsageError("--columns: only with --from-runs")
    from calibrate import calibrate as use_case  # noqa: PLC0415 - keeps predict fast
    from calibrate.launch import (  # noqa: PLC0415
        LaunchFlags,
        TorchrunLauncher,
        supervises,
        terminate_as_interrupt,
    )
    from perfmodel.report.tables import profile_table  # noqa: PLC0415

    if not supervises(os.environ):
        return
    request = use_case.CalibrationRequest(
        folder=out,
        budget=budget,
        device=device,
        models=tuple(name.strip() for name in models.split(",") if name.strip()),
        flags=LaunchFlags(
            nnodes=nnodes,
            nproc_per_node=nproc,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
        ),
        seed=seed,
        resume=resume,
    )
    with terminate_as_interrupt(), shown_progress("calibrate") as on_progress:
        profile = use_case.calibrate(request, TorchrunLauncher(), on_progress=on_progress)
    _print(profile_table(profile))
    typer.echo(f"profile: {out / use_case.PROFILE}")


def _infer(table: Path, *, columns: Path | None, device: str, out: Path, seed: int) -> None:
    from calibrate.runs import calibrate_from_runs  # noqa: PLC0415 - keeps --help fast

    document = calibrate_from_runs(table, columns=columns, device=device, seed=seed)
    for latent in document.latents:
        told = "determined" if latent.determined else "prior kept, the runs do not tell"
        typer.echo(
            f"{latent.name:20} {latent.value:10.4g}  x/ {2.718 ** (1.645 * latent.log_sigma):.2f}"
            f"  {told}: {latent.meaning}"
        )
    document.write(out / "inferred.json")
    typer.echo(f"inferred from {document.num_runs} runs: {out / 'inferred.json'}")


def fit(
    folder: Annotated[Path, typer.Argument(help="Folder of a calibration.")] = DEFAULT_CALIBRATION,
) -> None:
    """Fit the profile anew from the raw observations in a folder."""
    from calibrate import calibrate as use_case  # noqa: PLC0415 - keeps predict fast
    from perfmodel.report.tables import profile_table  # noqa: PLC0415

    _print(profile_table(use_case.refit(folder)))
    typer.echo(f"profile: {folder / use_case.PROFILE}")


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
) -> None:
    """Run settings that calibration never used and print the tool's own error."""
    if context.invoked_subcommand is not None:
        return
    from calibrate.launch import (  # noqa: PLC0415
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


def _print(renderable: object) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import

    Console().print(renderable)
