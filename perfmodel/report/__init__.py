"""Numbers as text, the words that stand beside them, tables, and how each kind of answer is shown.

One place, so that all reports agree. The module of an answer's kind is imported when it is shown.
"""

import importlib
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from html import escape
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from unicodedata import east_asian_width

from perfmodel.documents import QUIET
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.errors import UsageError, printable
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.statistics import Interval
from perfmodel.units import (
    PREFIXES,
    Seconds,
    format_bytes,
    format_duration,
    format_rate,
    parse_duration,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS: Final[dict[str, str]] = {
    "Step": "One optimizer update, from the end of one step to the end of the next; of a "
    "run the mean without the fastest and the slowest sixth. It may hold several micro-batches "
    "(accumulation).",
    "Weak scaling": "The batch of each device is fixed, so that the global batch grows with the "
    "number of devices.",
    "Strong scaling": "The global batch is fixed, so that the batch of each device shrinks as "
    "devices are added.",
    "Speed-up": "Samples per second over those of one device on its own, without "
    "DistributedDataParallel, at the batch that the scaling fixes. Speed-up over the number of "
    "devices is the scaling efficiency.",
    "Interval": "p5 to p95: 90 % of real outcomes should lie inside. Coverage is the share of "
    "fresh runs that did; 85-97 % is the gate.",
    "Exposed communication": "Step time minus that of the same step with communication that costs "
    "nothing: what is not hidden behind computing.",
    "Error": "Predicted over measured, minus 1: positive means that the prediction was too slow. "
    "Bias is its mean with sign, MAPE the mean of its size, worst its largest size.",
    "Noise floor": "The error of simply repeating a calibrated setting: what even a perfect model "
    "could not predict.",
    "algbw": "Bytes of the whole array over time.",
    "busbw": "Bytes over time, times 2(n-1)/n for all_reduce and (n-1)/n for all_gather and "
    "reduce_scatter among n devices: comparable with the speed of a link.",
    "Evidence: measured": "This very setting ran on this machine.",
    "Evidence: interpolated": "Between settings that ran on this machine.",
    "Evidence: extrapolated": "Beyond what ran on this machine.",
    "Evidence: inferred": "From the step times of runs that others made, by closed forms whose parameters "
    "were fitted to them: no part of a step was measured alone.",
    "Evidence: assumed": "A rule of thumb; not seen on this machine.",
}


def number(value: float, *, like: float | None = None) -> str:
    """Three significant digits but at most two decimals, or rounded to the place ``like`` is."""
    size = abs(value if like is None else like)
    whole_digits = 1 if size < 1 else math.floor(math.log10(size)) + 1
    rounded = round(value, 3 - whole_digits) if whole_digits > 3 else value
    text = f"{rounded:.{max(0, 3 - whole_digits)}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text


def percent(fraction: float, *, signed: bool = False) -> str:
    """Text such as ``4.3 %``, or ``+4.3 %`` where the sign says too slow or too fast."""
    # adding 0.0 turns the -0.0 that rounding leaves into 0.0
    rounded = round(100 * fraction, 1 if abs(fraction) < 1 else 0) + 0.0
    digits = 1 if abs(rounded) < 100 else 0
    return f"{rounded:+.{digits}f} %" if signed else f"{rounded:.{digits}f} %"


def interval(quantity: Interval | None) -> str:
    """Text such as ``6.93 [6.51-7.20]``, over two lines; a dash if it is not known."""
    return "-" if quantity is None else _scaled(quantity, 1.0, "")


def count_interval(quantity: Interval) -> str:
    """Text such as ``13.9 k [13.2-14.6]``, over two lines; k, M and G are powers of 1000."""
    prefix = format_rate(max(quantity.nominal, 1.0), "").split()[1].removesuffix("/s")
    return _scaled(quantity, PREFIXES[prefix], prefix)


def duration_interval(quantity: Interval) -> str:
    """Text such as ``12.3 ms [11.8-13.1]``, over two lines, all in the unit of the first."""
    if quantity.p95 == quantity.p5 == 0:
        return "0 s"
    unit = duration_unit(quantity.nominal or quantity.p95)
    return _scaled(quantity, parse_duration(f"1 {unit}"), unit)


def _scaled(quantity: Interval, scale: float, unit: str) -> str:
    nominal, low, high = (
        number(value / scale, like=quantity.nominal / scale)
        for value in (quantity.nominal, quantity.p5, quantity.p95)
    )
    return f"{nominal} {unit}".rstrip() + f"\n[{low}-{high}]"


def duration_unit(seconds: Seconds) -> str:
    """Symbol of the unit in which a duration reads best, such as ``ms``."""
    return format_duration(seconds).split()[1]


def one_line(cell: str) -> str:
    """Text of a cell within a sentence."""
    return cell.replace("\n", " ")


def gradients(setting: RunSetting) -> str:
    """Text for what happens to the gradients: a bucket cap, or that there is no DDP."""
    if setting.synchronisation is not Synchronisation.DDP:
        return "no DDP" if setting.synchronisation is Synchronisation.NONE else "no_sync"
    return bucket_cap(setting.bucket_cap_mb)


def bucket_cap(bucket_cap_mb: float | None) -> str:
    """Text such as ``25 MiB``."""
    return "default" if bucket_cap_mb is None else f"{bucket_cap_mb:g} MiB"


def short_label(setting: RunSetting) -> str:
    """Text such as ``resnet18, 4 x 32 x 2, 25 MiB``: devices, micro-batch, accumulation, cap."""
    if setting.divided:
        return f"{setting.workload}, {setting.divided}"
    sizes = f"{setting.world_size} x {setting.micro_batch} x {setting.accumulation}"
    return f"{setting.workload}, {sizes}, {gradients(setting)}"


def scaling_words(prediction: PredictionDocument) -> str:
    """Text for what is held fixed as devices are added."""
    fixed = "batch of each device" if prediction.scaling == "weak" else "global batch"
    return f"{prediction.scaling} scaling ({fixed} fixed)"


def counted(count: int, noun: str) -> str:
    """Text such as ``1 rank``, ``2 ranks`` or ``2 micro-batches``."""
    more = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else more}"


def listed(items: Iterable[str]) -> str:
    """Comma-separated, or a dash if there are none."""
    return ", ".join(items) or "-"


def steal_lines(steal: float) -> list[str]:
    """Warning if a hypervisor gave much of the processors to others; ``steal`` is the share."""
    share = percent(steal)
    line = f"CPU steal time: {share} during these runs; repeat them while the host is quiet"
    return [line] if steal > QUIET else []


#: Caveats that are shown without ``--verbose``, and the characters of each.
MOST_CAVEATS: Final = 3
LONGEST_CAVEAT: Final = 80


def caveat_lines(caveats: Sequence[str], *, verbose: bool = False) -> list[str]:
    """Caveats, one per line; without ``verbose`` the first three, each cut to 80 characters."""
    lines = [f"caveat: {caveat}" for caveat in caveats]
    if verbose:
        return lines
    shown = [_cut(line) for line in lines[:MOST_CAVEATS]]
    if shown != lines:
        hidden = len(lines) - len(shown)
        more = f"{counted(hidden, 'more caveat')}: " if hidden else "in full: "
        shown.append(f"{more}--verbose")
    return shown


def _cut(line: str) -> str:
    """The line up to its last clause, or else word, that ends within the limit."""
    if len(line) <= LONGEST_CAVEAT:
        return line
    start = line[: LONGEST_CAVEAT - 3]
    at = max(start.rfind(mark) for mark in ("; ", ": ", ", "))
    return f"{start[:at] if at > LONGEST_CAVEAT // 3 else start.rpartition(' ')[0]} ..."


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

    def text(self, width: int) -> str:
        """The table within ``width`` columns of a terminal; the widest of its own are folded if need be."""
        rows = [
            [printable(cell).split("\n") for cell in row] for row in (self.headings, *self.rows)
        ]
        widths = [
            max(_columns(line) for cell in cells for line in cell)
            for cells in zip(*rows, strict=True)
        ]
        while sum(widths) + len(widths) - 1 > width and max(widths) > 1:
            widths[widths.index(max(widths))] -= 1
        whole = sum(widths) + len(widths) - 1
        title, caption = printable(self.title), printable(self.caption)
        # narrow columns leave the words around them whole
        around = min(width, max([whole, *map(_columns, f"{title} {caption}".split())]))
        lines = [" " * ((whole - _columns(line)) // 2) + line for line in _filled(title, around)]
        for number, row in enumerate(rows):
            folded = [
                [
                    part
                    for line in cell
                    for part in ([line] if _columns(line) <= n else _filled(line, n))
                ]
                for cell, n in zip(row, widths, strict=True)
            ]
            if number == 0:  # headings stand on their line
                height = max(map(len, folded))
                folded = [[""] * (height - len(cell)) + cell for cell in folded]
            for texts in zip_longest(*folded, fillvalue=""):
                places = zip(texts, widths, self.is_text, strict=True)
                lines.append(" ".join(_placed(text, n, left=left) for text, n, left in places))
            if number == 0:
                lines.append("─" * whole)
        lines += _filled(caption, around)
        return "\n".join(_placed(line, whole, left=True) for line in lines)

    def html(self) -> str:
        """For a page, or for a notebook, which has no style sheet; names are text, never markup."""
        left, right = 'class="text" style="text-align:left"', 'style="text-align:right"'

        def row(tag: str, cells: Iterable[str]) -> str:
            found = (
                f"<{tag} {left if is_text else right}>{escape(cell)}</{tag}>"
                for cell, is_text in zip(cells, self.is_text, strict=True)
            )
            return f"<tr>{''.join(found)}</tr>".replace("\n", "<br>")

        head = row("th", (each.replace("-\n", "").replace("\n", " ") for each in self.headings))
        rows = "\n".join(row("td", cells) for cells in self.rows)
        return (
            f"<table>\n<caption>{escape(self.title)}</caption>\n<thead>{head}</thead>\n<tbody>\n{rows}\n"
            "</tbody>\n</table>"
        )


def wrapped(line: str, width: int) -> str:
    """A sentence over several lines, the further ones indented; words stay whole.

    So do commands, to be copied, and a path after one word, for scripts.
    """
    if len(line) <= width or line.lstrip().startswith("$ ") or line.count(" ") < 2:
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


def _filled(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns; only a longer word is broken."""
    lines = [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".lstrip()
        if _columns(line) <= width:
            lines[-1] = line
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and _columns(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line]


def _columns(text: str) -> int:
    """Columns of a terminal that a text takes: letters of some scripts take two."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)


def _placed(text: str, width: int, *, left: bool) -> str:
    """Text in a column; numbers stand right, without blanks behind them."""
    text = text if left else text.rstrip()
    rest = " " * (width - _columns(text))
    return text + rest if left else rest + text


def table(
    title: str,
    rows: Iterable[_Row],
    columns: Mapping[str, str | Callable[[_Row], object]],
    *,
    caption: str = "",
) -> Table:
    """One row per item.

    ``columns``: What is shown of an item, by heading; ``<`` before a heading marks a column of text. A text
    such as ``"setting.world_size"`` or ``"errors.bias:+%"`` is a path of attributes, keys and positions and the
    form of its value, which is otherwise that of the unit in its name. ``None`` is a dash.
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


def facts(title: str, found: Iterable[tuple[str, object]]) -> Table:
    """Names and values."""
    return table(title, found, {"<What": "0", "<Value": "1"})


#: As the command line without a terminal.
_COLUMNS: Final = 80


class Kind(NamedTuple):
    """How answers of one type are shown: by functions of a module of this package."""

    module: str
    tables: tuple[str, ...] = ()
    lines: str = ""
    records: str | Callable[[Any], Any] = lambda _: ()
    """What rows are made of, by a function of the module or here; each nested value becomes a column."""


#: By the name of the type.
_KINDS: Final = {
    "PredictionDocument": Kind("prediction", ("prediction_table",), "prediction_lines", "rows"),
    "GrowthDocument": Kind("prediction", ("growth_table",), "growth_lines"),
    "WhatIfDocument": Kind("prediction", ("whatif_table",), "whatif_lines", "scenario_rows"),
    "Explanation": Kind("prediction", (), "explanation_lines", attrgetter("losses")),
    "MemoryReport": Kind(
        "memory",
        ("memory_table", "remedies_table"),
        "memory_lines",
        lambda found: found.as_json()["techniques"],
    ),
    "Diagnosed": Kind(
        "diagnosis", ("diagnosis_table",), "diagnosis_lines", attrgetter("found.fits")
    ),
    "ParallelismPlanDocument": Kind(
        "plan", ("search_table",), "search_lines", attrgetter("ranked")
    ),
    "PlanDocument": Kind(
        "plan",
        ("plan_table",),
        "plan_lines",
        lambda found: [
            {"choice": f"{row.option}, {row.devices}", **row.model_dump()} for row in found.ranked
        ],
    ),
    "CostDocument": Kind("plan", ("cost_table",), "cost_lines", attrgetter("options")),
    "GoodputDocument": Kind(
        "plan",
        ("goodput_table",),
        "goodput_lines",
        lambda found: [
            {"activity": name, "mean_s": spent_s} for name, spent_s in found.spent_mean_s.items()
        ],
    ),
    "AcceptanceTerms": Kind("plan", ("terms_table",), "terms_lines", attrgetter("clause")),
    "AcceptanceDocument": Kind(
        "plan", ("judgement_table",), "judgement_lines", attrgetter("judged")
    ),
    "ProfileDiffDocument": Kind(
        "profile", ("differences_table", "moved_table"), "diff_lines", attrgetter("differences")
    ),
    "WorkloadDocument": Kind("memory", (), "trace_lines"),
    "BatchDocument": Kind("plan", ("batch_table",), "batch_lines"),
    "ProfileDocument": Kind("profile", ("profile_table",)),
    "ValidationDocument": Kind("validation", ("steps_table",), "summary_lines"),
    "ModelsValidationDocument": Kind("validation", ("models_table",), "models_lines"),
    "PublishedDocument": Kind("validation", ("series_table",), "published_lines"),
    "NetworkVerdict": Kind("validation", ("series_table",), "verdict_lines"),
    "StrategiesDocument": Kind(
        "validation", ("strategies_table", "families_table"), "verdict_lines"
    ),
}


def _kind_of(found: object) -> tuple[Kind, Any]:
    """How an answer is shown, and the module that shows it."""
    kind = _KINDS[type(found).__name__]
    return kind, importlib.import_module(f"perfmodel.report.{kind.module}")


def shown(found: object, **more: bool) -> tuple[list[Table], list[str]]:
    """Tables that hold something, and sentences; ``verbose=True``: all of them, in full."""
    kind, module = _kind_of(found)
    tables = [getattr(module, name)(found) for name in kind.tables]
    lines = getattr(module, kind.lines)(found, **more) if kind.lines else ()
    return [table for table in tables if table.rows], [*lines]


def text_of(found: object) -> str:
    """As the command line prints it."""
    tables, lines = shown(found)
    written = [table.text(_COLUMNS) for table in tables]
    return "\n".join([*written, *(wrapped(line, _COLUMNS) for line in lines)])


def title_of(found: object) -> str:
    """Of the first table, or the first sentence where there is none."""
    tables, lines = shown(found)
    return tables[0].title if tables else lines[0]


def html_of(found: object) -> str:
    """Tables and sentences as HTML."""
    tables, lines = shown(found)
    written = (f"{t.html()}<p><small>{escape(t.caption)}</small></p>" for t in tables)
    return "\n".join((*written, f"<p>{'<br>'.join(map(escape, lines))}</p>"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


def rows_of(found: object) -> list[dict[str, Any]]:
    """A record per point, cause, change or layout of an answer, in SI units."""
    from pydantic_core import to_jsonable_python  # noqa: PLC0415

    kind, module = _kind_of(found)
    records = getattr(module, kind.records) if isinstance(kind.records, str) else kind.records
    return [dict(_flat(each)) for each in to_jsonable_python(records(found))]


def frame_of(found: object) -> Any:
    """A ``pandas.DataFrame`` of the rows.

    Raises ``UsageError`` without pandas.
    """
    try:
        pandas = importlib.import_module("pandas")  # not a dependency
    except ImportError:
        raise UsageError("to_frame: needs pandas, got none; pip install pandas") from None
    return pandas.DataFrame(rows_of(found))


#: Of answers that rank or count: the columns of names and of lengths, the axis, and the unit of the lengths.
_BARS: Final = {
    "WhatIfDocument": ("scenario", "step_nominal_s", "Step [s]", 1.0),
    "Explanation": ("cause", "lost_s", "Lost time [ms]", 1e-3),
    "MemoryReport": ("name", "needed_bytes", "Memory [GiB]", 2.0**30),
    "Diagnosed": ("cause", "odds", "Odds [%]", 0.01),
    "ParallelismPlanDocument": ("layout", "step_s_nominal", "Step [s]", 1.0),
    "PlanDocument": ("choice", "cost_nominal", "Cost", 1.0),
    "CostDocument": ("cost_name", "per_useful_device_hour", "Cost of a useful device-hour", 1.0),
    "GoodputDocument": ("activity", "mean_s", "Mean time [days]", 86400.0),
    "AcceptanceTerms": ("name", "reference_error", "Uncertainty [%]", 0.01),
    "AcceptanceDocument": ("clause_name", "probability_kept", "Kept with [%]", 0.01),
    "ProfileDiffDocument": ("what", "z", "Difference over its uncertainty", 1.0),
}
#: More bars are not read.
_MOST_BARS: Final = 24


def figure_of(found: object) -> "Figure":
    """Speed-up and efficiency over devices; of answers that rank, a bar per row.

    Raises ``UsageError`` without matplotlib.
    """
    try:
        figures = importlib.import_module("perfmodel.report.figures")
    except ImportError:
        raise UsageError(
            "plot: needs matplotlib, got none; pip install '.[report]' in the clone"
        ) from None
    drawn: Figure
    if isinstance(found, PredictionDocument):
        drawn = figures.speedup_figure([found])
    else:
        name, length, axis, unit = _BARS[type(found).__name__]
        lengths = {row[name]: (row[length] or 0) / unit for row in rows_of(found)[:_MOST_BARS]}
        drawn = figures.bars_figure(lengths, title=title_of(found), x=axis)
    return drawn
