"""What a useful device-hour costs in every way of paying for it."""

import datetime as dt
from typing import ClassVar

from perfmodel.documents.base import Document, Record
from perfmodel.documents.budget import Budget


class PurchaseItems(Record):
    """What owning costs per year, in the currency of the budget."""

    capital: float
    """What is paid at the start (not per year)."""
    depreciation: float
    idle_energy: float
    """Energy that is drawn even if nothing is trained."""
    working_energy: float
    """Energy on top at full utilisation."""
    staff: float
    upkeep: float


class YearlyCost(Record):
    """One way of paying, in the currency of the budget per year."""

    name: str
    fixed: float
    per_utilisation: float
    """On top at full utilisation."""

    def at(self, utilisation: float) -> float:
        """Cost of a year."""
        return self.fixed + self.per_utilisation * utilisation


class Worthwhile(Record):
    """Utilisations at which buying costs no more than a rental."""

    at_least: float
    at_most: float


class CostOption(Record):
    """One way of paying at the utilisation of the budget."""

    cost: YearlyCost
    yearly: float
    per_useful_device_hour: float
    buying_pays: Worthwhile | None
    """None: never, or buying itself."""


class CostDocument(Document):
    """Every way of paying, the cheapest first."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "cost"

    command_line: tuple[str, ...]
    today: dt.date
    budget: Budget
    items: PurchaseItems
    options: tuple[CostOption, ...]
    warnings: tuple[str, ...]
