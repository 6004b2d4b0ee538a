"""Command that judges the laws by what others published."""

from pathlib import Path
from typing import Annotated

import typer


def published(
    *,
    data: Annotated[Path, typer.Option(help="Folder with the published tables (CSV).")],
    sources: Annotated[
        str, typer.Option(help="Tables to judge by, separated by commas.")
    ] = "collectives,steptime_placements,vtrain,llm_foundry,playbook,scaling,memory,notebooks,convergence",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict document.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the verdict document.")] = None,
) -> None:
    """Fit the small end of published series, predict the large end, beside plain models."""
    from rich.console import Console  # noqa: PLC0415 - keeps --help fast

    from perfmodel.report.published import published_table  # noqa: PLC0415
    from validate.published.published import judge_published  # noqa: PLC0415

    names = tuple(name.strip() for name in sources.split(",") if name.strip())
    document = judge_published(data, names)
    if output is not None:
        document.write(output)
    if as_json:
        typer.echo(document.model_dump_json(indent=1))
        return
    Console().print(published_table(document))
    for name in document.skipped:
        typer.echo(f"left out: {name}")
