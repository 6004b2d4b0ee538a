"""What commands print, and how a verdict ends them."""

import shutil
import sys
import textwrap
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
    show_lines(lines)


def show_lines(lines: Iterable[str]) -> None:
    """Print sentences; on a terminal, none is wider than that."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        typer.echo(line if width is None else wrapped(line, width))


def wrapped(line: str, width: int) -> str:
    """A sentence over several lines, the further ones indented; words stay whole."""
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.lstrip(),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


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
