"""Figures of a plan: cost over time of what is feasible, and what the answer hangs on."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.documents.plan import PlanDocument, PlanRow
from perfmodel.report.canvas import COLOURS, GREY, MARKERS, finish, legend_below, new_figure, plain
from perfmodel.units import DAY_S


def front_figure(document: PlanDocument) -> Figure:
    """Cost over time of the named candidates, with intervals and limits."""
    figure = new_figure(height_in=3.6)
    axes = figure.subplots()
    rows = (*document.ranked, *document.front, *(entry.row for entry in document.options))
    for place, option in enumerate(document.plan.option):
        own = {(row.devices, row.micro_batch): row for row in rows if row.option == option.name}
        if own:
            axes.plot(
                [row.elapsed_s.p50 / DAY_S for row in own.values()],
                [row.cost.p50 for row in own.values()],
                linestyle="",
                label=plain(option.name),
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
            )
    _mark_first(axes, document.options[0].row)
    limits = document.plan.limits
    available = (limits.deadline - document.start).days
    axes.axvline(available, color=GREY, linestyle="--", label="deadline")
    if limits.budget is not None:
        axes.axhline(limits.budget, color=GREY, linestyle=":", label="budget")
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


def _mark_first(axes: Axes, row: PlanRow) -> None:
    """The interval of the first row, both ways."""
    axes.errorbar(
        row.elapsed_s.p50 / DAY_S,
        row.cost.p50,
        xerr=[
            [(row.elapsed_s.p50 - row.elapsed_s.p5) / DAY_S],
            [(row.elapsed_s.p95 - row.elapsed_s.p50) / DAY_S],
        ],
        yerr=[[row.cost.p50 - row.cost.p5], [row.cost.p95 - row.cost.p50]],
        color="black",
        linewidth=1,
        capsize=3,
        zorder=0,
    )


def tornado_figure(document: PlanDocument) -> Figure:
    """How far every assumption moves the cost, the largest on top."""
    swings = document.tornado[::-1]
    figure = new_figure(height_in=1.2 + 0.35 * len(swings))
    axes = figure.subplots()
    nominal = document.options[0].row.cost.p50
    for place, swing in enumerate(swings):
        for end, colour in ((swing.low_cost, COLOURS[0]), (swing.high_cost, COLOURS[1])):
            axes.barh(place, end - nominal, left=nominal, color=colour, height=0.6)
    axes.axvline(nominal, color="black", linewidth=1)
    axes.set_yticks(range(len(swings)), [plain(swing.assumption) for swing in swings])
    finish(
        axes,
        title="What the cost hangs on",
        x=f"Cost [{document.plan.currency}]",
        y="",
    )
    return figure
