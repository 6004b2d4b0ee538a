"""Commands that check: validate judges by fresh runs, diff compares profiles."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perfmodel.cli import options as opt
from perfmodel.cli import (
    printing,
    refuse_failed_gates,
    show_answer,
    show_lines,
    show_progress,
    working,
)
from perfmodel.cli.progress import measurement
from perfmodel.errors import MeasurementFailed, OutOfTolerance

if TYPE_CHECKING:
    from perfmodel.documents.verdicts import ValidationDocument, Verdict
    from perfmodel.documents.workload import WorkloadDocument

_BUDGET = typer.Option(help="quick or standard.")
_SOON = typer.Option(
    help="Run now: by default the runs begin at least 20 minutes after the calibration."
)
_SEED_OF_MODELS = opt.seed(
    "Which models are drawn, also of timm where it is installed; default: others every time."
)
_BUDGET_STRATEGIES = typer.Option(help="quick or standard: about 4 or 14 minutes.")
_NEW_SEED = opt.seed("Which stacks are drawn; default: a new one, or that of the folder.")
_MODELS = opt.names(
    "--models", "Models, separated by commas; default: fourteen, LeNet to ResNet-152."
)
_BATCHES = opt.counts("--batches", "Micro-batches, separated by commas.")
_SOURCES = opt.names(
    "--sources",
    "Tables to judge by, separated by commas; also nccl_times, operator_times, and data_parallel and "
    "single_device_steps, whose models are traced (1 and 10 minutes).",
)
_ARCHIVE = opt.file(
    "--from", "Judge what perfmodel calibrate --campaign packed elsewhere; measures nothing."
)
_ELSEWHERE: Final = dict.fromkeys(
    (
        *("profile", "budget", "out", "resume", "seed", "soon", "validation"),
        *("nnodes", "node_rank", "master_addr", "master_port"),
    ),
    "leave it out, the archive decides",
)
PUBLISHED: Final = (
    "collectives,vtrain_allreduce,steptime_placements,vtrain,llm_foundry,playbook,scaling,memory,"
    "convergence,mlperf_layouts,ddp_repeated"
)


def validate(
    context: typer.Context,
    *,
    profile: opt.Profile = opt.DEFAULT_PROFILE,
    budget: Annotated[str, _BUDGET] = "standard",
    out: opt.Folder = Path("runs/validation"),
    resume: opt.Resume = False,
    seed: opt.Seed = 1,
    soon: Annotated[bool, _SOON] = False,
    validation: opt.Validation = None,
    archive: Annotated[Path | None, _ARCHIVE] = None,
    nnodes: opt.NumNodes = None,
    node_rank: opt.NodeRank = None,
    master_addr: opt.MasterAddress = None,
    master_port: opt.MasterPort = None,
) -> None:
    """Run settings that calibration never used and print the tool's own error."""
    if context.invoked_subcommand is not None:
        return
    if archive is not None:
        opt.refuse_typed(context, _ELSEWHERE, beside="--from")
        show_archive(archive)
        return
    from calibrate.launch import LaunchFlags, TorchrunLauncher
    from perfmodel.documents.verdicts import ValidationDocument
    from validate import validate as use_case
    from validate.judging import PLAIN_LOOP

    request = opt.asked(
        use_case.ValidationRequest,
        context,
        profile=opt.profiled(profile),
        folder=out,
        flags=opt.asked(LaunchFlags, context),
        earlier=None if validation is None else ValidationDocument.read(validation),
    )
    with measurement("validate") as on_progress:
        launcher = TorchrunLauncher(worker_module=PLAIN_LOOP)
        document = use_case.validate(request, launcher, on_progress=on_progress)
    show_answer(document, written={"validation": out / use_case.VALIDATION})
    _refuse_failed_steps(document)


def _refuse_failed_steps(document: "ValidationDocument") -> None:
    from perfmodel.report.validation import too_noisy

    if noise := too_noisy(document):
        raise OutOfTolerance(
            f"validate: too noisy to judge: {noise}; see perfmodel doctor, and measure longer with "
            "--budget standard"
        )
    refuse_failed_gates(
        "validate",
        document.gates,
        see="the table for where, and perfmodel doctor for what may have disturbed the runs",
    )


def _show_verdict(what: str, document: "Verdict", path: Path) -> None:
    show_answer(document, written={what: path})
    refuse_failed_gates(f"validate {what}", document.gates)


def show_archive(path: Path, *, fails: bool = True) -> None:
    """Print the verdict of a campaign's archive, and end as the judges do unless more is to be said."""
    from calibrate.locks import work_folder
    from validate.borrowed import judge, unpack
    from validate.memory import verdict

    with work_folder("perfmodel-archive-") as name:
        folder = Path(name)
        campaign = unpack(path, folder)
        found = judge(folder, campaign)
    if printing.get().as_json:
        show_answer({field.name: getattr(found, field.name) for field in fields(found)})
    else:
        for document in filter(None, (found.profile, found.steps, *found.models)):
            show_answer(document)
        if found.memory is not None:
            show_lines(verdict(found.memory))
        show_lines(found.notes)
    if not fails:
        return
    if not (found.steps or found.models or found.memory):
        raise MeasurementFailed(
            f"{path}: must hold a profile and runs to judge, got too little: see above; "
            "finish the campaign where it ran, with the same command"
        )
    if found.steps is not None:
        _refuse_failed_steps(found.steps)
    gates = [gate for document in found.models for gate in document.gates]
    refuse_failed_gates("validate", [*gates, *(found.memory.gates if found.memory else ())])


def validate_models(
    context: typer.Context,
    *,
    profile: opt.Profile = opt.DEFAULT_PROFILE,
    budget: Annotated[str, _BUDGET] = "standard",
    out: opt.Folder = Path("runs/models"),
    resume: opt.Resume = False,
    seed: Annotated[int | None, _SEED_OF_MODELS] = None,
    soon: Annotated[bool, _SOON] = False,
) -> None:
    """Run models drawn at random and print the error of what their traces predict."""
    from calibrate.launch import TorchrunLauncher
    from validate import models as use_case
    from validate.judging import PLAIN_LOOP, ProfileRequest, campaign_seed

    its_seed = campaign_seed(out, seed)
    request = opt.asked(
        ProfileRequest, context, profile=opt.profiled(profile), folder=out, seed=its_seed
    )
    with measurement("validate models") as on_progress:
        documents = use_case.validate_models(
            request,
            TorchrunLauncher(),
            TorchrunLauncher(worker_module=PLAIN_LOOP),
            on_progress=on_progress,
        )
    if printing.get().as_json:
        show_answer({"validations": documents})
    for document in () if printing.get().as_json else documents:
        path = out / use_case.file_name(document.mode)
        show_answer(document, written={"validation": path})
    gates = [gate for document in documents for gate in document.gates]
    refuse_failed_gates("validate models", gates)


def validate_memory(
    *,
    models: Annotated[Sequence[str], _MODELS] = (),
    batches: Annotated[Sequence[int], _BATCHES] = (2, 4),
    out: opt.Folder = Path("runs/memory"),
    device_kind: opt.WhichDevice = "cpu",
    truth: opt.Truth = None,
) -> None:
    """Train models for real and compare the allocator's peak with what their traces predict."""
    from perfmodel.models import refuse_without_torch
    from validate import memory as use_case

    refuse_without_torch("validate memory")
    chosen = tuple(models) or use_case.MODELS
    if unfamiliar := [name for name in chosen if name not in use_case.MODELS]:
        from perfmodel.tracing.sources import find_source

        for name in unfamiliar:  # before anything is measured
            find_source(name, option="--models", others=use_case.MODELS)
    opt.refuse_unlike_truth(device_kind, truth)
    path = out / "validation.json"
    with measurement("validate memory"):
        summary = use_case.validate_memory(
            chosen, tuple(batches), out=path, on_line=show_progress, device=device_kind, truth=truth
        )
    lines, found = use_case.verdict(summary), {"memory": summary}
    show_answer(found, lines=lines, written={"validation": path})
    refuse_failed_gates("validate memory", summary.gates, see="the lines above for where")


def validate_published(
    *,
    data: Annotated[Path, opt.file("--data", "Folder with the published tables (CSV).")],
    sources: Annotated[Sequence[str], _SOURCES] = PUBLISHED,
) -> None:
    """Fit the small end of published series, predict the large end, beside plain models."""
    from validate.published import judge_published

    with working("validate published"):
        document = judge_published(data, tuple(sources))
    show_answer(document)


def validate_strategies(
    context: typer.Context,
    *,
    profile: opt.Profile = opt.DEFAULT_PROFILE,
    budget: Annotated[str, _BUDGET_STRATEGIES] = "standard",
    out: opt.Folder = Path("runs/strategies"),
    resume: opt.Resume = False,
    seed: Annotated[int | None, _NEW_SEED] = None,
    soon: Annotated[bool, _SOON] = False,
) -> None:
    """Train stacks of layers with FSDP2, ZeRO, TP and PP and print the error of what the profile predicts."""
    from calibrate.launch import TorchrunLauncher
    from perfmodel.models import traced_document
    from perfmodel.workload.step import USUAL_METHOD
    from validate import strategies as use_case
    from validate.judging import campaign_seed

    machine = opt.profiled(profile)

    def trace(model: str, optimizer: str) -> "WorkloadDocument":
        method = replace(USUAL_METHOD, optimizer=optimizer, device_kind=machine.traced_kind)
        return traced_document(model, method, micro_batch=8)

    its_seed, kind = campaign_seed(out, seed), use_case.StrategiesRequest
    request = opt.asked(kind, context, profile=machine, folder=out, seed=its_seed, trace=trace)
    with measurement("validate") as on_progress:
        document = use_case.validate_strategies(
            request, TorchrunLauncher(), on_progress=on_progress
        )
    _show_verdict("strategies", document, out / use_case.VERDICT)


def validate_network(
    context: typer.Context,
    *,
    budget: Annotated[str, typer.Option(help="quick or standard: 1 or 3 rounds.")] = "standard",
    mbit: Annotated[float, opt.positive("--mbit", "Rate of the links. [Mbit/s]")] = 200.0,
    out: opt.Folder = Path("runs/network-verdict"),
    resume: opt.Resume = False,
    seed: opt.Seed = 1,
) -> None:
    """Measure collectives of 2 to 16 ranks on shaped links; fit some, judge by the rest."""
    from perfmodel.models import refuse_without_torch
    from validate.testbed import network as use_case

    refuse_without_torch("validate network")
    request = opt.asked(use_case.NetworkRequest, context, folder=out)
    with measurement("network") as on_progress:
        document = use_case.validate_network(request, on_progress=on_progress)
    _show_verdict("network", document, out / use_case.VERDICT)


def diff(
    old: Annotated[Path, opt.file("OLD", "Profile before, such as with the old driver.")],
    new: Annotated[Path, opt.file("NEW", "Profile after.")],
) -> None:
    """Compare two profiles: what changed beyond noise, and which predictions move."""
    from perfmodel.api import compare_profiles, read_profile

    with working("diff"):
        document = compare_profiles(read_profile(old), read_profile(new))
    show_answer(document)


def check(
    file: Annotated[Path, opt.file("FILE", "A document of perfmodel, or observations.jsonl.")],
) -> None:
    """Say what a file is, and whether it is valid and as it was written."""
    from perfmodel.documents import check_file

    facts, code = check_file(file)
    lines = [f"{name}: {value}" for name, value in facts.items()]
    show_answer({"exit_code": code, "file": facts}, lines=lines)
    if code:
        raise typer.Exit(code)
