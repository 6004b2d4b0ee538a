"""What computing costs, as a person writes it down: prices with their origin, purchase and rental."""

import datetime as dt
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from perfmodel.documents import Document, Record, Shown, Text, checked, read_toml
from perfmodel.engine.job import Job
from perfmodel.errors import InvalidDocument
from perfmodel.statistics import Interval, Share

#: A price older than this is said to be stale.
STALE_AFTER_DAYS: Final = 30

_PositiveShare = Annotated[float, Field(gt=0, le=1)]


class PriceUnit(enum.StrEnum):
    """What a price is for; a price of another unit is refused where it does not belong."""

    DEVICE = "per device"
    ONCE = "once"
    YEAR = "per year"
    DEVICE_HOUR = "per device-hour"
    KILOWATT_HOUR = "per kWh"
    GIGABYTE = "per GB"


class Price(Record):
    """An amount of money and where it comes from."""

    value: NonNegativeFloat
    unit: PriceUnit
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    """ISO 4217."""
    date: dt.date
    """Day on which it was quoted."""
    region: Text
    term: Text
    """How long one is bound, such as ``1 year`` or ``none``."""
    source: Text

    def age_days(self, today: dt.date) -> int:
        """Whole days since the quote; negative in the future."""
        return (today - self.date).days


def _per(unit: PriceUnit) -> AfterValidator:
    """Refuses a price of another unit."""

    def check(price: Price) -> Price:
        if price.unit is not unit:
            raise ValueError(f"must be {unit.value}, got {price.unit.value}")
        return price

    return AfterValidator(check)


PerDevice = Annotated[Price, _per(PriceUnit.DEVICE)]
Once = Annotated[Price, _per(PriceUnit.ONCE)]
PerYear = Annotated[Price, _per(PriceUnit.YEAR)]
PerDeviceHour = Annotated[Price, _per(PriceUnit.DEVICE_HOUR)]
PerKilowattHour = Annotated[Price, _per(PriceUnit.KILOWATT_HOUR)]
PerGigabyte = Annotated[Price, _per(PriceUnit.GIGABYTE)]


class Purchase(Record):
    """Devices that are bought, and what keeps them running."""

    devices: PositiveInt
    """That are used; spares come on top."""
    device_price: PerDevice
    """Of a device with its share of host, memory and rack."""
    spare_fraction: Share = 0.0
    """Spare devices over used ones."""
    network_price: Once
    """Switches, cables, optics, all together."""
    lifetime_years: PositiveFloat
    residual_fraction: Share = 0.0
    """Value at the end over the price; depreciation is a straight line in between."""
    power_per_device_w: PositiveFloat
    """At work, with its share of the host. [W]"""
    idle_power_fraction: Share
    """Power when idle over power at work."""
    pue: Annotated[float, Field(ge=1, le=5)]
    """Power of the data centre over power of the machines."""
    energy_price: PerKilowattHour
    staff_price: PerYear
    upkeep_fraction: Share = 0.0
    """Support and repair per year, over the purchase price."""


class Rental(Record):
    """Devices by the hour."""

    name: Text
    kind: Literal["on-demand", "reserved", "spot"]
    """Reserved hours are paid whether used or not; the others when used."""
    price: PerDeviceHour
    effective_fraction: _PositiveShare = 1.0
    """Share of paid time that is training: what interruptions leave, see ``perfmodel goodput``."""

    @model_validator(mode="after")
    def _says_its_share(self) -> Self:
        if self.kind == "spot" and "effective_fraction" not in self.model_fields_set:
            raise ValueError("effective_fraction of spot devices must be given")
        return self


class Egress(Record):
    """Data that leaves a rented data centre."""

    gigabytes_per_year: NonNegativeFloat
    price: PerGigabyte


class Budget(Record):
    """One question of money: the same useful device-hours, bought or rented."""

    utilisation: _PositiveShare
    """Share of the hours of a year in which the devices train."""
    buy: Purchase
    rent: Annotated[tuple[Rental, ...], Field(min_length=1)]
    egress: Egress | None = None

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        refuse_mixed_currencies(self.prices())
        names = [rental.name for rental in self.rent]
        if len({"buy", *names}) <= len(names):
            raise ValueError(
                f"rentals must have different names, none of them buy: {', '.join(names)}"
            )
        return self

    @property
    def currency(self) -> str:
        """Of all prices."""
        return self.buy.device_price.currency

    def prices(self) -> dict[str, Price]:
        """Every price by its place in the file."""
        found = {
            f"buy.{name}": getattr(self.buy, name)
            for name in ("device_price", "network_price", "energy_price", "staff_price")
        }
        found |= {f"rent.{rental.name}": rental.price for rental in self.rent}
        if self.egress is not None:
            found["egress.price"] = self.egress.price
        return found


def read_budget(path: Path, *, today: dt.date) -> Budget:
    """Read a budget in TOML.

    Raises ``InvalidDocument`` if a file cannot be read or breaks a rule, or a price is from the future.
    """
    budget = checked(read_toml(path, what="budget"), Budget, where=path)
    refuse_future_prices(budget.prices(), path=path, today=today)
    return budget


def refuse_future_prices(prices: Mapping[str, Price], *, path: Path, today: dt.date) -> None:
    """Raise ``InvalidDocument`` for the first quote from days to come."""
    for name, price in prices.items():
        if price.age_days(today) < 0:
            raise InvalidDocument(
                f"{path}: {name}: date must not be after {today}, got {price.date}; correct the date"
            )


#: Beginnings of sources which say that nobody asked for the amount.
_INVENTED: Final = ("invented", "example", "assumed", "guess", "made up", "unknown")


def invented_prices(prices: Mapping[str, Price]) -> list[str]:
    """One sentence if amounts were made up, as their own sources say."""
    names = [n for n, price in prices.items() if price.source.casefold().startswith(_INVENTED)]
    if not names:
        return []
    line = (
        f"PRICES ARE INVENTED ({len(names)} of {len(prices)}): put quotes with their source in their place "
        "before anybody decides"
    )
    return [line]


def stale_prices(prices: Mapping[str, Price], *, today: dt.date) -> list[str]:
    """A sentence for every quote that is too old to be relied on."""
    return [
        f"{name}: quoted {price.age_days(today)} days ago ({price.date}); stale after "
        f"{STALE_AFTER_DAYS}, ask again: {price.source}"
        for name, price in prices.items()
        if price.age_days(today) > STALE_AFTER_DAYS
    ]


def refuse_mixed_currencies(prices: Mapping[str, Price]) -> None:
    """Refuse prices in several currencies with a ``ValueError``."""
    currencies = {name: price.currency for name, price in prices.items()}
    if len(set(currencies.values())) > 1:
        named = ", ".join(f"{name} {currency}" for name, currency in currencies.items())
        raise ValueError(f"all prices must be in one currency, convert them first: {named}")


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


class CostDocument(Shown, Document):
    """Every way of paying, the cheapest first."""

    title: ClassVar[str] = "cost"
    made_by: ClassVar[str] = "perfmodel cost"

    command_line: tuple[str, ...]
    today: dt.date
    budget: Budget
    items: PurchaseItems
    options: tuple[CostOption, ...]
    warnings: tuple[str, ...]


# The course of a job over weeks: when it ends, where its time goes, how often to write checkpoints.
class GoodputDocument(Shown, Document):
    """Answer of simulated courses of a job."""

    schema_version: int = 4
    title: ClassVar[str] = "goodput"
    made_by: ClassVar[str] = "perfmodel goodput"

    command_line: tuple[str, ...]
    seed: int
    replicas: PositiveInt
    job: Job
    mtbf_stops: PositiveInt | None
    """From how many stops the mean times between failures were estimated; None: taken as exact."""
    elapsed_s: Interval
    """From the start of the job to its end, by the calendar. [s]"""
    elapsed_mean_s: PositiveFloat
    effective_fraction: Interval
    """Training that was kept, over all time."""
    unplanned_stops: Interval
    stops_mean: dict[str, float]
    """By cause."""
    spent_mean_s: dict[str, float]
    """By activity; sums to the mean elapsed time. [s]"""
    best_interval_s: PositiveFloat | None
    """Work between two checkpoints that ends soonest; None if nothing ever fails, or a checkpoint costs nothing. [s]"""
    deadline_s: PositiveFloat | None
    deadline_probability: float | None
    """Share of the courses that end in time."""
    caveats: tuple[str, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total_s = sum(self.spent_mean_s.values())
        if abs(total_s - self.elapsed_mean_s) > 1e-6 * self.elapsed_mean_s:
            raise ValueError(
                f"spent_mean_s must sum to elapsed_mean_s, got {total_s} and {self.elapsed_mean_s}"
            )
        return self


class BatchOutlook(Record):
    """One batch size; ratios are against the reference batch."""

    batch: PositiveFloat
    """Samples per optimizer step, of all devices together."""
    samples: Interval
    """Samples to the target in one more tuned run."""
    steps: Interval
    samples_ratio: Interval
    """Samples to the target over those of the reference batch, by the law alone."""
    samples_per_s: PositiveFloat | None
    throughput_speedup: PositiveFloat | None
    target_speedup: Interval | None
    """Time to the target of the reference batch over that of this one: the speed-up that counts."""
    learning_rate_factor: PositiveFloat
    """Best learning rate of SGD over that of the reference batch; for Adam its square root."""
    time_to_target_s: Interval | None
    is_beyond_critical: bool
    """Larger than the median critical batch."""
    is_extrapolated: bool
    """Larger than every batch that was run."""


class BatchDocument(Document):
    """The law of the batch of one task, and what follows from it."""

    schema_version: int = 3
    title: ClassVar[str] = "batch outlook"
    made_by: ClassVar[str] = "perfmodel batch"

    command_line: tuple[str, ...]
    points: dict[PositiveFloat, PositiveFloat]
    """Batch to samples to the target, as they were given, in samples."""
    reference_batch: PositiveFloat
    critical_batch: Interval
    """Batch that needs twice the samples of a tiny one."""
    outlooks: tuple[BatchOutlook, ...]
    caveats: tuple[str, ...]
