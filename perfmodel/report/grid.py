"""A table before it meets a terminal or a browser."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading and how its cells stand."""

    name: str
    is_text: bool = False
    """Text stands left, numbers right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells as text; a cell may hold several lines."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


def grid(
    title: str,
    *,
    text: Sequence[str] = (),
    numbers: Sequence[str] = (),
    notes: Sequence[str] = (),
    rows: Iterable[tuple[str, ...]],
    caption: str = "",
) -> Grid:
    """Build a table with columns of text, then of numbers, then of text again."""
    columns = (
        *(Column(name=name, is_text=True) for name in text),
        *(Column(name=name) for name in numbers),
        *(Column(name=name, is_text=True) for name in notes),
    )
    return Grid(title=title, columns=columns, rows=tuple(rows), caption=caption)
