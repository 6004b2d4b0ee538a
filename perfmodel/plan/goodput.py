"""Use cases: when a job that fails ends, and what a useful device-hour costs, bought and rented.

All costs are per year. With utilisation ``u``, the share of hours in which all devices train, each
way of paying is a line ``fixed + per_utilisation u``; two lines cross where they are equal.
"""

import datetime as dt
import math
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.documents import Natural, asked_by, checks_arguments, today_utc
from perfmodel.documents.budget import (
    Budget,
    CostDocument,
    CostOption,
    GoodputDocument,
    Purchase,
    PurchaseItems,
    Rental,
    Worthwhile,
    YearlyCost,
    invented_prices,
    read_budget,
    stale_prices,
)
from perfmodel.engine.job import Activity, Job, best_interval_s, expected_elapsed_s, simulate_job
from perfmodel.errors import NotFeasible, check_at_least, check_positive
from perfmodel.statistics import Interval
from perfmodel.units import KILOWATT_W, Seconds, format_duration

#: A job that keeps less than this share of its time is not simulated: it may take for ever.
LOWEST_EFFECTIVE_FRACTION: Final = 0.01
#: Nor is one that stops more often than this in one course, or in all of them together: some 5 s.
MOST_STOPS: Final = 1e6
MOST_STOPS_OF_ALL: Final = 5e7
#: Waiting for nodes takes as long again in every course, and as long as these many courses besides.
_COURSES_OF_SPARES: Final = 400


@checks_arguments()
def goodput(
    job: Job,
    *,
    replicas: int = 200,
    seed: Natural = 0,
    mtbf_stops: int | None = None,
    deadline_s: Seconds | None = None,
) -> GoodputDocument:
    """Simulate weeks of a job that fails: when it ends, and how often to write checkpoints.

    Parameters
    ----------
    replicas
        Simulated courses; quantiles of fewer than about 100 are rough.
    mtbf_stops
        From how many stops the rates of failure were estimated: each course then draws its own rates.
    deadline_s
        Whose chance is wanted, from the start. [s]

    Raises
    ------
    NotFeasible
        If less than 1 % of the time would be training that is kept, or stops are too many to simulate.
    """
    check_at_least("replicas", replicas, 2)
    if deadline_s is not None:
        check_positive("deadline_s", deadline_s)
    factors = np.ones(replicas)
    if mtbf_stops is not None:
        # Rates over their estimate, as k stops of a Poisson process leave them (Jeffreys). A stream of its own: one
        # replica more changes no other.
        rng = np.random.default_rng([seed, 0, 1])
        factors = rng.gamma(mtbf_stops + 0.5, size=replicas) / mtbf_stops
    as_long_as = replicas if job.spares is None else 2 * replicas + _COURSES_OF_SPARES
    most_stops = min(MOST_STOPS, MOST_STOPS_OF_ALL / as_long_as)
    _refuse_hopeless(job, rate_factor=float(factors.max()), most_stops=most_stops)
    # Courses with luck of their own, the same for the same seed.
    generators = [np.random.default_rng([seed, k]) for k in range(replicas)]
    courses = simulate_job(job, generators=generators, rate_factors=factors)
    elapsed_s = courses.elapsed_s
    return GoodputDocument(
        command_line=asked_by(),
        seed=seed,
        replicas=replicas,
        job=job,
        mtbf_stops=mtbf_stops,
        elapsed_s=Interval.of(elapsed_s),
        elapsed_mean_s=float(elapsed_s.mean()),
        effective_fraction=Interval.of(courses.effective_fraction),
        unplanned_stops=Interval.of(courses.unplanned_stops.astype(float)),
        stops_mean={name: float(row.mean()) for name, row in courses.stops.items()},
        spent_mean_s={a.value: float(courses.spent_s[a].mean()) for a in Activity},
        best_interval_s=best_interval_of(job),
        deadline_s=deadline_s,
        deadline_probability=(
            None if deadline_s is None else float((elapsed_s <= deadline_s).mean())
        ),
        caveats=tuple(_caveats(job, mtbf_stops)),
    )


def _refuse_hopeless(job: Job, *, rate_factor: float, most_stops: float) -> None:
    """Raise ``NotFeasible`` for a job that would hardly get on, before simulating it for ever."""
    # In the mean of the closed form: no wait for nodes.
    causes = tuple(
        replace(cause, mtbf_device_s=cause.mtbf_device_s / rate_factor) for cause in job.causes
    )
    elapsed_s = expected_elapsed_s(replace(job, causes=causes))
    effective, stops = job.work_s / elapsed_s, elapsed_s * rate_factor / job.mtbf_s
    if not (effective >= LOWEST_EFFECTIVE_FRACTION and stops <= most_stops):
        # beyond floating point there is no number to show
        got = f"{effective:.2g} and {stops:.2g}" if math.isfinite(stops) else "next to nothing"
        raise NotFeasible(
            f"goodput: at least {LOWEST_EFFECTIVE_FRACTION:.0%} of the time must be training that is "
            f"kept, in at most {most_stops:,.0f} stops, got {got}: a stop "
            f"every {format_duration(job.mtbf_s / rate_factor)}, "
            f"{format_duration(job.recovery_s)} to recover, a checkpoint of "
            f"{format_duration(job.checkpoint_write_s)} every "
            f"{format_duration(job.checkpoint_interval_s)}; save more often, recover faster, or take "
            "fewer devices, days or --replicas"
        )


def best_interval_of(job: Job) -> Seconds | None:
    """Best checkpoint interval by the formula; None if nothing fails, or a checkpoint costs nothing. [s]"""
    write_s, mtbf_s = job.checkpoint_write_s, job.mtbf_s
    if math.isinf(mtbf_s) or write_s == 0:
        return None
    return best_interval_s(write_s=write_s, mtbf_s=mtbf_s)


def _caveats(job: Job, mtbf_stops: int | None) -> Iterator[str]:
    if not job.causes:
        yield "no failure is drawn, as asked; no job of many devices is so lucky for weeks"
        return
    yield "failures are drawn as independent and exponential; real ones cluster"
    if mtbf_stops is None:
        yield "the mean time between failures is taken as exact; give --mtbf-stops"


HOURS_PER_YEAR: Final = 8760.0


@checks_arguments()
def compare_costs(
    budget: Budget | str | PathLike[str], *, today: dt.date | None = None
) -> CostDocument:
    """Compare buying with renting: cost of a useful device-hour, and where they cross.

    Parameters
    ----------
    budget
        In TOML.
    today
        For the age of prices; default: today.

    Raises
    ------
    InvalidDocument
        If the budget breaks a rule, or mixes currencies.
    """
    today = today or today_utc()
    if not isinstance(budget, Budget):
        budget = read_budget(Path(budget), today=today)
    items = purchase_items(budget.buy)
    # Owning as a line: only energy depends on use.
    buy = YearlyCost(
        name="buy",
        fixed=items.depreciation + items.idle_energy + items.staff + items.upkeep,
        per_utilisation=items.working_energy,
    )
    options = [_option(buy, None, budget)]
    for rental in budget.rent:
        rent = rental_cost(rental, budget)
        options.append(_option(rent, buying_pays(buy, rent), budget))
    return CostDocument(
        command_line=asked_by(),
        today=today,
        budget=budget,
        items=items,
        options=tuple(sorted(options, key=lambda option: option.yearly)),
        warnings=(*invented_prices(budget.prices()), *stale_prices(budget.prices(), today=today)),
    )


def purchase_items(buy: Purchase) -> PurchaseItems:
    """Capital is devices, spares and network; spares draw no power.

    Depreciation is a straight line from the price to its residue.
    """
    capital = (
        buy.devices * (1 + buy.spare_fraction) * buy.device_price.value + buy.network_price.value
    )
    full_kw = buy.devices * buy.power_per_device_w / KILOWATT_W * buy.pue
    full_energy = full_kw * HOURS_PER_YEAR * buy.energy_price.value
    return PurchaseItems(
        capital=capital,
        depreciation=capital * (1 - buy.residual_fraction) / buy.lifetime_years,
        idle_energy=full_energy * buy.idle_power_fraction,
        working_energy=full_energy * (1 - buy.idle_power_fraction),
        staff=buy.staff_price.value,
        upkeep=capital * buy.upkeep_fraction,
    )


def rental_cost(rental: Rental, budget: Budget) -> YearlyCost:
    """Renting as many useful device-hours: what interruptions waste is rented on top.

    Reserved devices are paid for every hour of the year; more are reserved if some time is lost.
    """
    hours = budget.buy.devices * HOURS_PER_YEAR / rental.effective_fraction
    egress = budget.egress
    fixed = 0.0 if egress is None else egress.gigabytes_per_year * egress.price.value
    paid = hours * rental.price.value
    if rental.kind == "reserved":
        return YearlyCost(name=rental.name, fixed=fixed + paid, per_utilisation=0.0)
    return YearlyCost(name=rental.name, fixed=fixed, per_utilisation=paid)


def buying_pays(buy: YearlyCost, rent: YearlyCost) -> Worthwhile | None:
    """Utilisations in 0 to 1 at which buying costs no more than renting; None if there are none."""
    at_0, at_1 = (buy.at(share) - rent.at(share) for share in (0, 1))
    if at_0 > 0 and at_1 > 0:
        return None
    crossover = at_0 / (at_0 - at_1) if at_0 > 0 or at_1 > 0 else 0.0
    return Worthwhile(
        at_least=crossover if at_0 > 0 else 0.0, at_most=crossover if at_1 > 0 else 1.0
    )


def _option(cost: YearlyCost, pays: Worthwhile | None, budget: Budget) -> CostOption:
    yearly = cost.at(budget.utilisation)
    useful_hours = budget.buy.devices * HOURS_PER_YEAR * budget.utilisation
    return CostOption(
        cost=cost, yearly=yearly, per_useful_device_hour=yearly / useful_hours, buying_pays=pays
    )
