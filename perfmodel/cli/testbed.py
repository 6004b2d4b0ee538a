"""Commands that run many ranks for real, on shaped links: training, and collectives alone."""

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import Minutes, OrderSeed, Resume, limit_s
from perfmodel.cli.progress import measurement
from perfmodel.cli.terminal import refuse_failed_gates, show, show_lines

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
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from perfmodel.report.testbed_grids import families_grid, settings_grid  # noqa: PLC0415
    from perfmodel.report.wording import gate_lines  # noqa: PLC0415
    from validate.testbed import testbed as use_case  # noqa: PLC0415

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
    from perfmodel import checks  # noqa: PLC0415 - keeps --help fast
    from perfmodel.report.published import network_size_table, network_table  # noqa: PLC0415
    from perfmodel.report.wording import gate_lines  # noqa: PLC0415
    from validate.network import network as use_case  # noqa: PLC0415

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
