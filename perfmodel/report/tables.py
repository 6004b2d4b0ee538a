"""One table for terminal and page: a column is a heading and what it shows of each row."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text; a cell may hold several lines."""

    title: str
    headings: tuple[str, ...]
    is_text: tuple[bool, ...]
    """Text stands left, numbers right."""
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def __rich__(self) -> "RichTable":
        """For a terminal; names are text, never markup."""
        from rich import box, table  # noqa: PLC0415 - slow, and answers as JSON need none
        from rich.text import Text  # noqa: PLC0415

        shown = table.Table(
            title=Text(self.title, style="bold"),
            caption=Text(self.caption) if self.caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 0),
        )
        for heading, is_text in zip(self.headings, self.is_text, strict=True):
            shown.add_column(Text(heading), justify="left" if is_text else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(Text, row))
        return shown


def table(
    title: str,
    rows: Iterable[_Row],
    columns: Mapping[str, Callable[[_Row], object]],
    *,
    caption: str = "",
) -> Table:
    """One row per item.

    Parameters
    ----------
    columns
        What is shown of an item, by heading; ``<`` before a heading marks a column of text.
    """
    return Table(
        title=title,
        headings=tuple(heading.removeprefix("<") for heading in columns),
        is_text=tuple(heading.startswith("<") for heading in columns),
        rows=tuple(tuple(str(show(item)) for show in columns.values()) for item in rows),
        caption=caption,
    )


def facts(title: str, found: Iterable[tuple[str, object]], *, name: str = "What") -> Table:
    """Names and values."""
    return table(title, found, {f"<{name}": lambda fact: fact[0], "<Value": lambda fact: fact[1]})
