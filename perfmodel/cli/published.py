"""Command that judges the laws by what others published."""

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import names
from perfmodel.cli.terminal import show_document
from perfmodel.errors import UsageError


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
    from perfmodel.report.published import published_table  # noqa: PLC0415 - keeps --help fast
    from validate.published.published import judge_published  # noqa: PLC0415

    if file is not None and not as_json:
        raise UsageError(f"FILE: must follow --json, got {str(file)!r}")
    document = judge_published(data, names(sources))
    if file is not None:
        document.write(file)
    left_out = [f"left out: {name}" for name in document.skipped]
    shown = as_json and file is None
    show_document(document, published_table(document), left_out, as_json=shown)
