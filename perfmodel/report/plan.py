"""Ranked options as tables and sentences."""

from perfmodel.documents.plan import (
    OptionVerdict,
    PlanDocument,
    PlanRow,
    ScalingStatement,
    Swing,
)
from perfmodel.documents.prediction import Interval
from perfmodel.report.grid import Grid, grid
from perfmodel.report.wording import (
    count_interval,
    duration_interval,
    interval,
    one_line,
    percent,
)
from perfmodel.units import format_bytes, format_duration

_ROWS_SHOWN = 5


def plan_grid(document: PlanDocument) -> Grid:
    """The best size of every option, the winner first."""
    limits = document.plan.limits
    return grid(
        f"{document.plan.work.name}: {document.plan.work.total_samples:,.0f} samples from "
        f"{document.start} to {limits.deadline}",
        text=("Option",),
        numbers=(
            "De-\nvices",
            "Batch\neach",
            "Time",
            f"Cost,\n{document.plan.currency}",
            "P(dead-\nline)",
            "P(all\nlimits)",
        ),
        notes=("Verdict",),
        rows=[
            (*_cells(entry.row), "feasible" if entry.is_feasible else "not feasible")
            for entry in document.options
        ],
        caption=f"{document.num_feasible:,} of {document.num_candidates:,} candidates keep all limits with "
        f"{percent(limits.probability)}; one row per option, the cheapest or the one that comes nearest. "
        "[p5-p95]: 90 % of outcomes should lie inside.",
    )


def _cells(row: PlanRow) -> tuple[str, ...]:
    return (
        row.option,
        f"{row.devices:,}",
        str(row.micro_batch),
        duration_interval(row.elapsed_s),
        _money(row.cost),
        percent(row.deadline_probability),
        percent(row.probability),
    )


def _money(cost: Interval) -> str:
    return count_interval(cost)


def plan_lines(document: PlanDocument) -> list[str]:
    """Why, what else, what the answer hangs on, and what to measure next."""
    lines = []
    for entry in document.options:
        lines.append(f"{entry.row.option}: {entry.reason}{_break_even(entry, document)}")
        lines += _layout_lines(entry.row)
        fewest = entry.smallest_devices
        lines.append(
            f"  fewest devices for the deadline with {percent(document.plan.limits.probability)}: "
            + ("none of its sizes" if fewest is None else f"{fewest:,}")
        )
    if document.ranked:
        lines += _winner_lines(document.ranked[0])
    lines += [_scaling_line(entry) for entry in document.scaling]
    lines += _row_lines("ranked", document.ranked[:_ROWS_SHOWN])
    lines += _row_lines("sooner for more money", document.front[:_ROWS_SHOWN])
    lines += [_swing_line(swing, document.plan.currency) for swing in document.tornado]
    lines.append(f"next measurement: {document.next_measurement}")
    if document.num_skipped:
        lines.append(f"caveat: {document.num_skipped} sizes do not split the global batch evenly")
    if document.num_too_large:
        lines.append(f"caveat: {document.num_too_large} sizes do not fit into memory")
    lines += [f"caveat: {caveat}" for caveat in document.caveats]
    return lines + [f"warning: {warning}" for warning in document.warnings]


def _break_even(entry: OptionVerdict, document: PlanDocument) -> str:
    if entry.break_even_price is not None:
        return f"; breaks even at {entry.break_even_price:.4g} per device-hour"
    is_rival = entry.is_feasible and entry is not document.options[0]
    return "; no price per device-hour makes up for the rest" if is_rival else ""


def _winner_lines(row: PlanRow) -> list[str]:
    facts = [f"step {duration_interval(row.step_s)}".replace("\n", " ")]
    facts.append(f"global batch {row.global_batch:,}")
    if row.power_kw is not None and row.energy_kwh is not None:
        facts.append(f"{row.power_kw:,.1f} kW, {row.energy_kwh:,.0f} kWh")
    if row.checkpoint_interval_s is not None:
        written = "" if row.checkpoint_s is None else _written(row.checkpoint_s)
        facts.append(
            f"a checkpoint every {format_duration(row.checkpoint_interval_s)}{written}, "
            f"{row.expected_stops:.1f} stops"
        )
    facts.append(f"weakest evidence: {row.evidence}")
    return [f"the first: {'; '.join(facts)}"]


def _written(checkpoint_s: Interval) -> str:
    return f" (written in {one_line(duration_interval(checkpoint_s))}, as timed)"


def _layout_lines(row: PlanRow) -> list[str]:
    lines = [] if row.layout is None else [f"  layout: {row.layout}"]
    if row.needed_bytes is not None and row.fit_probability is not None:
        lines.append(
            f"  memory: {format_bytes(row.needed_bytes)} of each device, fits with "
            f"{percent(row.fit_probability)}"
        )
    return lines


def _scaling_line(entry: ScalingStatement) -> str:
    fixed = "of each device" if entry.scaling == "weak" else "of all together"
    return (
        f"{entry.scaling} scaling, batch {entry.batch:,} {fixed}: from {entry.from_devices:,} to "
        f"{entry.devices:,} devices {one_line(interval(entry.speedup))} times as fast, efficiency "
        f"{percent(entry.efficiency.p50)}"
    )


def _row_lines(name: str, rows: tuple[PlanRow, ...]) -> list[str]:
    return [
        f"{name}: {row.devices:,} x {row.option}, batch {row.micro_batch}: "
        f"{format_duration(row.elapsed_s.p50)}, {row.cost.p50:,.0f}, {percent(row.probability)}"
        for row in rows
    ]


def _swing_line(swing: Swing, currency: str) -> str:
    return (
        f"hangs on {swing.assumption}: {swing.low_cost:,.0f} to {swing.high_cost:,.0f} {currency}, "
        f"{format_duration(swing.low_elapsed_s)} to {format_duration(swing.high_elapsed_s)}"
    )


def infeasible_line(document: PlanDocument) -> str:
    """One line that names the nearest option, and what it would take."""
    nearest = document.options[0]
    row = nearest.row
    return (
        f"plan: no candidate keeps all limits; nearest: {row.devices:,} x {row.option}, batch "
        f"{row.micro_batch}: {nearest.reason}"
    )
