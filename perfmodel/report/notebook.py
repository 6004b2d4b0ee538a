"""Answers in a notebook: as on the command line, as HTML, as a data frame, as a picture."""

import dataclasses
import importlib
import io
from collections.abc import Sequence
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console

from perfmodel.answer.memory import MemoryReport
from perfmodel.diagnosis.asked import Diagnosed
from perfmodel.documents.prediction import (
    ParallelismPlanDocument,
    PredictionDocument,
    WhatIfDocument,
)
from perfmodel.documents.workload import WorkloadDocument
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
            [prediction.layout_table(found)], prediction.layout_lines(found, verbose=False)
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


@answer_of.register
def _(found: ParallelismPlanDocument) -> Answer:
    return Answer([prediction.search_table(found)], prediction.search_lines(found))


@answer_of.register
def _(found: WorkloadDocument) -> Answer:
    return Answer([], memory.trace_lines(found, micro_batch=found.trace.traced_micro_batches[0]))


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
    tables = (f"{t.html()}<p><small>{escape(t.caption)}</small></p>" for t in answer.tables)
    return "\n".join((*tables, f"<p>{'<br>'.join(map(escape, answer.lines))}</p>"))


@singledispatch
def rows_of(found: object) -> list[dict[str, object]]:
    """A record per point of an answer, in SI units."""
    raise TypeError(f"a {type(found).__name__} has no rows")


@rows_of.register
def _(found: PredictionDocument) -> list[dict[str, object]]:
    return prediction.rows(found)


@rows_of.register
def _(found: WhatIfDocument) -> list[dict[str, object]]:
    return [{"scenario": each.name, **prediction.row(each, each.point)} for each in found.scenarios]


@rows_of.register
def _(found: MemoryReport) -> list[dict[str, object]]:
    time = "step_s" if found.in_seconds else "step_ratio"
    return [
        {"change": each.name, "needed_bytes": each.memory.needed_bytes, time: each.step_s}
        for each in found.techniques
    ]


@rows_of.register
def _(found: Diagnosed) -> list[dict[str, object]]:
    return [dataclasses.asdict(fit) for fit in found.found.fits]


@rows_of.register
def _(found: ParallelismPlanDocument) -> list[dict[str, object]]:
    names = ("rank", "layout", "tokens_per_s", "mfu", "needed_bytes", "fit_probability")
    return [
        {name: getattr(each, name) for name in names}
        | {f"step_{name}_s": getattr(each.step_s, name) for name in ("p5", "nominal", "p95")}
        for each in found.ranked
    ]


def frame(found: object) -> Any:
    """A ``pandas.DataFrame`` of the rows.

    Raises
    ------
    UsageError
        Without pandas.
    """
    try:
        pandas = importlib.import_module("pandas")  # not a dependency
    except ImportError:
        raise UsageError("to_frame: needs pandas, got none; pip install pandas") from None
    return pandas.DataFrame(rows_of(found))


#: Of answers that rank: the column of the bars, their unit and its size in SI, and the names beside them.
_BARS: Final = {
    WhatIfDocument: ("step_nominal_s", "Step [s]", 1.0, "scenario"),
    MemoryReport: ("needed_bytes", "Memory [GiB]", 2.0**30, "change"),
    Diagnosed: ("odds", "Odds [%]", 0.01, "cause"),
    ParallelismPlanDocument: ("step_nominal_s", "Step [s]", 1.0, "layout"),
}


def figure(found: object) -> "Figure":
    """Speed-up and efficiency over devices; of answers that rank, a bar per row.

    Raises
    ------
    UsageError
        Without matplotlib.
    """
    try:
        from perfmodel.report.figures import bars_figure, speedup_figure  # noqa: PLC0415 - matplotlib is an extra
    except ImportError:
        raise UsageError(
            "plot: needs matplotlib, got none; pip install perfmodel[report]"
        ) from None
    if isinstance(found, PredictionDocument):
        return speedup_figure([found])
    column, axis, unit, name = _BARS[type(found)]
    lengths = {str(row[name]): float(str(row[column])) / unit for row in rows_of(found)}
    return bars_figure(lengths, title=answer_of(found).tables[0].title, x=axis)
