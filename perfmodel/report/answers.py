"""Answers as text, HTML, a data frame, a picture: each kind is described once, and its module imported when shown."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.documents.prediction import PredictionDocument
from perfmodel.errors import UsageError
from perfmodel.report import Table, wrapped
from perfmodel.report.prediction import row, rows

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
    """How answers of one type are shown: by functions of a module of this package."""

    module: str
    tables: tuple[str, ...] = ()
    lines: str = ""
    records: Callable[[Any], Any] = lambda _: ()
    """What rows are made of; each nested value becomes a column."""
    bars: Bars | None = None


#: More bars are not read.
_MOST_BARS: Final = 24
#: By the name of the type.
_KINDS: Final = {
    "PredictionDocument": Kind("prediction", ("prediction_table",), "prediction_lines", rows),
    "WhatIfDocument": Kind(
        "prediction",
        ("whatif_table",),
        "whatif_lines",
        lambda found: [{"scenario": s.name, **row(s, s.point)} for s in found.scenarios],
        Bars("step_nominal_s", "Step [s]", 1.0, "scenario"),
    ),
    "Explanation": Kind(
        "prediction",
        (),
        "explanation_lines",
        attrgetter("losses"),
        Bars("lost_s", "Lost time [ms]", 1e-3, "cause"),
    ),
    "MemoryReport": Kind(
        "memory",
        ("memory_table", "remedies_table"),
        "memory_lines",
        lambda found: found.as_json()["techniques"],
        Bars("needed_bytes", "Memory [GiB]", 2.0**30, "name"),
    ),
    "Diagnosed": Kind(
        "diagnosis",
        ("diagnosis_table",),
        "diagnosis_lines",
        attrgetter("found.fits"),
        Bars("odds", "Odds [%]", 0.01, "cause"),
    ),
    "ParallelismPlanDocument": Kind(
        "plan",
        ("search_table",),
        "search_lines",
        attrgetter("ranked"),
        Bars("step_s_nominal", "Step [s]", 1.0, "layout"),
    ),
    "PlanDocument": Kind(
        "plan",
        ("plan_table",),
        "plan_lines",
        lambda found: [
            {"choice": f"{row.option}, {row.devices}", **row.model_dump()} for row in found.ranked
        ],
        Bars("cost_nominal", "Cost", 1.0, "choice"),
    ),
    "CostDocument": Kind(
        "plan",
        ("cost_table",),
        "cost_lines",
        attrgetter("options"),
        Bars("per_useful_device_hour", "Cost of a useful device-hour", 1.0, "cost_name"),
    ),
    "GoodputDocument": Kind(
        "plan",
        ("goodput_table",),
        "goodput_lines",
        lambda found: [
            {"activity": name, "mean_s": spent_s} for name, spent_s in found.spent_mean_s.items()
        ],
        Bars("mean_s", "Mean time [days]", 86400.0, "activity"),
    ),
    "AcceptanceTerms": Kind(
        "batch",
        ("terms_table",),
        "terms_lines",
        attrgetter("clause"),
        Bars("reference_error", "Uncertainty [%]", 0.01, "name"),
    ),
    "AcceptanceDocument": Kind(
        "batch",
        ("judgement_table",),
        "judgement_lines",
        attrgetter("judged"),
        Bars("probability_kept", "Kept with [%]", 0.01, "clause_name"),
    ),
    "ProfileDiffDocument": Kind(
        "profile",
        ("differences_table", "moved_table"),
        "diff_lines",
        attrgetter("differences"),
        Bars("z", "Difference over its uncertainty", 1.0, "what"),
    ),
    "WorkloadDocument": Kind("memory", (), "trace_lines"),
    "BatchDocument": Kind("batch", ("batch_table",), "batch_lines"),
    "ProfileDocument": Kind("profile", ("profile_table",)),
    "ValidationDocument": Kind("validation", ("steps_table",), "summary_lines"),
    "ModelsValidationDocument": Kind("validation", ("models_table",), "models_lines"),
    "PublishedDocument": Kind("validation", ("published_table",), "published_lines"),
    "NetworkVerdict": Kind("validation", ("network_table",), "verdict_lines"),
    "StrategiesDocument": Kind(
        "validation", ("strategies_table", "families_table"), "verdict_lines"
    ),
}


def shown(found: object, **more: bool) -> tuple[list[Table], list[str]]:
    """Tables that hold something, and sentences; ``verbose=True``: all of them, in full."""
    kind = _KINDS[type(found).__name__]
    module = importlib.import_module(f"perfmodel.report.{kind.module}")
    tables = [getattr(module, name)(found) for name in kind.tables]
    lines = getattr(module, kind.lines)(found, **more) if kind.lines else ()
    return [table for table in tables if table.rows], [*lines]


def text(found: object) -> str:
    """As the command line prints it."""
    tables, lines = shown(found)
    written = [table.text(_COLUMNS) for table in tables]
    return "\n".join([*written, *(wrapped(line, _COLUMNS) for line in lines)])


def title(found: object) -> str:
    """Of the first table, or the first sentence where there is none."""
    tables, lines = shown(found)
    return tables[0].title if tables else lines[0]


def html(found: object) -> str:
    """Tables and sentences as HTML."""
    tables, lines = shown(found)
    written = (f"{t.html()}<p><small>{escape(t.caption)}</small></p>" for t in tables)
    return "\n".join((*written, f"<p>{'<br>'.join(map(escape, lines))}</p>"))


def rows_of(found: object) -> list[Row]:
    """A record per point, cause, change or layout of an answer, in SI units."""
    from pydantic_core import to_jsonable_python  # noqa: PLC0415

    records = to_jsonable_python(_KINDS[type(found).__name__].records(found))
    return [dict(_flat(each)) for each in records]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


def frame(found: object) -> Any:
    """A ``pandas.DataFrame`` of the rows.

    Raises ``UsageError`` without pandas.
    """
    try:
        pandas = importlib.import_module("pandas")  # not a dependency
    except ImportError:
        raise UsageError("to_frame: needs pandas, got none; pip install pandas") from None
    return pandas.DataFrame(rows_of(found))


def figure(found: object) -> "Figure":
    """Speed-up and efficiency over devices; of answers that rank, a bar per row.

    Raises ``UsageError`` without matplotlib.
    """
    try:
        from perfmodel.report.figures import bars_figure, speedup_figure  # noqa: PLC0415 - matplotlib is an extra
    except ImportError:
        raise UsageError(
            "plot: needs matplotlib, got none; pip install '.[report]' in the clone"
        ) from None
    if isinstance(found, PredictionDocument):
        return speedup_figure([found])
    bars = _KINDS[type(found).__name__].bars
    assert bars is not None, found
    length, axis, unit, name = bars
    rows = rows_of(found)[:_MOST_BARS]
    lengths = {str(row[name]): float(str(row[length] or 0)) / unit for row in rows}
    return bars_figure(lengths, title=title(found), x=axis)
