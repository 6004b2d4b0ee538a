"""Figures of how wrong predictions were."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.documents.validation import ComparedSetting, ValidationDocument
from perfmodel.report.canvas import (
    BAND_FRACTION,
    COLOURS,
    GREY,
    MARKERS,
    finish,
    legend_below,
    log10_ticks,
    new_figure,
    plain,
    time_unit,
)
from perfmodel.report.wording import percent, short_label


def parity_figure(validation: ValidationDocument) -> Figure:
    """Figure of predicted over measured step times; on the diagonal the two agree."""
    figure = new_figure(width_in=5.2, height_in=4.8)
    axes = figure.add_subplot()
    times_s = [entry.measured_s for entry in validation.settings]
    times_s += [bound for entry in validation.settings for bound in _bounds(entry) if bound > 0]
    unit, scale = time_unit(float(np.median(times_s)))
    ends = np.array([min(times_s) / 1.3, max(times_s) * 1.3]) / scale
    axes.plot(ends, ends, color=GREY, linewidth=1, label="predicted = measured")
    band = percent(BAND_FRACTION).replace(".0", "")
    low, high = ends * (1 - BAND_FRACTION), ends * (1 + BAND_FRACTION)
    axes.fill_between(ends, low, high, color=GREY, alpha=0.25, linewidth=0, label=f"+-{band}")
    for position, workload in enumerate(_workloads(validation)):
        entries = [entry for entry in validation.settings if entry.setting.workload == workload]
        _parity_points(axes, entries, scale=scale, position=position)
    for set_scale, set_limits in (
        (axes.set_xscale, axes.set_xlim),
        (axes.set_yscale, axes.set_ylim),
    ):
        set_scale("log")
        set_limits(ends[0], ends[1])
    for axis in (axes.xaxis, axes.yaxis):
        log10_ticks(axis)
    axes.set_aspect("equal")
    title = "Fresh runs; bars: predicted p5-p95, measured +- 1 std. error"
    finish(axes, title=title, x=f"Measured step [{unit}]", y=f"Predicted step [{unit}]")
    axes.legend(fontsize="small", frameon=False)
    return figure


def _bounds(entry: ComparedSetting) -> tuple[float, float]:
    return entry.predicted_s.p5, entry.predicted_s.p95


def _workloads(validation: ValidationDocument) -> list[str]:
    return sorted({entry.setting.workload for entry in validation.settings})


def _parity_points(
    axes: Axes, entries: Sequence[ComparedSetting], *, scale: float, position: int
) -> None:
    measured = np.array([entry.measured_s for entry in entries]) / scale
    predicted = np.array([entry.predicted_s.p50 for entry in entries]) / scale
    low, high = np.array([_bounds(entry) for entry in entries]).T / scale
    axes.errorbar(
        measured,
        predicted,
        xerr=measured * [entry.measured_relative_error for entry in entries],
        yerr=[predicted - low, high - predicted],
        linestyle="none",
        color=COLOURS[position % len(COLOURS)],
        marker=MARKERS[position % len(MARKERS)],
        markersize=5,
        markeredgecolor="black",
        markeredgewidth=0.5,
        elinewidth=1,
        label=plain(entries[0].setting.workload),
    )


def error_figure(validation: ValidationDocument) -> Figure:
    """Figure of the signed error of each held-out setting; bars: predicted p5-p95."""
    entries = sorted(validation.settings, key=lambda entry: short_label(entry.setting))
    figure = new_figure(width_in=7.2, height_in=1.8 + 0.24 * len(entries))
    axes = figure.add_subplot()
    axes.axvspan(-100 * BAND_FRACTION, 100 * BAND_FRACTION, color=GREY, alpha=0.2, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=1)
    _error_points(axes, entries)
    labels = [plain(short_label(entry.setting)) for entry in entries]
    axes.set_yticks(np.arange(len(entries)), labels, fontsize="small")
    axes.set_ylim(len(entries) - 0.4, -0.6)
    finish(
        axes,
        title="Devices x micro-batch x accumulation, bucket cap; grey: +-6 %",
        x="Predicted over measured, minus 1 [%]; negative: predicted too fast",
        y="Setting",
    )
    legend_below(figure)
    return figure


def _error_points(axes: Axes, entries: Sequence[ComparedSetting]) -> None:
    rows = np.arange(len(entries))
    errors = 100 * np.array([entry.signed_error for entry in entries])
    measured = np.array([entry.measured_s for entry in entries])
    low, high = 100 * (np.array([_bounds(entry) for entry in entries]).T / measured - 1)
    axes.errorbar(
        errors,
        rows,
        xerr=[np.maximum(errors - low, 0), np.maximum(high - errors, 0)],
        linestyle="none",
        marker="o",
        color=COLOURS[0],
        elinewidth=1,
        label="at calibrated machine speed",
    )
    raw = 100 * np.array([entry.signed_error_raw for entry in entries])
    axes.plot(raw, rows, "x", color=COLOURS[1], label="raw, as the clock showed it")
