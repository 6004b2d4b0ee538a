"""Why an option of a plan was not taken, and what would have to change."""

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.documents.age import age_notes
from perfmodel.documents.plan import PlanMachine, PlanRow
from perfmodel.documents.plan_file import Option, PlanFile
from perfmodel.plan.outcome import NEVER_S, Outcome, hourly_price, setup_cost
from perfmodel.plan.steps import Steps
from perfmodel.units import DAY_S, HOUR_S, format_duration


def reason(row: PlanRow, winner: PlanRow, currency: str) -> str:
    """Why a feasible row lost: it costs more, or as much and takes longer."""
    dearer = row.cost.p50 - winner.cost.p50
    later_s = row.elapsed_s.p50 - winner.elapsed_s.p50
    when = f"{format_duration(abs(later_s))} {'later' if later_s > 0 else 'sooner'}"
    return (
        f"{dearer:,.0f} {currency} dearer ({100 * dearer / winner.cost.p50:+.1f} %), "
        f"{when if later_s else 'done at the same time'}"
    )


def nearest_reason(plan: PlanFile, row: PlanRow, found: Outcome, start: dt.date) -> str:
    """Which limits a row breaks, and what they would have to be."""
    limits = plan.limits
    needed_s, needed_cost = (
        float(np.quantile(draws[0, 1:], limits.probability, method="higher"))
        for draws in (found.elapsed_s, found.cost)
    )
    wanted = []
    end = start + dt.timedelta(days=int(np.ceil(needed_s / DAY_S)))
    if needed_s >= NEVER_S:
        wanted.append("far fewer failures or faster recoveries: it hardly gets on")
    elif end > limits.deadline:
        wanted.append(f"a deadline of {end}")
    if limits.budget is not None and needed_cost > limits.budget:
        wanted.append(f"a budget of {needed_cost:,.0f} {plan.currency}")
    if limits.power_kw is not None and row.power_kw is not None and row.power_kw > limits.power_kw:
        wanted.append(f"{row.power_kw:,.1f} kW")
    return (
        f"keeps deadline and budget with {100 * row.probability:.0f} % only; for "
        f"{100 * limits.probability:.0f} % it needs "
        f"{' and '.join(wanted) or 'a little more time'}"
    )


def break_even(option: Option, row: PlanRow, winner: PlanRow) -> float | None:
    """Price per device-hour at which a row costs as much as the winner; None if it cannot."""
    device_hours = row.devices * row.elapsed_s.p50 / HOUR_S
    energy = hourly_price(option) - option.price.value
    price = (winner.cost.p50 - setup_cost(option)) / device_hours - energy
    return price if price > 0 else None


def smallest_devices(counts: Samples, in_time: Samples, probability: float) -> int | None:
    """Fewest devices that meet the deadline with a probability; None if no count does."""
    enough = counts[in_time >= probability]
    return int(enough.min()) if len(enough) else None


def plan_caveats(plan: PlanFile, tables: Mapping[tuple[int, int], Steps]) -> Iterator[str]:
    """What must be known of a plan, whatever machine its answer names."""
    kind = "of each device" if plan.work.scaling == "weak" else "of all devices together"
    yield (
        f"{plan.work.scaling} scaling: the batches are those {kind}; the samples are taken to be as many "
        "whatever the global batch, see perfmodel batch"
    )
    yield "every device-hour is paid for from the start to the end of the job, stops included"
    refused: dict[str, list[str]] = {}
    for (index, batch), table in tables.items():
        if table.refusal:
            refused.setdefault(plan.option[index].name, []).append(
                f"batch {batch}: {table.refusal}"
            )
    for index, option in enumerate(plan.option):
        if all(tables[index, batch].refusal for batch in option.batches):
            yield f"{option.name} is left out: {refused[option.name][0]}"
    if plan.failures is None:
        yield "the plan says nothing about failures: none are assumed"


def stale_machines(machines: Iterable[PlanMachine], *, today: dt.date) -> Iterator[str]:
    """A sentence for every profile that is too old to be relied on."""
    for machine in machines:
        for note in age_notes(machine.made_utc, today=today):
            yield f"{machine.profile}: {note}"
