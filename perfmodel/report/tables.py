"""One table for terminal and page: a column is a heading and what it shows of each row."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, TypeVar

from perfmodel.errors import printable
from perfmodel.report.wording import count_interval, duration_interval, interval, number, percent
from perfmodel.statistics import Interval
from perfmodel.units import format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_Row = TypeVar("_Row")
#: How a value is written; any other form is one of Python's own, such as ``,`` or ``.1%``.
_FORMS: Final[Mapping[str, Callable[[Any], str]]] = {
    "": lambda value: interval(value) if isinstance(value, Interval) else str(value),
    "s": lambda value: (
        duration_interval(value) if isinstance(value, Interval) else format_duration(value)
    ),
    "bytes": format_bytes,
    "B/s": lambda value: format_rate(value, "B"),
    "FLOP/s": lambda value: format_rate(value, "FLOP"),
    "k": count_interval,
    "number": number,
    "%": percent,
    "+%": lambda value: percent(value, signed=True),
    "held": lambda value: "yes" if value else "NO",
}
#: The form that the unit in a name asks for; the first that fits.
_UNITS: Final = (
    *(("bytes_per_s", "B/s"), ("flop_per_s", "FLOP/s"), ("_per_s", "")),
    *(("_bytes", "bytes"), ("_s", "s")),
)


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
            title=Text(printable(self.title), style="bold"),
            caption=Text(printable(self.caption)) if self.caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 0),
        )
        for heading, is_text in zip(self.headings, self.is_text, strict=True):
            shown.add_column(Text(heading), justify="left" if is_text else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        return shown


def table(
    title: str,
    rows: Iterable[_Row],
    columns: Mapping[str, str | Callable[[_Row], object]],
    *,
    caption: str = "",
) -> Table:
    """One row per item.

    Parameters
    ----------
    columns
        What is shown of an item, by heading; ``<`` before a heading marks a column of text. A text such
        as ``"setting.world_size"`` or ``"errors.bias:+%"`` is a path of attributes, keys and positions
        and the form of its value, which is otherwise that of the unit in its name. ``None`` is a dash.
    """
    return Table(
        title=title,
        headings=tuple(heading.removeprefix("<") for heading in columns),
        is_text=tuple(heading.startswith("<") for heading in columns),
        rows=tuple(tuple(_cell(item, column) for column in columns.values()) for item in rows),
        caption=caption,
    )


def _cell(item: _Row, column: str | Callable[[_Row], object]) -> str:
    if not isinstance(column, str):
        return str(column(item))
    path, has_form, form = column.partition(":")
    value = reduce(_part, path.split("."), item)
    if value is None:
        return "-"
    if not has_form:
        form = next((form for end, form in _UNITS if path.endswith(end)), "")
    return _FORMS[form](value) if form in _FORMS else format(value, form)


def _part(whole: Any, key: str) -> Any:
    if whole is None or isinstance(whole, Mapping):
        return whole and whole[key]
    return whole[int(key)] if key.isdigit() else getattr(whole, key)


def facts(title: str, found: Iterable[tuple[str, object]], *, name: str = "What") -> Table:
    """Names and values."""
    return table(title, found, {f"<{name}": "0", "<Value": "1"})
