"""Figures of what a machine can do."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.cost.busbw import busbw_factor
from perfmodel.documents.observation import PHASES
from perfmodel.documents.profile import (
    CollectiveProfile,
    CurvePoint,
    PhaseCurves,
    ProfileDocument,
    WorkloadProfile,
)
from perfmodel.report.canvas import (
    COLOURS,
    LINES,
    MARKERS,
    finish,
    legend_below,
    log2_ticks,
    log10_ticks,
    new_figure,
    note_if_empty,
    plain,
)
from perfmodel.units import format_bytes


def collective_figure(profile: ProfileDocument) -> Figure:
    """Figure of time and bus bandwidth of each collective over the size of the array."""
    figure = new_figure(width_in=9.2)
    time_axes, busbw_axes = figure.subplots(1, 2)
    names = sorted({entry.collective for entry in profile.collectives})
    sizes = sorted({entry.world_size for entry in profile.collectives})
    for entry in profile.collectives:
        styles = {
            "color": COLOURS[names.index(entry.collective) % len(COLOURS)],
            "marker": MARKERS[names.index(entry.collective) % len(MARKERS)],
            "linestyle": LINES[sizes.index(entry.world_size) % len(LINES)],
        }
        label = plain(f"{entry.collective}, {entry.world_size} devices")
        at, time_s = _curve(entry.points)
        time_axes.plot(at, time_s * 1e3, label=label, markersize=4, **styles)
        factor = busbw_factor(entry.collective, world_size=entry.world_size)
        if factor is not None:
            busbw_axes.plot(at, factor * at / time_s / 1e9, label=label, markersize=4, **styles)
    _finish_collectives(time_axes, busbw_axes, profile.collectives)
    legend_below(figure)
    return figure


def _curve(points: Sequence[CurvePoint]) -> tuple[np.ndarray, np.ndarray]:
    # a time of zero has no place on a logarithmic axis, and no bandwidth
    shown = [(point.at, point.time_s) for point in points if point.time_s > 0]
    at, time_s = np.array(shown).reshape(-1, 2).T
    return at, time_s


def _finish_collectives(
    time_axes: Axes, busbw_axes: Axes, entries: Sequence[CollectiveProfile]
) -> None:
    for axes in (time_axes, busbw_axes):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        log10_ticks(axes.yaxis)
        axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value).replace(" ", "\n"))
        note_if_empty(axes, is_empty=not entries)
    finish(time_axes, title="Time", x="Size of the whole array [B]", y="Time [ms]")
    finish(busbw_axes, title="Bus bandwidth", x="Size of the whole array [B]", y="busbw [GB/s]")


def compute_figure(profile: ProfileDocument) -> Figure:
    """Figure of the time of each phase over the micro-batch, one panel per workload."""
    num_rows = max(1, -(-len(profile.workloads) // 2))
    figure = new_figure(width_in=9.2, height_in=0.8 + 3.4 * num_rows)
    panels: list[Axes] = figure.subplots(num_rows, 2, squeeze=False).ravel().tolist()
    for axes, entry in zip(panels, profile.workloads, strict=False):
        _compute_panel(axes, entry)
    for axes in panels[len(profile.workloads) :]:
        axes.set_axis_off()
    legend_below(figure)
    return figure


def _compute_panel(axes: Axes, entry: WorkloadProfile) -> None:
    for position, phases in enumerate(entry.phases):
        _phase_lines(axes, phases, line=LINES[position % len(LINES)])
    batches = {round(point.at) for phases in entry.phases for point in phases.forward}
    log2_ticks(axes, values=batches)
    axes.set_yscale("log")
    log10_ticks(axes.yaxis)
    title = f"{entry.workload.name}: phases, n ranks at work"
    finish(axes, title=title, x="Micro-batch [samples]", y="Time per micro-step [ms]")


def _phase_lines(axes: Axes, phases: PhaseCurves, *, line: str) -> None:
    curves: dict[str, tuple[CurvePoint, ...]] = {
        name: getattr(phases, name)
        for name in (*PHASES, "dispatch_forward", "dispatch_backward", "dispatch_optimizer")
    }
    for name, points in curves.items():
        at, time_s = _curve(points)
        if not len(at):
            continue
        is_host = name.startswith("dispatch_")
        colour = COLOURS[PHASES.index(name.removeprefix("dispatch_"))]
        label = f"{name.replace('_', ' ')}, n={phases.world_size}"
        marker = "x" if is_host else MARKERS[PHASES.index(name)]
        axes.plot(
            at,
            time_s * 1e3,
            label=label,
            marker=marker,
            markersize=4,
            color=colour,
            linestyle=line,
            linewidth=0.8 if is_host else 1.5,
        )
