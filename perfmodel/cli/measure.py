"""Commands that measure: doctor, calibrate, fit. They import torch-side code lazily."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import printing, show_answer, show_progress, working
from perfmodel.cli.progress import measurement
from perfmodel.errors import MeasurementFailed, UsageError
from perfmodel.units import MINUTE_S, Seconds, format_duration

if TYPE_CHECKING:
    from validate.borrowed import BorrowedRequest

#: A borrowed machine is often lent for ten minutes. [s]
_CAMPAIGN_S: Final[Seconds] = 9 * MINUTE_S

_BUDGET = typer.Option(help="quick, standard or thorough: about 3, 9 or 40 minutes.")
_MODELS = opt.names(
    "--models",
    "Reference models to run, separated by commas; default: those that suit the device.",
)
_FROM_RUNS = opt.file(
    "--from-runs",
    "Measure nothing: infer from step times: CSV, run records (.jsonl), MLPerf log, or a folder "
    "of them.",
)
_FROM_STEPS = opt.file(
    "--from-steps",
    "Measure nothing: infer the costs of --device from step times of models: CSV with model, batch, precision, "
    "step_time_s; image, sequence, memory_format, optimizer, torch as needed.",
)
_COLUMNS = opt.file("--columns", "With --from-runs, TOML: names, units, constants of those runs.")
_RUNS_OF = typer.Option(
    help="With --from-runs or --from-steps, the device: A100, H100, V100, B200 (perfmodel devices)."
)
_CAMPAIGN = opt.file(
    "--campaign",
    "Folder: everything that a borrowed device is asked, in one go: smoke test, quick calibration, held-out "
    "runs, an archive to take home. Repeat the command to go on.",
)
_MINUTES = opt.minutes("With --campaign: how long it may take; default: 9.")


def doctor() -> None:
    """Say what this machine is, and what would spoil a measurement."""
    from calibrate.doctor import diagnose, render
    from calibrate.environment import describe_environment, torch_facts
    from calibrate.gpus import faults_now, problem

    torch = torch_facts() if find_spec("torch") else None
    environment = describe_environment(torch=torch)
    environment["gpu_faults"] = faults_now()
    if torch is not None:
        environment["gpu_problem"] = problem(torch)
    found = diagnose(environment)
    lines = render(found, environment=environment).splitlines()
    written = {"findings": found, "environment": environment}
    show_answer(written, lines=lines)


_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
_MEASURED = dict.fromkeys(
    ("budget", "device_kind", "truth", "nproc", "models", *_NODES, "resume"),
    "leave it out, nothing is measured",
)
_ORDER = {"seed": "leave it out, the order of measurements is fixed"}
#: Parts of a calibration, with what each would ignore.
_PARTS = {
    "from_runs": _MEASURED,
    "from_steps": _MEASURED | _ORDER | {"columns": "leave it out, headings are fixed"},
    "campaign": {
        "out": "leave it out, --campaign names the folder",
        "budget": "leave it out, a campaign is quick",
        "resume": "leave it out, the same command goes on where it ended",
        **dict.fromkeys(_NODES, "leave it out, a campaign runs on one node"),
    }
    | _ORDER,
}
_OF_RUNS = ("columns", "device")
_TABLES = ("--from-runs", "--from-steps")


def calibrate(
    context: typer.Context,
    *,
    budget: Annotated[str, _BUDGET] = "standard",
    out: opt.Folder = opt.DEFAULT_CALIBRATION,
    device_kind: opt.WhichDevice = "auto",
    truth: opt.Truth = None,
    nproc: opt.RanksPerNode = None,
    models: Annotated[Sequence[str] | None, _MODELS] = None,
    campaign: Annotated[Path | None, _CAMPAIGN] = None,
    minutes: Annotated[Seconds | None, _MINUTES] = None,
    resume: opt.Resume = False,
    seed: opt.Seed = 0,
    nnodes: opt.NumNodes = None,
    node_rank: opt.NodeRank = None,
    master_addr: opt.MasterAddress = None,
    master_port: opt.MasterPort = None,
    from_runs: Annotated[Path | None, _FROM_RUNS] = None,
    from_steps: Annotated[Path | None, _FROM_STEPS] = None,
    columns: Annotated[Path | None, _COLUMNS] = None,
    device: Annotated[str, _RUNS_OF] = "A100",
) -> None:
    """Measure this machine by real training and write its profile."""
    _refuse_ignored(context)
    opt.refuse_unlike_truth(device_kind, truth)
    if minutes is not None and campaign is None:
        raise UsageError("--minutes: must come with --campaign, got it alone")
    if campaign is not None:
        from validate.borrowed import BorrowedRequest

        asked = opt.asked(
            BorrowedRequest,
            context,
            folder=campaign,
            limit_s=_CAMPAIGN_S if minutes is None else minutes,
            device=device_kind,
            num_ranks=nproc,
            models=models or (),
        )
        _borrow(asked)
        return
    if from_runs is not None:
        _infer(from_runs, columns=columns, device=device, out=out, seed=seed)
        return
    if from_steps is not None:
        _infer_steps(from_steps, device=device, out=out)
        return
    from calibrate import calibrate as whole
    from calibrate.launch import LaunchFlags, TorchrunLauncher

    request = opt.asked(
        whole.CalibrationRequest,
        context,
        folder=out,
        device=device_kind,
        flags=opt.asked(LaunchFlags, context, nproc_per_node=nproc),
    )
    with measurement("calibrate") as on_progress:
        profile = whole.calibrate(request, TorchrunLauncher(), on_progress=on_progress)
    show_answer(profile, written={"profile": out / whole.PROFILE})


def _borrow(request: "BorrowedRequest") -> None:
    """Run a campaign, and print the verdict that its archive gives at home."""
    from calibrate.launch import TorchrunLauncher
    from perfmodel.cli.validate import show_archive
    from validate import borrowed

    with measurement("calibrate"):
        campaign, archive = borrowed.carry_out(
            request, TorchrunLauncher(worker_module=borrowed.SMOKE), on_line=show_progress
        )
    unfinished = borrowed.unfinished(request, campaign)
    show_archive(archive, fails=not unfinished)
    typer.echo(f"archive: {archive}", err=printing.get().as_json)
    if unfinished:
        raise MeasurementFailed(
            f"--campaign: stages must be done within {format_duration(request.limit_s)}, got no end of "
            f"{', '.join(unfinished)}; see {request.folder}/*.txt and repeat the command to go on"
        )


def _refuse_ignored(context: typer.Context) -> None:
    """Refuse two parts of a calibration at once, and flags that a part would ignore."""
    given = {
        f"--{name.replace('_', '-')}": excluded
        for name, excluded in _PARTS.items()
        if context.params[name] is not None
    }
    if len(given) > 1:
        first, *others = given
        values = [text for flag in given for text in opt.typed_texts(flag, sys.argv)]
        raise UsageError(
            f"{first}: must come without {' and '.join(others)}, got {' and '.join(values)}; "
            "run the command once for each"
        )
    for flag, excluded in given.items():
        opt.refuse_typed(context, excluded, beside=flag)
    for name in () if any(flag in given for flag in _TABLES) else _OF_RUNS:
        if opt.typed(context, name):
            raise UsageError(f"--{name}: must come with --from-runs, got {context.params[name]}")
    if "--from-steps" in given and not opt.typed(context, "device"):
        raise UsageError(
            "--from-steps: must come with --device, got it alone; see perfmodel devices"
        )


def _infer(table: Path, *, columns: Path | None, device: str, out: Path, seed: int) -> None:
    from calibrate.runs import calibrate_from_runs
    from perfmodel.report.prediction import parameter_lines

    with working("calibrate"):
        document, notes = calibrate_from_runs(table, columns=columns, device=device, seed=seed)
    path = out / "inferred.json"
    document.write(path)
    machine = document.machine
    inferred = f"inferred from {machine.num_runs} runs on {machine.device_name}: {path}"
    lines = [*parameter_lines(machine), *(f"- {note}" for note in notes), inferred]
    show_answer(document, lines=lines)


def _infer_steps(table: Path, *, device: str, out: Path) -> None:
    from calibrate.step_table import calibrate_from_steps
    from perfmodel.models import refuse_without_torch
    from perfmodel.report.profile import device_cost_lines

    refuse_without_torch("--from-steps")
    with working("calibrate"):
        document, notes = calibrate_from_steps(table, device=device)
    machine = document.machine
    path = out if out.suffix == ".json" else out / f"{machine.device_name}.json"
    document.write(path)
    lines = [*device_cost_lines(machine), *(f"- {note}" for note in notes)]
    show_answer(document, lines=lines, written={"machine": path})


def fit(
    folder: Annotated[Path, opt.file("FOLDER", "Folder of a calibration.")] = (
        opt.DEFAULT_CALIBRATION
    ),
) -> None:
    """Fit the profile again from the raw observations in a folder."""
    from calibrate import calibrate as use_case

    with working("fit"):
        document = use_case.refit(folder)
    show_answer(document, written={"profile": folder / use_case.PROFILE})
