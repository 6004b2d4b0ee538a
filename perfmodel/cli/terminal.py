"""What commands print, and how a verdict ends them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from perfmodel.errors import OutOfTolerance

if TYPE_CHECKING:
    from rich.console import RenderableType

    from perfmodel.documents.base import Document
    from perfmodel.documents.validation import Gate


def show(renderable: "RenderableType") -> None:
    """Print a table as wide as the terminal."""
    from rich.console import Console  # noqa: PLC0415 - slow to import

    Console().print(renderable)


def show_document(
    document: "Document", table: "RenderableType", lines: Iterable[str], *, as_json: bool
) -> None:
    """Print a document for programs, or its table and sentences."""
    if as_json:
        typer.echo(document.model_dump_json(indent=1))
        return
    show(table)
    for line in lines:
        typer.echo(line)


def refuse_failed_gates(
    command: str, gates: Iterable["Gate"], *, see: str = "the table for where"
) -> None:
    """End a command whose verdict is printed and written.

    Raises
    ------
    OutOfTolerance
        If a gate failed.
    """
    failed = [gate.name for gate in gates if not gate.passed]
    if failed:
        raise OutOfTolerance(f"{command}: out of tolerance: {', '.join(failed)}; see {see}")
