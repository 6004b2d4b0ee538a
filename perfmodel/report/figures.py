"""All figures; those of a prediction are drawn here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.documents.prediction import Interval, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.validation import ValidationDocument
from perfmodel.program.operation import Cause
from perfmodel.report.canvas import (
    COLOURS,
    GREY,
    LINES,
    figure_bytes,
    finish,
    legend_below,
    log2_ticks,
    new_figure,
    note_if_empty,
    plain,
    time_unit,
)
from perfmodel.report.machine_figures import collective_figure, compute_figure
from perfmodel.report.prediction_grids import causes_of
from perfmodel.report.validation_figures import error_figure, parity_figure

__all__ = [
    "breakdown_figure",
    "collective_figure",
    "compute_figure",
    "error_figure",
    "figure_bytes",
    "parity_figure",
    "speedup_figure",
]

CAUSE_COLOURS = (*COLOURS, GREY, "#F0E442", "#8C564B")
COMMUNICATION = frozenset({Cause.ALL_REDUCE, Cause.BROADCAST, Cause.BUCKET})


def speedup_figure(predictions: Sequence[PredictionDocument]) -> Figure:
    """Figure of speed-up and efficiency over devices: interval as a band, real runs as diamonds."""
    figure = new_figure(width_in=9.2)
    speedup_axes, efficiency_axes = figure.subplots(1, 2)
    sizes = {point.setting.world_size for entry in predictions for point in entry.points}
    sizes |= {run.world_size for entry in predictions for run in entry.measured if run.speedup}
    for position, prediction in enumerate(predictions):
        _curve(speedup_axes, _speedup_points(prediction), prediction, position=position)
        _curve(efficiency_axes, _efficiency_points(prediction), prediction, position=position)
    if sizes:
        _ideal(speedup_axes, {size: size for size in sorted(sizes)})
        _ideal(efficiency_axes, dict.fromkeys(sorted(sizes), 100))
        speedup_axes.set_yscale("log", base=2)
        speedup_axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    efficiency_axes.set_ylim(bottom=0)
    for axes in (speedup_axes, efficiency_axes):
        note_if_empty(axes, is_empty=not sizes)
    speedup = "Throughput over that of one device [ratio]"
    efficiency = "Speed-up over devices [%]"
    finish(speedup_axes, title="Speed-up, band: 90 % interval", x="Devices [count]", y=speedup)
    finish(efficiency_axes, title="Scaling efficiency", x="Devices [count]", y=efficiency)
    legend_below(figure)
    return figure


def _ideal(axes: Axes, values: dict[int, int]) -> None:
    log2_ticks(axes, values=values)
    dashes = (0, (6, 3))
    axes.plot(
        list(values),
        list(values.values()),
        color=GREY,
        linestyle=dashes,
        linewidth=1,
        label="ideal",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    predicted: dict[int, Interval]
    measured: list[tuple[int, float]]
    scale: float = 1.0


def _speedup_points(prediction: PredictionDocument) -> _Points:
    return _Points(
        predicted={point.setting.world_size: point.speedup for point in prediction.points},
        measured=[(run.world_size, run.speedup) for run in prediction.measured if run.speedup],
    )


def _efficiency_points(prediction: PredictionDocument) -> _Points:
    return _Points(
        predicted={
            point.setting.world_size: point.scaling_efficiency for point in prediction.points
        },
        measured=[
            (run.world_size, run.speedup / run.world_size)
            for run in prediction.measured
            if run.speedup
        ],
        scale=100,
    )


def _curve(axes: Axes, points: _Points, prediction: PredictionDocument, *, position: int) -> None:
    colour = COLOURS[position % len(COLOURS)]
    sizes = sorted(points.predicted)
    low, middle, high = (
        points.scale * np.array([getattr(points.predicted[size], part) for size in sizes])
        for part in ("p5", "p50", "p95")
    )
    axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    line = LINES[position % len(LINES)]
    label = plain(f"{prediction.workload}, {prediction.scaling} scaling")
    axes.plot(sizes, middle, color=colour, linestyle=line, marker=".", label=label)
    if points.measured:
        at, values = np.array(points.measured).T
        axes.plot(
            at,
            points.scale * values,
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
    """Figure of where the time of a step goes, by cause, over devices; hatched: communication."""
    figure = new_figure()
    axes = figure.add_subplot()
    unit, scale = time_unit(
        max((sum(p.breakdown_s.values()) for p in prediction.points), default=0)
    )
    base = np.zeros(len(prediction.points))
    for cause in causes_of(prediction):
        heights = np.array([point.breakdown_s.get(cause, 0.0) for point in prediction.points])
        axes.bar(
            np.arange(len(base)),
            heights / scale,
            bottom=base / scale,
            width=0.7,
            color=CAUSE_COLOURS[list(Cause).index(cause) % len(CAUSE_COLOURS)],
            edgecolor="white",
            hatch="///" if cause in COMMUNICATION else None,
            label=cause.replace("_", " "),
        )
        base += heights
    axes.set_xticks(
        np.arange(len(base)), [str(point.setting.world_size) for point in prediction.points]
    )
    note_if_empty(axes, is_empty=not base.any())
    title = f"{prediction.workload}, {prediction.scaling} scaling: a step on the critical path"
    finish(axes, title=title, x="Devices [count]", y=f"Time per step [{unit}]")
    _legend_beside(axes)
    return figure


def _legend_beside(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # in the order in which the bars are stacked
        axes.figure.legend(
            handles[::-1], labels[::-1], loc="outside right center", fontsize="small", frameon=False
        )


def report_figures(
    profile: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> dict[str, Figure]:
    """Every figure of the report under the name of its file."""
    figures = {
        "compute": compute_figure(profile),
        "collectives": collective_figure(profile),
    }
    if predictions:
        figures["speedup"] = speedup_figure(predictions)
    for prediction in predictions:
        figures[f"breakdown-{prediction.workload}"] = breakdown_figure(prediction)
    if validation is not None:
        figures["parity"] = parity_figure(validation)
        figures["errors"] = error_figure(validation)
    return figures
