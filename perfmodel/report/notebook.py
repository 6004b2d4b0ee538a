"""Answers in a notebook: as on the command line, as HTML, as a data frame, as a picture."""

import importlib
import io
from collections.abc import Iterator, Sequence
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from perfmodel.answer.memory import MemoryReport
from perfmodel.diagnosis.asked import Diagnosed
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.errors import UsageError
from perfmodel.report import Table, diagnosis, memory, prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 100


class Answer(NamedTuple):
    """What the command line shows."""

    tables: Sequence[Table]
    lines: Sequence[str]


@singledispatch
def answer_of(found: object) -> Answer:
    """Tables and sentences of an answer."""
    raise TypeError(f"a {type(found).__name__} has no tables")


@answer_of.register
def _(found: PredictionDocument) -> Answer:
    if any(point.layout for point in found.points):
        return Answer(
            prediction.layout_tables(found), prediction.layout_lines(found, verbose=False)
        )
    return Answer(
        [prediction.prediction_table(found)], prediction.prediction_lines(found, verbose=False)
    )


@answer_of.register
def _(found: WhatIfDocument) -> Answer:
    return Answer([prediction.whatif_table(found)], prediction.whatif_lines(found, verbose=False))


@answer_of.register
def _(found: MemoryReport) -> Answer:
    tables = [memory.memory_table(found), memory.remedies_table(found)]
    return Answer(tables, memory.memory_lines(found))


@answer_of.register
def _(found: Diagnosed) -> Answer:
    lines = diagnosis.diagnosis_lines(found)
    return Answer([diagnosis.diagnosis_table(found)], [diagnosis.verdict(found), *lines])


def text(found: object) -> str:
    """As the command line prints it."""
    answer, written = answer_of(found), io.StringIO()
    console = Console(file=written, width=_COLUMNS, color_system=None)
    for shown in answer.tables:
        console.print(shown)
    return written.getvalue() + "\n".join(answer.lines)


def html(found: object) -> str:
    """Tables and sentences as HTML."""
    answer = answer_of(found)
    lines = "<br>".join(map(escape, answer.lines))
    return "\n".join((*map(_html_table, answer.tables), f"<p>{lines}</p>"))


def _html_table(shown: Table) -> str:
    def row(tag: str, cells: Sequence[str]) -> Iterator[str]:
        yield "<tr>"
        for cell, is_text in zip(cells, shown.is_text, strict=True):
            side = "left" if is_text else "right"
            words = escape(cell).replace("\n", "<br>")
            yield f'<{tag} style="text-align:{side}">{words}</{tag}>'
        yield "</tr>"

    parts = [f"<table><caption>{escape(shown.title)}</caption><thead>", *row("th", shown.headings)]
    parts.append("</thead><tbody>")
    for cells in shown.rows:
        parts += row("td", cells)
    return "".join((*parts, f"</tbody></table><p><small>{escape(shown.caption)}</small></p>"))


def frame(found: PredictionDocument | WhatIfDocument) -> Any:
    """One row per point as a ``pandas.DataFrame``; of a what-if, per scenario.

    Raises
    ------
    UsageError
        Without pandas.
    """
    try:
        pandas = importlib.import_module("pandas")  # not a dependency
    except ImportError:
        raise UsageError("to_frame: needs pandas, got none; pip install pandas") from None
    if isinstance(found, PredictionDocument):
        rows = prediction.rows(found)
    else:
        rows = [
            {"scenario": each.name, **prediction.row(each, each.point)} for each in found.scenarios
        ]
    return pandas.DataFrame(rows)


def figure(found: PredictionDocument) -> "Figure":
    """Speed-up and efficiency over devices.

    Raises
    ------
    UsageError
        Without matplotlib.
    """
    try:
        from perfmodel.report.figures import speedup_figure  # noqa: PLC0415 - matplotlib is an extra
    except ImportError:
        raise UsageError(
            "plot: needs matplotlib, got none; pip install perfmodel[report]"
        ) from None
    return speedup_figure([found])
