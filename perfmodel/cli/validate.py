"""``perfmodel validate`` and its sub-commands: fresh runs that judge the predictions."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from perfmodel.cli.measure import DEFAULT_PROFILE
from perfmodel.cli.options import (
    MasterAddress,
    MasterPort,
    Minutes,
    NodeRank,
    Nodes,
    OrderSeed,
    Patience,
    ProfileToJudge,
    Resume,
    limit_s,
    names,
    one_of,
    patience_s,
    whole_numbers,
)
from perfmodel.cli.output import measurement, refuse_failed_gates, show, show_document, show_lines
from perfmodel.errors import UsageError

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
    from calibrate.launch import TorchrunLauncher
    from calibrate.topology import LaunchFlags
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.documents.verdicts import ValidationDocument
    from perfmodel.report.tables import summary_lines, validation_table
    from validate import validate as use_case

    request = use_case.ValidationRequest(
        profile=ProfileDocument.read(profile).machine,
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
    from calibrate.launch import TorchrunLauncher
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.report.verdicts import models_lines, models_table
    from validate import models as use_case

    chosen: use_case.Mode = one_of("--mode", mode, get_args(use_case.Mode))
    request = use_case.ModelsRequest(
        profile=ProfileDocument.read(profile).machine,
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
    from calibrate.launch import TorchrunLauncher
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.report.batch import judged_grid, judged_lines
    from perfmodel.report.tables import rich_table
    from validate import batch as use_case

    request = use_case.BatchRequest(
        profile=ProfileDocument.read(profile).machine,
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
    from validate.memory import MODELS, validate_memory, verdict

    micro_batches = whole_numbers("--batches", batches)
    chosen = names(models) or MODELS
    if unfamiliar := [name for name in chosen if name not in MODELS]:
        from perfmodel.cli.tracing import refuse_unknown_models

        refuse_unknown_models("--models", unfamiliar, known=MODELS)
    with measurement("validate memory"):
        summary = validate_memory(
            chosen, micro_batches, out=out, on_line=lambda line: show_lines([line])
        )
    show_lines([*verdict(summary), f"validation: {out}"])
    refuse_failed_gates("validate memory", summary.gates, see="the lines above for where")


def published(
    *,
    data: Annotated[Path, typer.Option(help="Folder with the published tables (CSV).")],
    sources: Annotated[
        str, typer.Option(help="Tables to judge by, separated by commas.")
    ] = "collectives,vtrain_allreduce,steptime_placements,vtrain,llm_foundry,playbook,scaling,memory,"
    "notebooks,convergence,mlperf,mlperf_layouts",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict document; --json FILE writes it.")
    ] = False,
    file: Annotated[
        Path | None, typer.Argument(help="Where --json writes, if not to the terminal.")
    ] = None,
) -> None:
    """Fit the small end of published series, predict the large end, beside plain models."""
    from perfmodel.report.verdicts import published_table
    from validate.published.published import judge_published

    if file is not None and not as_json:
        raise UsageError(f"FILE: must follow --json, got {str(file)!r}")
    document = judge_published(data, names(sources))
    if file is not None:
        document.write(file)
    left_out = [f"left out: {name}" for name in document.skipped]
    shown = as_json and file is None
    show_document(document, published_table(document), left_out, as_json=shown)


DEFAULT_STRATEGIES = Path("runs/strategies")


def run_strategies(
    *,
    out: Annotated[Path, typer.Option(help="Folder for runs, predictions and the verdict.")] = (
        DEFAULT_STRATEGIES
    ),
    resume: Resume = False,
    seed: OrderSeed = 1,
    minutes: Minutes = None,
) -> None:
    """Run strategies on 2 to 4 ranks over shaped links and print the model's own error."""
    from perfmodel.report.tables import rich_table
    from perfmodel.report.verdicts import strategy_families_grid as families_grid
    from perfmodel.report.verdicts import strategy_settings_grid as settings_grid
    from perfmodel.report.wording import gate_lines
    from validate.strategies import strategies as use_case
    from validate.testbed.campaign import CampaignRequest

    request = CampaignRequest(folder=out, seed=seed, resume=resume, limit_s=limit_s(minutes))
    with measurement("strategies") as on_progress:
        document = use_case.validate_strategies(request, on_progress=on_progress)
    for found in (settings_grid(document), families_grid(document)):
        show(rich_table(found))
    show_lines([*gate_lines(document.gates), f"strategies: {out / use_case.VERDICT}"])
    refuse_failed_gates("validate strategies", document.gates)


DEFAULT_TESTBED = Path("runs/testbed")
DEFAULT_NETWORK = Path("runs/network-verdict")


def run_testbed(
    *,
    budget: Annotated[
        str, typer.Option(help="quick or standard: about 5 or 25 minutes.")
    ] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for runs, predictions and the verdict.")] = (
        DEFAULT_TESTBED
    ),
    resume: Resume = False,
    seed: OrderSeed = 1,
    minutes: Minutes = None,
) -> None:
    """Run DDP at 4, 8 and 16 ranks over shaped links and print the model's own error."""
    from perfmodel.report.tables import rich_table
    from perfmodel.report.verdicts import families_grid, settings_grid
    from perfmodel.report.wording import gate_lines
    from validate.testbed import testbed as use_case

    request = use_case.TestbedRequest(
        folder=out,
        budget=budget,
        seed=seed,
        resume=resume,
        limit_s=limit_s(minutes),
    )
    with measurement("testbed") as on_progress:
        document = use_case.validate_testbed(request, on_progress=on_progress)
    for found in (settings_grid(document), families_grid(document)):
        show(rich_table(found))
    show_lines([*gate_lines(document.gates), f"testbed: {out / use_case.VERDICT}"])
    refuse_failed_gates("validate testbed", document.gates)


def run_network(
    *,
    budget: Annotated[
        str,
        typer.Option(
            help="quick or standard: about 3 or 6 minutes; blind: predictions on disk before runs."
        ),
    ] = "standard",
    mbit: Annotated[
        float, typer.Option(help="Rate of the links of a blind campaign. [Mbit/s]")
    ] = 200.0,
    out: Annotated[Path, typer.Option(help="Folder for raw times and the verdict.")] = (
        DEFAULT_NETWORK
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in the folder, or judge it again.")
    ] = False,
    seed: OrderSeed = 1,
    minutes: Minutes = None,
) -> None:
    """Measure collectives of 2 to 16 ranks on shaped links and on loopback; fit some, judge by the rest."""
    from perfmodel import checks
    from perfmodel.report.verdicts import network_size_table, network_table
    from perfmodel.report.wording import gate_lines
    from validate.testbed import network as use_case

    checks.positive("--mbit", mbit)
    request = use_case.NetworkRequest(
        folder=out,
        budget=budget,
        mbit=mbit,
        seed=seed,
        resume=resume,
        limit_s=limit_s(minutes),
    )
    with measurement("network") as on_progress:
        document = use_case.validate_network(request, on_progress=on_progress)
    show(network_table(document))
    show(network_size_table(document))
    show_lines([*gate_lines(document.gates), f"network: {out / use_case.VERDICT}"])
    refuse_failed_gates("validate network", document.gates)
