"""Figures of a profile, predictions, a validation and a plan; pictures of a report, with titles and captions."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from perfmodel.documents.plan import PlanDocument
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine import Evidence
from perfmodel.report import duration_unit, percent
from perfmodel.report.prediction import causes_of
from perfmodel.statistics import Interval
from perfmodel.step import Cause
from perfmodel.units import DAY_S, Seconds, parse_duration

#: Okabe and Ito, "Color Universal Design", 2008, without yellow (too pale on paper).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS: Final = ("o", "s", "^", "v", "D", "P", "X")
LINES: Final = ("-", "--", "-.", ":")
GREY: Final = "#767676"
#: What a prediction may be off by and still be called right, in plots.
BAND_FRACTION: Final = 0.06


def new_figure(*, width_in: float = 6.4, height_in: float = 4.2) -> Figure:
    """Empty figure that belongs to nobody: pyplot never hears of it."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Name the axes, with units, and draw a quiet grid."""
    axes.set_title(plain(title), fontsize="medium")
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))
    axes.grid(visible=True, which="major", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_below(figure: Figure) -> None:
    """Draw one legend for all panels, each name once."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
    if named:
        figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            ncols=min(4 if figure.get_figwidth() > 8 else 3, len(named)),
            fontsize="small",
            frameon=False,
        )


def time_unit(longest_s: Seconds) -> tuple[str, float]:
    """Symbol of the unit in which the longest time reads well, and its seconds."""
    unit = duration_unit(longest_s)
    return unit, parse_duration(f"1 {unit}")


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: no dollar opens a formula, no underscore hides it."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def note_if_empty(axes: Axes, *, is_empty: bool) -> None:
    """Say that there is nothing to see, rather than show an empty frame."""
    if is_empty:
        axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes, color=GREY)


def figure_bytes(figure: Figure, *, format: Literal["svg", "png"]) -> bytes:  # noqa: A002
    """Content of an image file; the same figure always gives the same bytes."""
    metadata = (
        {"Date": None, "Creator": None, "Format": None, "Type": None}
        if format == "svg"
        else {"Software": None}
    )
    file = io.BytesIO()
    # text stays text in SVG: small, searchable, and no glyph ids to clash
    with mpl.rc_context({"svg.hashsalt": "perfmodel", "svg.fonttype": "none"}):
        figure.savefig(file, format=format, dpi=150, metadata=metadata)
    return file.getvalue()


_ID: Final = re.compile(r'(\bid="|url\(#|href="#)')


def parity_figure(validation: ValidationDocument) -> Figure:
    """Predicted over measured step times; on the diagonal the two agree."""
    figure = new_figure(width_in=5.2, height_in=4.8)
    axes = figure.add_subplot()
    entries = validation.settings
    times = ((e.measured_s, e.predicted_s.p5, e.predicted_s.p95) for e in entries)
    times_s = [time_s for three in times for time_s in three if time_s > 0]
    unit, scale = time_unit(float(np.median(times_s)))
    ends = np.array([min(times_s) / 1.3, max(times_s) * 1.3]) / scale
    axes.plot(ends, ends, color=GREY, linewidth=1, label="predicted = measured")
    band = percent(BAND_FRACTION).replace(".0", "")
    low, high = ends * (1 - BAND_FRACTION), ends * (1 + BAND_FRACTION)
    axes.fill_between(ends, low, high, color=GREY, alpha=0.25, linewidth=0, label=f"+-{band}")
    for place, workload in enumerate(sorted({entry.setting.workload for entry in entries})):
        own = [entry for entry in entries if entry.setting.workload == workload]
        measured = np.array([entry.measured_s for entry in own]) / scale
        low, middle, high = _intervals([entry.predicted_s for entry in own]) / scale
        axes.errorbar(
            measured,
            middle,
            xerr=measured * [entry.measured_relative_error for entry in own],
            yerr=[middle - low, high - middle],
            linestyle="none",
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            markersize=5,
            markeredgecolor="black",
            markeredgewidth=0.5,
            elinewidth=1,
            label=plain(workload),
        )
    axes.set(xscale="log", yscale="log", xlim=tuple(ends), ylim=tuple(ends), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        # 1, 2 and 5 of each decade as plain numbers, so that no range is left without a name
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    title = "Fresh runs; bars: predicted p5-p95, measured +- 1 std. error"
    finish(axes, title=title, x=f"Measured step [{unit}]", y=f"Predicted step [{unit}]")
    axes.legend(fontsize="small", frameon=False)
    return figure


def _intervals(values: Iterable[Interval]) -> np.ndarray:
    """Rows p5, nominal and p95."""
    return np.array([(value.p5, value.nominal, value.p95) for value in values]).reshape(-1, 3).T


CAUSE_COLOURS = (*COLOURS, GREY, "#F0E442", "#8C564B")
COMMUNICATION = frozenset({Cause.ALL_REDUCE, Cause.BROADCAST, Cause.BUCKET})


#: Title and axis of what a speed-up is drawn as.
_PANELS: Final = {
    "speedup": ("Speed-up, band: 90 % interval", "Throughput over that of one device [ratio]"),
    "efficiency": ("Scaling efficiency", "Speed-up over devices [%]"),
}


def speedup_figure(
    predictions: Sequence[PredictionDocument], *, panels: Sequence[str] = tuple(_PANELS)
) -> Figure:
    """Speed-up and efficiency over devices: interval as a band, real runs as diamonds.

    No device is faster than alone: the band ends at the ideal. Shaded: what the network was not measured for.
    """
    figure = new_figure(width_in=9.2 if len(panels) > 1 else 6.4)
    drawn = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True))
    sizes: set[int] = set()
    figure.suptitle(plain(_subject(predictions)), fontsize="medium")
    for place, prediction in enumerate(predictions):
        found = {p.setting.world_size: p.speedup for p in prediction.points if p.speedup}
        runs = {run.world_size: run.speedup for run in prediction.measured if run.speedup}
        sizes |= {*found, *runs}
        counts, ran = np.array(sorted(found)), np.array([*runs])
        speedups = _intervals(found[int(count)] for count in counts)
        speedups = np.minimum(speedups, np.maximum(counts, speedups[1]))
        measured = np.array([*runs.values()])
        shown = {
            "speedup": (speedups, measured),
            "efficiency": (100 * speedups / counts, 100 * measured / ran),
        }
        for name, axes in drawn.items():
            values, points = shown[name]
            _curve(axes, prediction, (counts, values), (ran, points), place=place)
    ideal: dict[str, Any] = {"color": GREY, "linestyle": (0, (6, 3)), "linewidth": 1}
    for name, axes in drawn.items():
        is_efficiency = name == "efficiency"
        note_if_empty(axes, is_empty=not sizes)
        if sizes:
            axes.set_xscale("log", base=2)  # names at most a dozen of the sizes
            axes.xaxis.set_major_locator(FixedLocator(sorted(sizes)[:: len(sizes) // 12 + 1]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            best = [100] * len(sizes) if is_efficiency else sorted(sizes)
            axes.plot(sorted(sizes), best, label="ideal", **ideal)
            _shade_beyond(axes, predictions, sorted(sizes))
        if is_efficiency:
            axes.set_ylim(bottom=0)
        elif sizes:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        title, y = _PANELS[name]
        finish(axes, title=title, x="Devices [count]", y=y)
    legend_below(figure)
    return figure


def bars_figure(lengths: Mapping[str, float], *, title: str, x: str) -> Figure:
    """A horizontal bar for each name, the first on top."""
    figure = new_figure(width_in=8, height_in=1.2 + 0.3 * len(lengths))
    axes = figure.subplots()
    axes.barh([plain(name) for name in lengths], list(lengths.values()), color=COLOURS[0])
    axes.invert_yaxis()
    finish(axes, title="", x=x, y="")
    # Names may leave little width beside them.
    figure.suptitle(plain(title), fontsize="medium", wrap=True)
    return figure


def _subject(predictions: Sequence[PredictionDocument]) -> str:
    """Model, batch and machine, as far as they are the same."""
    machine = ", ".join(dict.fromkeys(each.device_name for each in predictions))
    if len(predictions) != 1 or not predictions[0].points:
        return machine
    [prediction] = predictions
    setting = prediction.points[0].setting
    batch = f"batch {setting.micro_batch * setting.accumulation} of each device"
    if prediction.scaling == "strong":
        batch = f"batch {setting.micro_batch * setting.accumulation * setting.world_size}"
    return f"{prediction.workload} on {machine}, {batch}"


def _shade_beyond(
    axes: Axes, predictions: Sequence[PredictionDocument], sizes: Sequence[int]
) -> None:
    """Shade the device counts whose communication was extrapolated or assumed."""
    unknown = {Evidence.EXTRAPOLATED, Evidence.ASSUMED}
    beyond = {
        point.setting.world_size
        for each in predictions
        for point in each.points
        if point.evidence.get("communication") in unknown
    }
    if not beyond:
        return
    first, last = min(beyond), sizes[-1]
    before = max((size for size in sizes if size < first), default=first)
    edge = math.sqrt(before * first)
    axes.axvspan(edge, last * 1.15, color=GREY, alpha=0.1, linewidth=0, label="extrapolated")


def _curve(
    axes: Axes,
    prediction: PredictionDocument,
    predicted: tuple[np.ndarray, np.ndarray],
    measured: tuple[np.ndarray, np.ndarray],
    *,
    place: int,
) -> None:
    """One prediction over devices, rows p5, nominal, p95; real runs as diamonds."""
    colour, line = COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]
    counts, (low, middle, high) = predicted
    axes.fill_between(counts, low, high, color=colour, alpha=0.2, linewidth=0)
    label = plain(f"{prediction.workload}, {prediction.scaling} scaling")
    axes.plot(counts, middle, color=colour, linestyle=line, marker=".", label=label)
    if len(measured[0]):
        axes.plot(
            *measured,
            color=colour,
            linestyle="none",
            marker="D",
            markersize=8,
            markerfacecolor="none",
            markeredgewidth=1.8,
            label=plain(f"{prediction.workload}, measured"),
            zorder=3,
        )


def breakdown_figure(prediction: PredictionDocument) -> Figure:
    """Where the time of a step goes, by cause, over devices; hatched: communication."""
    figure = new_figure()
    axes, points = figure.add_subplot(), prediction.points
    unit, scale = time_unit(max((sum(p.breakdown_s.values()) for p in points), default=0))
    base, at = np.zeros(len(points)), np.arange(len(points))
    for cause in causes_of(prediction):
        heights = np.array([point.breakdown_s.get(cause, 0.0) for point in points])
        axes.bar(
            at,
            heights / scale,
            bottom=base / scale,
            width=0.7,
            color=CAUSE_COLOURS[list(Cause).index(cause) % len(CAUSE_COLOURS)],
            edgecolor="white",
            hatch="///" if cause in COMMUNICATION else None,
            label=cause.replace("_", " "),
        )
        base += heights
    axes.set_xticks(at, [str(point.setting.world_size) for point in points])
    note_if_empty(axes, is_empty=not base.any())
    title = f"{prediction.workload}, {prediction.scaling} scaling: a step on the critical path"
    finish(axes, title=title, x="Devices [count]", y=f"Time per step [{unit}]")
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # in the order in which the bars are stacked
        figure.legend(
            handles[::-1], labels[::-1], loc="outside right center", fontsize="small", frameon=False
        )
    return figure


#: Times the highest cost beyond which a budget is out of the picture.
_FAR_LIMIT: Final = 2.0


def front_figure(document: PlanDocument) -> Figure:
    """Cost over time of the named candidates, with intervals and limits."""
    figure = new_figure(height_in=3.6)
    axes = figure.subplots()
    rows = (*document.ranked, *document.front, *(entry.row for entry in document.options))
    for place, option in enumerate(document.plan.option):
        own = {(row.devices, row.micro_batch): row for row in rows if row.option == option.name}
        if own:
            axes.plot(
                [row.elapsed_s.nominal / DAY_S for row in own.values()],
                [row.cost.nominal for row in own.values()],
                linestyle="",
                label=plain(option.name),
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
            )
    first = document.options[0].row
    days = _intervals([first.elapsed_s]) / DAY_S
    cost = _intervals([first.cost])
    axes.errorbar(
        days[1],
        cost[1],
        xerr=np.abs(days[[0, 2]] - days[1]),
        yerr=np.abs(cost[[0, 2]] - cost[1]),
        color="black",
        linewidth=1,
        capsize=3,
        zorder=0,
    )
    limits = document.plan.limits
    available = (limits.deadline - document.start).days
    axes.axvline(available, color=GREY, linestyle="--", label="deadline")
    # A budget far above all costs would press them together: it is then a word alone.
    highest = max(*(row.cost.nominal for row in rows), cost[2].item())
    if limits.budget is not None and limits.budget <= _FAR_LIMIT * highest:
        axes.axhline(limits.budget, color=GREY, linestyle=":", label="budget")
    elif limits.budget is not None:
        axes.plot([], [], color=GREY, linestyle=":", label=f"budget {limits.budget:,.0f}, above")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    finish(
        axes,
        title="Time and cost of the candidates that are named",
        x="Days from the start",
        y=f"Cost [{document.plan.currency}]",
    )
    legend_below(figure)
    return figure


def tornado_figure(document: PlanDocument) -> Figure:
    """How far every assumption moves the cost, the largest on top."""
    swings = document.tornado[::-1]
    figure = new_figure(height_in=1.2 + 0.35 * len(swings))
    axes = figure.subplots()
    nominal = document.options[0].row.cost.nominal
    for place, swing in enumerate(swings):
        for end, colour in ((swing.low_cost, COLOURS[0]), (swing.high_cost, COLOURS[1])):
            axes.barh(place, end - nominal, left=nominal, color=colour, height=0.6)
    axes.axvline(nominal, color="black", linewidth=1)
    axes.set_yticks(range(len(swings)), [plain(swing.assumption) for swing in swings])
    finish(axes, title="What the cost depends on", x=f"Cost [{document.plan.currency}]", y="")
    return figure


@dataclass(frozen=True)
class Picture:
    """A figure with what it shows; drawn once for the page and the file."""

    name: str
    """Of its file."""
    figure: Figure
    title: str
    caption: str

    @cached_property
    def svg_file(self) -> bytes:
        """Content of its file."""
        return figure_bytes(self.figure, format="svg")

    @property
    def svg(self) -> str:
        """Text for the body of a page; its ids start with the title, so that none clash."""
        text, prefix = self.svg_file.decode(), re.sub(r"\W", "", self.title)
        text = _ID.sub(rf"\g<1>{prefix}-", text[text.index("<svg") :])
        safe = re.sub(r"[^\w .-]", "", self.title)
        return text.replace("<svg ", f'<svg role="img" aria-label="{safe}" ', 1)


def predicted_pictures(predictions: Sequence[PredictionDocument]) -> list[Picture]:
    """Speed-ups and efficiencies of all predictions together, then the step of each."""
    if not predictions:
        return []
    found = [
        Picture(
            "speedup",
            speedup_figure(predictions, panels=["speedup"]),
            "Speed-up",
            "Lines: predicted (nominal). Bands: 90 % of outcomes should lie inside. Diamonds: "
            "real runs. Dashed grey: perfect scaling.",
        ),
        Picture(
            "efficiency",
            speedup_figure(predictions, panels=["efficiency"]),
            "Efficiency",
            "The same as a share of perfect scaling.",
        ),
    ]
    caption = (
        "Where the predicted step goes; hatched: communication that is not hidden, and DDP's own "
        "work on buckets."
    )
    for position, each in enumerate(predictions):
        title = f"Breakdown {position} of a step of {each.workload}"
        figure = breakdown_figure(each)
        found.append(
            Picture(f"breakdown-{each.workload}", figure, title, "" if position else caption)
        )
    return found


def judged_pictures(validation: ValidationDocument) -> list[Picture]:
    """Predictions beside fresh runs."""
    return [
        Picture(
            "parity",
            parity_figure(validation),
            "Predicted and measured",
            "Each point is a fresh run that calibration had not seen; on the line, "
            "prediction and run agree; the grey band is 6 % to either side.",
        )
    ]
