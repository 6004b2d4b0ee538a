"""``perfmodel validate strategies``: FSDP2, ZeRO, tensor and pipeline parallelism for real."""

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.progress import measurement
from perfmodel.cli.terminal import refuse_failed_gates, show, show_lines

DEFAULT_STRATEGIES = Path("runs/strategies")
_SECONDS_PER_MINUTE = 60


def run_strategies(
    *,
    out: Annotated[Path, typer.Option(help="Folder for runs, predictions and the verdict.")] = (
        DEFAULT_STRATEGIES
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted campaign in the folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of runs.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; continue with --resume.")
    ] = None,
) -> None:
    """Run strategies on 2 to 4 ranks over shaped links and print the model's own error."""
    from perfmodel import checks  # noqa: PLC0415 - keeps --help fast
    from perfmodel.report.strategies_grids import families_grid, settings_grid  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415
    from perfmodel.report.testbed_grids import gate_lines  # noqa: PLC0415
    from validate.strategies import strategies as use_case  # noqa: PLC0415

    if minutes is not None:
        checks.positive("--minutes", minutes)
    request = use_case.StrategiesRequest(
        folder=out,
        seed=seed,
        resume=resume,
        limit_s=None if minutes is None else minutes * _SECONDS_PER_MINUTE,
    )
    with measurement("strategies") as on_progress:
        document = use_case.validate_strategies(request, on_progress=on_progress)
    for found in (settings_grid(document), families_grid(document)):
        show(rich_table(found))
    show_lines([*gate_lines(document.gates), f"strategies: {out / use_case.VERDICT}"])
    refuse_failed_gates("validate strategies", document.gates)
