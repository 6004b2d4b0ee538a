"""Commands that measure: doctor, calibrate, fit. They import torch-side code lazily."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import (
    MasterAddress,
    MasterPort,
    NodeRank,
    Nodes,
    Patience,
    is_typed,
    names,
    patience_s,
    refuse_typed,
    whole_numbers,
)
from perfmodel.cli.output import measurement, show, show_lines
from perfmodel.errors import UsageError

DEFAULT_CALIBRATION = Path("runs/calibration")
DEFAULT_PROFILE = DEFAULT_CALIBRATION / "profile.json"

_WORKLOAD = typer.Option(
    help="A traced workload (from perfmodel trace): measure its operators only, on one device, "
    "and add them to the profile in the folder."
)
_BUDGET = typer.Option(help="quick, standard or thorough: about 3, 12 or 33 minutes.")
_OUT = typer.Option(help="Folder for raw observations and the profile.")
_NPROC = typer.Option(help="Ranks per node; default: every GPU, or every core up to 8.")
_RESUME = typer.Option("--resume", help="Continue an interrupted calibration in the folder.")
_NOISE = typer.Option(
    help="Models out of lenet, mlp, resnet18: train them on generated samples under DDP, measure their "
    "gradient noise scale, and add it to the profile in the folder."
)
_MODELS = typer.Option(help="Reference models to run, separated by commas.")
_FROM_RUNS = typer.Option(
    help="Measure nothing: infer from step times: CSV, run records (.jsonl), Kineto trace, MLPerf log, or "
    "a folder of them."
)
_COLUMNS = typer.Option(help="TOML: names, units, constants of those runs.")
_DEVICE_TYPE = typer.Option(
    help="Device of those runs: A100, H100, V100, B200, or a name of perfmodel devices."
)
_BATCHES = typer.Option(
    help="With --workload: micro-batches to measure; default: where it was traced."
)


#: How long the doctor keeps all cores busy; the kernel counts in hundredths of a second. [s]
_LOAD_S = 1.0


def doctor() -> None:
    """Say what this machine is, and what would spoil a measurement."""
    from calibrate.doctor import diagnose, render
    from calibrate.environment import describe_environment, torch_facts

    torch = torch_facts() if find_spec("torch") else None
    environment = describe_environment(torch, load_s=_LOAD_S)
    typer.echo(render(diagnose(environment), environment=environment))


#: What a whole calibration alone decides: parts that are added later take it from the profile.
_AS_CALIBRATED = dict.fromkeys(
    ("budget", "device", "nproc", "models", "nnodes", "node_rank", "master_addr", "master_port"),
    "leave it out, the profile in the folder decides",
)
_ORDER = {
    "seed": "leave it out, the order of measurements is fixed",
    "patience": "leave it out, it belongs to whole calibrations",
}
_BATCHES_OF = {"batches": "leave it out, it belongs to --workload"}
#: Parts of a calibration, with what each would ignore.
_PARTS = {
    "workload": _AS_CALIBRATED | _ORDER,
    "from_runs": dict.fromkeys(
        (*_AS_CALIBRATED, "resume", "patience"), "leave it out, nothing is measured"
    )
    | _BATCHES_OF,
    "noise_scale": _AS_CALIBRATED | _ORDER | _BATCHES_OF,
}
_OF_RUNS = ("columns", "device_type")


def calibrate(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    *,
    budget: Annotated[str, _BUDGET] = "standard",
    out: Annotated[Path, _OUT] = DEFAULT_CALIBRATION,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    nproc: Annotated[int | None, _NPROC] = None,
    models: Annotated[str, _MODELS] = "lenet,resnet18,mlp,transformer",
    noise_scale: Annotated[str | None, _NOISE] = None,
    workload: Annotated[Path | None, _WORKLOAD] = None,
    batches: Annotated[str | None, _BATCHES] = None,
    resume: Annotated[bool, _RESUME] = False,
    patience: Patience = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of measurements.")] = 0,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddress = None,
    master_port: MasterPort = None,
    from_runs: Annotated[Path | None, _FROM_RUNS] = None,
    columns: Annotated[Path | None, _COLUMNS] = None,
    device_type: Annotated[str, _DEVICE_TYPE] = "A100",
) -> None:
    """Measure this machine by real training and write its profile."""
    _refuse_ignored(context)
    if noise_scale is not None:
        _calibrate_noise(noise_scale, out, resume=resume)
        return
    if workload is not None or batches is not None:
        _calibrate_workload(workload, out, batches=batches, resume=resume)
        return
    if from_runs is not None:
        _infer(from_runs, columns=columns, device=device_type, out=out, seed=seed)
        return
    from calibrate import calibrate as use_case
    from calibrate.launch import TorchrunLauncher
    from calibrate.topology import LaunchFlags
    from perfmodel.report.tables import profile_table

    request = use_case.CalibrationRequest(
        folder=out,
        budget=budget,
        device=device,
        models=names(models),
        flags=LaunchFlags(
            nnodes=nnodes,
            nproc_per_node=nproc,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
        ),
        seed=seed,
        resume=resume,
        patience_s=patience_s(patience),
    )
    with measurement("calibrate") as on_progress:
        profile = use_case.calibrate(request, TorchrunLauncher(), on_progress=on_progress)
    show(profile_table(profile))
    typer.echo(f"profile: {out / use_case.PROFILE}")


def _refuse_ignored(context: typer.Context) -> None:
    """Refuse two parts of a calibration at once, and flags that a part would ignore."""
    given = {
        f"--{name.replace('_', '-')}": excluded
        for name, excluded in _PARTS.items()
        if context.params[name] is not None
    }
    if len(given) > 1:
        first, *others = given
        values = [str(context.params[name]) for name in _PARTS if context.params[name] is not None]
        raise UsageError(
            f"{first}: must come without {' and '.join(others)}, got {' and '.join(values)}; "
            "run the command once for each"
        )
    for flag, excluded in given.items():
        refuse_typed(context, excluded, beside=flag)
    for name in () if "--from-runs" in given else _OF_RUNS:
        if is_typed(context, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: must come with --from-runs, got {context.params[name]}"
            )


def _calibrate_noise(models: str, out: Path, *, resume: bool) -> None:
    from calibrate import noise as use_case
    from calibrate.launch import TorchrunLauncher
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.report.tables import profile_table

    path = out / DEFAULT_PROFILE.name
    request = use_case.NoiseRequest(folder=out, models=names(models), resume=resume)
    profile = ProfileDocument.read(path)
    with measurement("calibrate") as on_progress:
        machine = use_case.measure_noise(
            request, TorchrunLauncher(), profile=profile.machine, on_progress=on_progress
        )
    profile = profile.with_machine(machine)
    profile.write(path)
    show(profile_table(profile))
    typer.echo(f"profile: {path}")


def _calibrate_workload(
    workload: Path | None, out: Path, *, batches: str | None, resume: bool
) -> None:
    if workload is None:
        raise UsageError("--batches: must come with --workload, got it alone")
    from calibrate import workloads as use_case
    from calibrate.launch import TorchrunLauncher
    from perfmodel.documents.profile import ProfileDocument

    path = out / DEFAULT_PROFILE.name
    request = use_case.WorkloadRequest(
        folder=out,
        document=workload,
        micro_batches=() if batches is None else whole_numbers("--batches", batches),
        resume=resume,
    )
    profile = ProfileDocument.read(path)
    with measurement("calibrate") as on_progress:
        machine = use_case.measure_workload(
            request, TorchrunLauncher(), profile=profile.machine, on_progress=on_progress
        )
    profile = profile.with_machine(machine)
    profile.write(path)
    typer.echo(f"profile: {path}")


def _infer(table: Path, *, columns: Path | None, device: str, out: Path, seed: int) -> None:
    from calibrate.runs import calibrate_from_runs
    from perfmodel.report.layout import parameter_lines

    document, notes = calibrate_from_runs(table, columns=columns, device=device, seed=seed)
    show_lines([*parameter_lines(document.machine), *(f"- {note}" for note in notes)])
    document.write(out / "inferred.json")
    typer.echo(
        f"inferred from {document.machine.num_runs} runs on {document.machine.device_name}: {out / 'inferred.json'}"
    )


def fit(
    folder: Annotated[Path, typer.Argument(help="Folder of a calibration.")] = DEFAULT_CALIBRATION,
) -> None:
    """Fit the profile anew from the raw observations in a folder."""
    from calibrate import calibrate as use_case
    from perfmodel.report.tables import profile_table

    show(profile_table(use_case.refit(folder)))
    typer.echo(f"profile: {folder / use_case.PROFILE}")
