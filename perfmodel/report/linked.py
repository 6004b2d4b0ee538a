"""Numbers of a document in a page: each is read from the document, shown, and linked to its source."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup

from perfmodel.report.wording import number, percent
from perfmodel.units import format_bytes, format_duration


def money(value: float) -> str:
    """Text such as ``12,345``; three significant digits below 100."""
    return f"{value:,.0f}" if abs(value) >= 100 else number(value)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isclose(value, round(value)) else f"{value:,.1f}"


#: How a number is shown.
KINDS: Final[Mapping[str, Callable[[Any], str]]] = {
    "money": money,
    "price": lambda value: f"{value:.4g}",
    "duration": format_duration,
    "percent": percent,
    "count": _count,
    "ratio": number,
    "bytes": format_bytes,
    "date": str,
    "text": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One number that a page shows."""

    place: int
    path: str
    """Keys and positions in the JSON of the document, joined by dots."""
    exact: str
    origin: str
    """Words: where it comes from."""
    anchor: str
    """Id of the row of the page that tells more; empty if there is none."""


class LinkedNumbers:
    """Shows values of a document, and remembers which.

    Parameters
    ----------
    values
        The document as JSON has it.
    origin
        From a path to where its value comes from, and the id of a row that tells more.
    """

    def __init__(self, values: Any, origin: Callable[[str], tuple[str, str]]) -> None:
        self._values, self._origin = values, origin
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        """What was shown so far, in that order."""
        return list(self._entries.values())

    def value(self, path: str) -> Any:
        """What stands at a path."""
        found = self._values
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def show(self, path: str, kind: str) -> Markup:
        """The value at a path as a link to its row among the sources."""
        value = self.value(path)
        if path not in self._entries:
            origin, anchor = self._origin(path)
            self._entries[path] = Entry(
                place=len(self._entries) + 1,
                path=path,
                exact=str(value),
                origin=origin,
                anchor=anchor,
            )
        entry = self._entries[path]
        return Markup('<a class="n {}" href="#n{}" data-path="{}">{}</a>').format(
            kind, entry.place, path, KINDS[kind](value)
        )

    def interval(self, path: str, kind: str) -> Markup:
        """The value and its 90 % interval."""
        middle, low, high = (self.show(f"{path}.{name}", kind) for name in ("p50", "p5", "p95"))
        return Markup('{} <span class="range">[{}&thinsp;&ndash;&thinsp;{}]</span>').format(
            middle, low, high
        )
