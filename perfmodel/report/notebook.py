"""Answers in a notebook: as on the command line, as HTML, as a data frame, as a picture."""

import dataclasses
import importlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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


def _records(entries: str, **columns: str) -> Callable[[Any], list[Row]]:
    """A row per record of a field: its columns by where their values stand."""
    paths = {name: attrgetter(path) for name, path in columns.items()}

    def rows(found: Any) -> list[Row]:
        return [
            {name: get(entry) for name, get in paths.items()}
            for entry in attrgetter(entries)(found)
        ]

    return rows


def _interval(name: str, unit: str = "") -> dict[str, str]:
    return {f"{name}_{part}{unit}": f"{name}{unit}.{part}" for part in ("p5", "nominal", "p95")}


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
    rows: Callable[[Any], list[Row]] | None = None
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


def _reported(found: MemoryReport) -> list[Row]:
    time = "step_s" if found.in_seconds else "step_ratio"
    where = {"change": "name", "needed_bytes": "memory.needed_bytes", time: "step_s"}
    return _records("techniques", **where)(found)


def _planned(found: PlanDocument) -> list[Row]:
    names = ("option", "devices", "micro_batch", "layout", "probability")
    rows = _records(
        "ranked",
        **{name: name for name in names},
        **_interval("cost"),
        **_interval("elapsed", "_s"),
    )
    return [{"choice": f"{row['option']}, {row['devices']}", **row} for row in rows(found)]


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
        _records(
            "losses", cause="cause.value", lost_s="lost_s", change="one_change", gain_s="gain_s"
        ),
        Bars("lost_s", "Lost time [ms]", 1e-3, "cause"),
    ),
    MemoryReport: Kind(
        _tables(memory.memory_table, memory.remedies_table),
        memory.memory_lines,
        _reported,
        Bars("needed_bytes", "Memory [GiB]", 2.0**30, "change"),
    ),
    Diagnosed: Kind(
        _tables(diagnosis.diagnosis_table),
        lambda found: [diagnosis.verdict(found), *diagnosis.diagnosis_lines(found)],
        lambda found: [dataclasses.asdict(fit) for fit in found.found.fits],
        Bars("odds", "Odds [%]", 0.01, "cause"),
    ),
    ParallelismPlanDocument: Kind(
        _tables(prediction.search_table),
        prediction.search_lines,
        _records(
            "ranked",
            **{name: name for name in ("rank", "layout", "tokens_per_s", "mfu")},
            needed_bytes="needed_bytes",
            fit_probability="fit_probability",
            **_interval("step", "_s"),
        ),
        Bars("step_nominal_s", "Step [s]", 1.0, "layout"),
    ),
    PlanDocument: Kind(
        _tables(plan.plan_table),
        plan.plan_lines,
        _planned,
        Bars("cost_nominal", "Cost", 1.0, "choice"),
    ),
    CostDocument: Kind(
        _tables(plan.cost_table),
        plan.cost_lines,
        _records(
            "options",
            option="cost.name",
            yearly="yearly",
            per_useful_device_hour="per_useful_device_hour",
        ),
        Bars("per_useful_device_hour", "Cost of a useful device-hour", 1.0, "option"),
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
        _records(
            "clause",
            clause="name",
            kind="kind.value",
            unit="unit",
            limit="limit",
            reference="reference",
            reference_error="reference_error",
        ),
        Bars("reference_error", "Uncertainty [%]", 0.01, "clause"),
    ),
    AcceptanceDocument: Kind(
        _tables(batch.judgement_table),
        batch.judgement_lines,
        _records(
            "judged",
            clause="clause.name",
            limit="clause.limit",
            unit="clause.unit",
            delivered="delivered",
            probability_kept="probability_kept",
            verdict="verdict.value",
        ),
        Bars("probability_kept", "Kept with [%]", 0.01, "clause"),
    ),
    ProfileDiffDocument: Kind(
        _diff_tables,
        profile.diff_lines,
        _records(
            "differences",
            parameter="what",
            old="old",
            new="new",
            unit="unit",
            z="z",
            adjusted_p="adjusted_p",
            is_change="is_change",
        ),
        Bars("z", "Difference over its uncertainty", 1.0, "parameter"),
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
    rows = _KINDS[type(found)].rows
    assert rows is not None, found
    return rows(found)


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
