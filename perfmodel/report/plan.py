"""Ranked options as tables and sentences."""

import math
import shlex
from collections.abc import Callable
from typing import Any, Final

from perfmodel.documents.budget import (
    CostDocument,
    CostOption,
    GoodputDocument,
    invented_prices,
)
from perfmodel.documents.plan import OptionVerdict, PlanDocument, PlanRow
from perfmodel.engine.job import Job
from perfmodel.report import (
    DEFINITIONS,
    Table,
    caveat_lines,
    duration_interval,
    interval,
    number,
    one_line,
    percent,
    table,
)
from perfmodel.report.figures import Picture, front_figure, tornado_figure
from perfmodel.report.html import LinkedNumbers, template
from perfmodel.units import Seconds, format_bytes, format_duration

_ROWS_SHOWN = 5


def plan_table(document: PlanDocument) -> Table:
    """The best size of every option, the winner first."""
    limits, work = document.plan.limits, document.plan.work
    amount = (
        f"{work.total_samples:,.0f} samples"
        if work.tokens is None
        else f"{work.tokens:,.0f} tokens"
    )
    return table(
        f"{work.name}: {amount} from {document.start} to {limits.deadline}",
        document.options,
        {
            "<Option": "row.option",
            "De-\nvices": "row.devices:,",
            "Batch\neach": "row.micro_batch",
            "Time": "row.elapsed_s",
            f"Cost,\n{document.plan.currency}": "row.cost:k",
            "P(dead-\nline)": "row.deadline_probability:%",
            "P(all\nlimits)": "row.probability:%",
            "<Verdict": lambda entry: "feasible" if entry.is_feasible else "not feasible",
        },
        caption=f"{document.num_feasible:,} of {document.num_candidates:,} candidates keep all limits with "
        f"{percent(limits.probability)}; one row per option, the cheapest or the one that comes nearest. "
        "[p5-p95]: 90 % of outcomes should lie inside.",
    )


def plan_lines(document: PlanDocument, *, verbose: bool = False) -> list[str]:
    """Why, what else, what the answer depends on, and what to measure next."""
    plan = document.plan
    lines = [f"warning: {warning}" for warning in document.warnings]
    for entry in document.options:
        row, fewest = entry.row, entry.smallest_devices
        lines.append(f"{_named(document, row)}: {entry.reason}{_break_even(entry, document)}")
        lines += [] if row.layout is None else [f"  layout: {row.layout}"]
        if row.needed_bytes is not None and row.fit_probability is not None:
            lines.append(
                f"  memory: {format_bytes(row.needed_bytes)} of each device, fits with "
                f"{percent(row.fit_probability)}"
            )
        lines.append(
            f"  fewest devices for the deadline with {percent(plan.limits.probability)}: "
            + ("none of its sizes" if fewest is None else f"{fewest:,}")
        )
    if document.ranked:
        lines.append(_winner_line(document.ranked[0]))
        lines += more_money_lines(document)
    lines += [
        f"ranked: {_named(document, row)}, batch {row.micro_batch}: "
        f"{format_duration(row.elapsed_s.nominal)}, {row.cost.nominal:,.0f}, {percent(row.probability)}"
        for row in document.ranked[:_ROWS_SHOWN]
    ]
    for swing in document.tornado:
        lines.append(
            f"depends on {swing.assumption}: {swing.low_cost:,.0f} to {swing.high_cost:,.0f} "
            f"{plan.currency}, {format_duration(swing.low_elapsed_s)} to "
            f"{format_duration(swing.high_elapsed_s)}"
        )
    lines.append(f"next measurement: {document.next_measurement}")
    caveats = list(document.caveats)
    if document.num_skipped:
        caveats.append(f"{document.num_skipped} sizes do not split the global batch evenly")
    if document.num_too_large:
        caveats.append(f"{document.num_too_large} sizes do not fit into memory")
    return lines + caveat_lines(caveats, verbose=verbose)


def _named(document: PlanDocument, row: PlanRow) -> str:
    """Option, size and device."""
    return f"{row.option} ({row.devices:,} x {document.machine_of[row.option].device})"


#: What counts as a little more money, and as sooner.
_LITTLE: Final = 0.25
_SOONER: Final = 0.9
_MOST_OFFERS: Final = 2


def more_money_lines(document: PlanDocument) -> list[str]:
    """What a little more money than the first buys, such as ``4.8 % more: half the time``."""
    first = document.ranked[0]
    found = {}
    for row in (*document.ranked, *document.front):
        more = row.cost.nominal / first.cost.nominal - 1
        takes = row.elapsed_s.nominal / first.elapsed_s.nominal
        if 0 < more <= _LITTLE and takes <= _SOONER:
            found[more] = (
                f"a little more money: {_named(document, row)} costs {percent(more)} more and takes "
                f"{percent(takes)} of the time ({format_duration(row.elapsed_s.nominal)})"
            )
    return [found[more] for more in sorted(found)[:_MOST_OFFERS]]


def _break_even(entry: OptionVerdict, document: PlanDocument) -> str:
    if entry.break_even_price is not None:
        return f"; breaks even at {entry.break_even_price:.4g} per device-hour"
    is_rival = entry.is_feasible and entry is not document.options[0]
    return "; no price per device-hour makes up for the rest" if is_rival else ""


def _winner_line(row: PlanRow) -> str:
    facts = [
        f"step {one_line(duration_interval(row.step_s))}",
        f"global batch {row.global_batch:,}",
    ]
    if row.power_kw is not None and row.energy_kwh is not None:
        facts.append(f"{row.power_kw:,.1f} kW, {row.energy_kwh:,.0f} kWh")
    if row.checkpoint_interval_s is not None:
        every = format_duration(row.checkpoint_interval_s)
        facts.append(f"a checkpoint every {every}, {row.expected_stops:.1f} stops")
    return f"the first: {'; '.join(facts)}; weakest evidence: {row.evidence}"


def infeasible_line(document: PlanDocument) -> str:
    """One line that names the nearest option, and what it would take."""
    nearest = document.options[0]
    row = nearest.row
    return (
        f"plan: no candidate keeps all limits; nearest: {_named(document, row)}, batch "
        f"{row.micro_batch}: {nearest.reason}"
    )


def cost_table(document: CostDocument) -> Table:
    """One way of paying per row, the cheapest first."""
    budget = document.budget
    return table(
        f"{budget.buy.devices} devices at {percent(budget.utilisation)} utilisation",
        document.options,
        {
            "<Option": "cost.name",
            f"{budget.currency}\nper year": "yearly:,.0f",
            f"{budget.currency} per useful\ndevice-hour": "per_useful_device_hour:.3f",
            "Buying pays at\nutilisation": _crossover,
        },
    )


def cost_lines(document: CostDocument) -> list[str]:
    """What buying is made of, where the prices come from, and which are stale."""
    budget, items = document.budget, document.items
    parts = {
        "depreciation": items.depreciation,
        "energy": items.idle_energy + items.working_energy * budget.utilisation,
        "staff": items.staff,
        "upkeep": items.upkeep,
    }
    listed = ", ".join(f"{name} {value:,.0f}" for name, value in parts.items())
    return [
        *(f"warning: {warning}" for warning in document.warnings),
        f"Buying: {items.capital:,.0f} {budget.currency} at the start; per year {listed}",
        *(
            f"price: {name}: {price.value:,.10g} {price.currency} {price.unit.value}, {price.date}, "
            f"{price.region}, term {price.term}, {price.source}"
            for name, price in budget.prices().items()
        ),
    ]


def _crossover(option: CostOption) -> str:
    if option.cost.name == "buy":
        return "-"
    pays = option.buying_pays
    if pays is None:
        return "never"
    if pays.at_least > 0:
        return f"from {percent(pays.at_least)}"
    return "always" if pays.at_most >= 1 else f"up to {percent(pays.at_most)}"


def goodput_table(document: GoodputDocument) -> Table:
    """Where the time of the job goes."""
    total_s = document.elapsed_mean_s
    return table(
        "Time by activity",
        [*document.spent_mean_s.items(), ("all", total_s)],
        {
            "<Activity": "0",
            "Time": "1:s",
            "Share": lambda spent: percent(spent[1] / total_s),
        },
        caption=f"Mean of {document.replicas} courses.",
    )


def goodput_lines(document: GoodputDocument, *, verbose: bool = False) -> list[str]:
    """What the courses say, one sentence per line."""
    job, effective = document.job, document.effective_fraction
    mtbf = "never" if math.isinf(job.mtbf_s) else f"every {format_duration(job.mtbf_s)}"
    causes = [f"{name} {number(count)}" for name, count in document.stops_mean.items()]
    by_cause = f" ({', '.join(causes)})" if len(causes) > 1 else ""
    lines = [
        f"Devices: {job.devices}, simulated {document.replicas} times",
        (
            f"End: {one_line(duration_interval(document.elapsed_s))} after the start, for "
            f"{format_duration(job.work_s)} of work (median and 90 % of courses)"
        ),
        (
            f"Effective training time: {percent(effective.nominal)} "
            f"[{percent(effective.p5)} - {percent(effective.p95)}]"
        ),
        f"Unplanned stops: {one_line(interval(document.unplanned_stops))}, {mtbf}{by_cause}",
    ]
    lines.append(
        f"Checkpoints: every {format_duration(job.checkpoint_interval_s)} of work, "
        f"{format_duration(job.checkpoint_write_s)} each"
    )
    lines.append(_interval_line(job, document.best_interval_s))
    if document.deadline_s is not None and document.deadline_probability is not None:
        lines.append(
            f"Done within {format_duration(document.deadline_s)}: "
            f"{percent(document.deadline_probability)} of the courses"
        )
    return lines + caveat_lines(document.caveats, verbose=verbose)


def _interval_line(job: Job, best_s: Seconds | None) -> str:
    if math.isinf(job.mtbf_s):
        return "Best interval: none, as nothing ever fails"
    if best_s is None:
        return "Best interval: the shorter the better, as a checkpoint costs nothing"
    return f"Best interval: {format_duration(best_s)}"


# The answer to a plan as a page for the person who signs.
#: Words of the page that are explained at its end.
_WORDS: Final = (
    "Step",
    "Weak scaling",
    "Strong scaling",
    "Speed-up",
    "Interval",
    "Evidence: measured",
    "Evidence: interpolated",
    "Evidence: extrapolated",
    "Evidence: assumed",
)
_INFERRED: Final = (
    "From the step times of runs that others made, by closed forms whose parameters were fitted to "
    "them: no part of a step was measured alone."
)
_LAYOUT: Final = (
    "How the model is spread over the devices, for the engineers who run it: dp copies of the model, each "
    "over tp x pp x cp devices; zero divides what the copies hold alike; accumulation counts passes per step; "
    "recompute saves memory for time. It needs no decision: the fastest one that fits was taken, unless the "
    "plan fixes it."
)
_MOST_SWINGS: Final = 3
_MOST_CAVEATS: Final = 4
#: Warnings, and options that lost, on the first page.
_MOST_NAMED: Final = 3


def decision_html(document: PlanDocument) -> str:
    """Render the answer to a plan in one self-contained file: no network, no scripts, escaped throughout.

    Every number is read from the document and links to a row that gives its place there, its exact
    value and where it comes from.
    """
    numbers = LinkedNumbers(document.model_dump(mode="json"), _origins(document))
    definitions = {word: DEFINITIONS[word] for word in _WORDS} | {"Evidence: inferred": _INFERRED}
    if document.plan.work.model is not None:
        definitions |= {"Layout": _LAYOUT}
    return template("decision.html.j2").render(
        document=document,
        plan=document.plan,
        first=document.options[0],
        rivals=document.options[1:],
        n=numbers.show,
        interval=numbers.interval,
        numbers=numbers,
        is_feasible=bool(document.ranked),
        most_swings=_MOST_SWINGS,
        most_caveats=_MOST_CAVEATS,
        most_named=_MOST_NAMED,
        machine_of=_machine_places(document),
        winner_option=[option.name for option in document.plan.option].index(
            document.options[0].row.option
        ),
        prices=[(place, *rest) for place, rest in enumerate(_prices(document))],
        pictures=[
            Picture(
                "front",
                front_figure(document),
                "Time and cost",
                "Ranked candidates, the front between time and cost, and the best of every option; "
                "the cross is the 90 % interval of the first one.",
            ),
            Picture(
                "tornado",
                tornado_figure(document),
                "Sensitivity",
                "Failure rates by a factor of 2, prices by 10 %; all else over the range that holds "
                "90 % of its uncertainty.",
            ),
        ],
        command=shlex.join(document.command_line),
        digest=document.digest,
        banners=invented_prices(document.plan.prices()),
        offers=more_money_lines(document) if document.ranked else (),
        devices={name: machine.device for name, machine in document.machine_of.items()},
        definitions=definitions,
    )


def _machine_places(document: PlanDocument) -> dict[str, int]:
    """Place of its machine, by option."""
    return {name: document.machines.index(machine) for name, machine in document.machine_of.items()}


def _prices(document: PlanDocument) -> list[tuple[str, str, str]]:
    """Option, which price, and the path of it in the document."""
    return [
        (option.name, key, f"plan.option.{place}.{key}")
        for place, option in enumerate(document.plan.option)
        for key in ("price", "energy_price", "setup_price")
        if getattr(option, key) is not None
    ]


def _origins(document: PlanDocument) -> Callable[[str], tuple[str, str]]:
    """Where the value at a path comes from, and the id of the row that tells more."""
    places = _machine_places(document)
    prices = {path: place for place, (_, _, path) in enumerate(_prices(document))}

    def origin(path: str) -> tuple[str, str]:
        keys = path.split(".")
        if keys[0] == "plan":
            stem = ".".join(keys[:4])
            if stem in prices:
                return "price in the plan file, with its source", f"price-{prices[stem]}"
            return f"the plan file, {'.'.join(keys[1:])}", ""
        if keys[0] == "machines":
            return "the profile, or its validation", f"machine-{keys[1]}"
        if keys[0] in {"ranked", "front", "options"}:
            found: Any = getattr(document, keys[0])[int(keys[1])]
            row = found.row if keys[0] == "options" else found
            last = "a candidate of the plan" if keys[-1] in _CANDIDATE else "computed from the row"
            words = next((text for part, text in _ROW_ORIGINS.items() if part in path), last)
            return words, f"machine-{places[row.option]}"
        first = document.options[0].row.option
        return _OTHERS.get(keys[0], "counted by the planner"), f"machine-{places[first]}"

    return origin


_OTHERS: Final = {
    "tornado": "the plan computed again with one assumption at its end",
}
_CANDIDATE: Final = frozenset({"devices", "micro_batch"})
#: Part of the path of a value of a row to its origin; the first that fits.
_ROW_ORIGINS: Final = {
    ".cost.": "predicted time x devices x the prices of the option",
    ".elapsed_s.": "predicted step x steps, with the stops of the failure model",
    ".step_s.": "predicted from the profile",
    "reason": "compared with the first, or with the limits",
    "probability": "share of the draws of the prediction",
    "break_even": "price at which its cost is that of the first",
    "smallest_devices": "fewest devices whose chance to be in time is enough",
    "end": "start of the plan + predicted time",
}
