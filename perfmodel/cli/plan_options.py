"""perfmodel plan options: which machine, how many, how long, for how much."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import day
from perfmodel.cli.terminal import show_document
from perfmodel.errors import NotFeasible

_REPORT = typer.Option(help="Write one HTML file for the person who signs, such as decision.html.")


def options(
    plan: Annotated[Path, typer.Argument(help="Plan in TOML: work, limits, options with prices.")],
    *,
    prices: Annotated[Path | None, typer.Option(help="CSV of prices, used by name.")] = None,
    today: Annotated[str, typer.Option(help="YYYY-MM-DD, for the age of prices.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the plan document.")] = None,
    report: Annotated[Path | None, _REPORT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Rank the options of a plan by cost, with the chance to meet its deadline."""
    from perfmodel.api import plan_options  # noqa: PLC0415 - keeps --help fast
    from perfmodel.cli.large_models import read_model  # noqa: PLC0415
    from perfmodel.report.plan import infeasible_line, plan_grid, plan_lines  # noqa: PLC0415
    from perfmodel.report.tables import rich_table  # noqa: PLC0415

    document = plan_options(
        plan,
        prices=prices,
        today=day("--today", today),
        open_model=lambda name, sequence: read_model(name, sequence=sequence),
        argv=sys.argv,
    )
    if output is not None:
        document.write(output)
    if report is not None:
        from perfmodel.documents.base import write_atomically  # noqa: PLC0415 - matplotlib is slow
        from perfmodel.report.decision import decision_html  # noqa: PLC0415

        write_atomically(report, decision_html(document))
    show_document(document, rich_table(plan_grid(document)), plan_lines(document), as_json=as_json)
    if not document.ranked:
        raise NotFeasible(infeasible_line(document))
