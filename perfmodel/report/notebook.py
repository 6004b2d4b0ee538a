"""Answers in a notebook: as on the command line, as HTML, as a data frame, as a picture."""

import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic_core import to_jsonable_python
from rich.console import Console

from perfmodel.answer.memory import MemoryReport
from perfmodel.diagnosis.asked import Diagnosed
from perfmodel.documents.acceptance import (
    AcceptanceDocument,
    AcceptanceTerms,
    ProfileDiffDocument,
)
from perfmodel.documents.budget import CostDocument, GoodputDocument
from perfmodel.documents.plan import PlanDocument
from perfmodel.documents.prediction import (
    ParallelismPlanDocument,
    PredictionDocument,
    WhatIfDocument,
)
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.explanation import Explanation
from perfmodel.report import (
    Table,
    batch,
    diagnosis,
    explanation,
    memory,
    plan,
    prediction,
    profile,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: As the command line without a terminal.
_COLUMNS: Final = 80

Row = dict[str, object]


class Bars(NamedTuple):
    """A bar per row: its length and the name beside it are columns."""

    length: str
    axis: str
    unit: float
    name: str


class Kind(NamedTuple):
    """How answers of one type are shown."""

    tables: Callable[[Any], Sequence[Table]]
    lines: Callable[[Any], Sequence[str]]
    records: Callable[[Any], Any] = lambda _: ()
    """What rows are made of; each nested value becomes a column."""
    bars: Bars | None = None


def _tables(*made: Callable[[Any], Table]) -> Callable[[Any], Sequence[Table]]:
    return lambda found: [table(found) for table in made]


def _predicted(found: PredictionDocument) -> Sequence[Table]:
    is_layout = any(point.layout for point in found.points)
    return [(prediction.layout_table if is_layout else prediction.prediction_table)(found)]


def _predicted_lines(found: PredictionDocument) -> Sequence[str]:
    is_layout = any(point.layout for point in found.points)
    lines = prediction.layout_lines if is_layout else prediction.prediction_lines
    return lines(found, verbose=False)


def _diff_tables(found: ProfileDiffDocument) -> Sequence[Table]:
    moved = [profile.moved_table(found)] if found.predictions else []
    return [profile.differences_table(found), *moved]


#: More bars are not read.
_MOST_BARS: Final = 24
_KINDS: Final[dict[type, Kind]] = {
    PredictionDocument: Kind(_predicted, _predicted_lines, prediction.rows),
    WhatIfDocument: Kind(
        _tables(prediction.whatif_table),
        partial(prediction.whatif_lines, verbose=False),
        lambda found: [
            {"scenario": each.name, **prediction.row(each, each.point)} for each in found.scenarios
        ],
        Bars("step_nominal_s", "Step [s]", 1.0, "scenario"),
    ),
    Explanation: Kind(
        _tables(),
        partial(explanation.explanation_lines, verbose=False),
        attrgetter("losses"),
        Bars("lost_s", "Lost time [ms]", 1e-3, "cause"),
    ),
    MemoryReport: Kind(
        _tables(memory.memory_table, memory.remedies_table),
        memory.memory_lines,
        lambda found: found.as_json()["techniques"],
        Bars("needed_bytes", "Memory [GiB]", 2.0**30, "name"),
    ),
    Diagnosed: Kind(
        _tables(diagnosis.diagnosis_table),
        lambda found: [diagnosis.verdict(found), *diagnosis.diagnosis_lines(found)],
        attrgetter("found.fits"),
        Bars("odds", "Odds [%]", 0.01, "cause"),
    ),
    ParallelismPlanDocument: Kind(
        _tables(prediction.search_table),
        prediction.search_lines,
        attrgetter("ranked"),
        Bars("step_s_nominal", "Step [s]", 1.0, "layout"),
    ),
    PlanDocument: Kind(
        _tables(plan.plan_table),
        plan.plan_lines,
        lambda found: [
            {"choice": f"{row.option}, {row.devices}", **row.model_dump()} for row in found.ranked
        ],
        Bars("cost_nominal", "Cost", 1.0, "choice"),
    ),
    CostDocument: Kind(
        _tables(plan.cost_table),
        plan.cost_lines,
        attrgetter("options"),
        Bars("per_useful_device_hour", "Cost of a useful device-hour", 1.0, "cost_name"),
    ),
    GoodputDocument: Kind(
        _tables(plan.goodput_table),
        plan.goodput_lines,
        lambda found: [
            {"activity": name, "mean_s": spent_s} for name, spent_s in found.spent_mean_s.items()
        ],
        Bars("mean_s", "Mean time [days]", 86400.0, "activity"),
    ),
    AcceptanceTerms: Kind(
        _tables(batch.terms_table),
        batch.terms_lines,
        attrgetter("clause"),
        Bars("reference_error", "Uncertainty [%]", 0.01, "name"),
    ),
    AcceptanceDocument: Kind(
        _tables(batch.judgement_table),
        batch.judgement_lines,
        attrgetter("judged"),
        Bars("probability_kept", "Kept with [%]", 0.01, "clause_name"),
    ),
    ProfileDiffDocument: Kind(
        _diff_tables,
        profile.diff_lines,
        attrgetter("differences"),
        Bars("z", "Difference over its uncertainty", 1.0, "what"),
    ),
    WorkloadDocument: Kind(
        _tables(),
        lambda found: memory.trace_lines(found, micro_batch=found.trace.traced_micro_batches[0]),
    ),
}


def text(found: object) -> str:
    """As the command line prints it."""
    kind, written = _KINDS[type(found)], io.StringIO()
    console = Console(file=written, width=_COLUMNS, color_system=None)
    for shown in kind.tables(found):
        console.print(shown)
    return written.getvalue() + "\n".join(wrapped(line, _COLUMNS) for line in kind.lines(found))


def html(found: object) -> str:
    """Tables and sentences as HTML."""
    kind = _KINDS[type(found)]
    tables = (f"{t.html()}<p><small>{escape(t.caption)}</small></p>" for t in kind.tables(found))
    return "\n".join((*tables, f"<p>{'<br>'.join(map(escape, kind.lines(found)))}</p>"))


def rows_of(found: object) -> list[Row]:
    """A record per point, cause, change or layout of an answer, in SI units."""
    records = to_jsonable_python(_KINDS[type(found)].records(found))
    return [dict(_flat(each)) for each in records]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


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
    kind = _KINDS[type(found)]
    assert kind.bars is not None, found
    length, axis, unit, name = kind.bars
    rows = rows_of(found)[:_MOST_BARS]
    lengths = {str(row[name]): float(str(row[length] or 0)) / unit for row in rows}
    [title, *_] = [t.title for t in kind.tables(found)] or [kind.lines(found)[0]]
    return bars_figure(lengths, title=title, x=axis)
