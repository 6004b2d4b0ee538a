"""Use case: what a useful device-hour costs, bought and rented, and where the two cross.

All costs are per year. With utilisation ``u``, the share of hours in which all devices train, each
way of paying is a line ``fixed + per_utilisation u``; two lines cross where they are equal.
"""

import datetime as dt
from os import PathLike
from pathlib import Path
from typing import Final

from perfmodel.documents import asked_by, today_utc
from perfmodel.documents.budget import (
    Budget,
    CostDocument,
    CostOption,
    Purchase,
    PurchaseItems,
    Rental,
    Worthwhile,
    YearlyCost,
    invented_prices,
    read_budget,
    stale_prices,
)
from perfmodel.units import KILOWATT_W

HOURS_PER_YEAR: Final = 8760.0


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
    buy = purchase_cost(items)
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


def purchase_cost(items: PurchaseItems) -> YearlyCost:
    """Owning as a line: only energy depends on use."""
    return YearlyCost(
        name="buy",
        fixed=items.depreciation + items.idle_energy + items.staff + items.upkeep,
        per_utilisation=items.working_energy,
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
