"""``perfmodel validate strategies``: FSDP2, ZeRO, tensor and pipeline parallelism for real."""

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import Minutes, OrderSeed, Resume, limit_s
from perfmodel.cli.progress import measurement
from perfmodel.cli.terminal import refuse_failed_gates, show, show_lines

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
    from perfmodel.report.strategies_grids import families_grid, settings_grid  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from perfmodel.report.wording import gate_lines  # noqa: PLC0415
    from validate.strategies import strategies as use_case  # noqa: PLC0415
    from validate.testbed.campaign import CampaignRequest  # noqa: PLC0415

    request = CampaignRequest(folder=out, seed=seed, resume=resume, limit_s=limit_s(minutes))
    with measurement("strategies") as on_progress:
        document = use_case.validate_strategies(request, on_progress=on_progress)
    for found in (settings_grid(document), families_grid(document)):
        show(rich_table(found))
    show_lines([*gate_lines(document.gates), f"strategies: {out / use_case.VERDICT}"])
    refuse_failed_gates("validate strategies", document.gates)
