"""A plan as a person writes it: the work, the limits, and the options with their prices, in TOML."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag
from pydantic import model_validator as validator

from perfmodel.documents import Document, Record, Shown, Text, checked, read_toml
from perfmodel.documents.budget import (
    Once,
    PerDeviceHour,
    PerKilowattHour,
    Price,
    refuse_future_prices,
    refuse_mixed_currencies,
)
from perfmodel.errors import InvalidDocument, UsageError
from perfmodel.layout import Layout, parse_layout
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval, Share
from perfmodel.units import Bytes, parse_bytes


class Work(Record):
    """What has to be trained, given in one of three ways."""

    workload: Text | None = None
    """Calibrated in every profile by that name, or a workload file beside the plan."""
    model: Text | None = None
    """Instead: a large model by name or Hugging Face config beside the plan, spread by layouts; the
    profiles are then those of ``calibrate --from-runs``, and a sample is a sequence."""
    sequence_length: PositiveInt | None = None
    """Of a large model; default: what it is usually trained with. [tokens]"""
    samples: PositiveFloat | None = None
    epochs: PositiveFloat | None = None
    samples_per_epoch: PositiveFloat | None = None
    tokens: PositiveFloat | None = None
    tokens_per_sample: PositiveFloat | None = None
    scaling: Literal["weak", "strong"]
    """Weak: the options' batches are per device; strong: of all devices together."""
    accumulation: PositiveInt = 1

    @validator(mode="after")
    def _said_once(self) -> Self:
        if (self.workload is None) == (self.model is None):
            raise ValueError("either workload or model must be given")
        if self.model is None and self.sequence_length is not None:
            raise ValueError("sequence_length must come with model")
        if self.model is not None and self.tokens_per_sample is not None:
            raise ValueError("tokens_per_sample of a model must be given as sequence_length")
        if self.model is not None and self.accumulation != 1:
            raise ValueError("accumulation of a model must be left to its layouts")
        tokens = self.tokens if self.model is None else None
        pairs = (
            ("epochs", self.epochs, "samples_per_epoch", self.samples_per_epoch),
            ("tokens", tokens, "tokens_per_sample", self.tokens_per_sample),
        )
        for name, value, partner, other in pairs:
            if (value is None) != (other is None):
                raise ValueError(f"{name} and {partner} must be given together")
        ways = [self.samples is not None, self.epochs is not None, self.tokens is not None]
        if sum(ways) != 1:
            raise ValueError(
                "the work must be given once: samples, or epochs and samples_per_epoch, or tokens and "
                "tokens_per_sample"
            )
        return self

    @property
    def total_samples(self) -> float:
        """Samples to train on, repeats included."""
        if self.epochs is not None and self.samples_per_epoch is not None:
            return self.epochs * self.samples_per_epoch
        length = self.tokens_per_sample or self.sequence_length
        if self.tokens is not None and length is not None:
            return self.tokens / length
        assert self.samples is not None
        return self.samples

    @property
    def name(self) -> str:
        """The workload or the model."""
        name = self.workload or self.model
        assert name is not None
        return name


class Limits(Record):
    """What an option has to keep."""

    start: dt.date | None = None
    """First day of training; default: today."""
    deadline: dt.date
    """Training must have ended when this day begins."""
    probability: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """With which deadline and budget have to be kept, both together."""
    budget: PositiveFloat | None = None
    """In the currency of the prices."""
    power_kw: PositiveFloat | None = None
    """Of all devices, with the data centre's share. [kW]"""


class Failures(Record):
    """What stops the job; see ``perfmodel goodput``."""

    mtbf_device_hours: PositiveFloat
    checkpoint_s: PositiveFloat
    """Training stands still for one write. [s]"""
    detection_s: NonNegativeFloat = 0.0
    restart_s: NonNegativeFloat = 0.0


#: Sizes of one option; each is a candidate with every batch.
MOST_COUNTS: Final = 2**20
#: The same of a large model, whose layouts are searched for every size and batch.
MOST_SEARCHED: Final = 256
#: Options x batches x counts of a plan, eight columns of numbers each.
MOST_CANDIDATES: Final = 2**21


class CountRange(Record):
    """Device counts at even steps."""

    first: PositiveInt
    last: PositiveInt
    step: PositiveInt = 1

    @validator(mode="after")
    def _rises(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last must be >= first, got {self.last} and {self.first}")
        if (self.last - self.first) // self.step >= MOST_COUNTS:
            raise ValueError(
                f"at most {MOST_COUNTS:,} counts, got {self.first} to {self.last} by {self.step}"
            )
        return self


Counts = Annotated[
    Annotated[tuple[PositiveInt, ...], Tag("list")] | Annotated[CountRange, Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, dict | CountRange) else "list"),
]


class Option(Record):
    """A machine at a price, in any of some sizes."""

    name: Text
    profile: Text
    """Of the machine, from ``perfmodel calibrate``; beside the plan."""
    validation: Text | None = None
    """Of that machine: earlier errors enter the intervals; beside the plan."""
    device: Text | None = None
    """Another device by its data sheet, to which the profile is scaled with wide uncertainty."""
    cluster: Text | None = None
    """Links between the devices: a file beside the plan, or links by name such as "8 nvlink4, 32 eth-100";
    default: those of the profile."""
    device_memory: Text | None = None
    """Of one device, such as 80GiB: what does not fit is no candidate. Default: nobody asks."""
    layout: Text | None = None
    """Of a large model, such as "tp=8 pp=2 zero=1 micro_batch=1"; default: every layout is tried."""
    devices_per_node: PositiveInt | None = None
    """Of a large model: devices that share fast links; default 8, or as the cluster has it."""
    counts: Counts
    batches: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    price: PerDeviceHour
    energy_price: PerKilowattHour | None = None
    """On top, where power is not part of the price."""
    setup_price: Once | None = None
    """Once, whatever the number of devices."""
    power_per_device_w: PositiveFloat | None = None
    pue: Annotated[float, Field(ge=1, le=5)] = 1.0

    @validator(mode="after")
    def _is_whole(self) -> Self:
        if self.energy_price is not None and self.power_per_device_w is None:
            raise ValueError("energy_price must come with power_per_device_w")
        if not self.device_counts:
            raise ValueError("counts must name at least one number of devices")
        if self.device_memory is not None:
            parse_bytes(self.device_memory)
        fixed = self.fixed_layout
        if fixed is not None and (fixed.dp, fixed.accumulation) != (1, 1):
            raise ValueError(
                "dp and accumulation of layout must be left out: counts and batches say them"
            )
        return self

    @property
    def capacity_bytes(self) -> Bytes | None:
        """Memory of one device; None if nobody asks. [B]"""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    @property
    def fixed_layout(self) -> Layout | None:
        """The layout that was written down, with dp and accumulation of 1; None: all are tried."""
        if self.layout is None:
            return None
        try:
            return parse_layout(self.layout)
        except UsageError as error:
            raise ValueError(str(error)) from error

    @property
    def device_counts(self) -> Sequence[int]:
        """Ascending, each once."""
        if isinstance(self.counts, CountRange):
            return range(self.counts.first, self.counts.last + 1, self.counts.step)
        return tuple(sorted(set(self.counts)))

    @property
    def power_w(self) -> float:
        """Per device with the data centre's share; 0 if nothing is said. [W]"""
        return (self.power_per_device_w or 0.0) * self.pue


class PlanFile(Record):
    """Everything that an answer may depend on."""

    work: Work
    limits: Limits
    failures: Failures | None = None
    option: Annotated[tuple[Option, ...], Field(min_length=1)]

    @validator(mode="after")
    def _consistent(self) -> Self:
        names = [option.name for option in self.option]
        if len(set(names)) < len(names):
            raise ValueError(f"options must have different names, got {', '.join(names)}")
        refuse_mixed_currencies(self.prices())
        silent = [option.name for option in self.option if option.power_per_device_w is None]
        if self.limits.power_kw is not None and silent:
            raise ValueError(f"power_kw needs power_per_device_w of {', '.join(silent)}")
        candidates = sum(len(each.device_counts) * len(each.batches) for each in self.option)
        if candidates > MOST_CANDIDATES:
            raise ValueError(
                f"options x batches x counts must be <= {MOST_CANDIDATES:,}, got {candidates:,}"
            )
        for option in self.option:
            _refuse_foreign_keys(option, is_large=self.work.model is not None)
        return self

    @property
    def currency(self) -> str:
        """Of all prices."""
        return self.option[0].price.currency

    def prices(self) -> dict[str, Price]:
        """Every price by its place in the file."""
        return {
            f"{option.name}.{name}": price
            for option in self.option
            for name in ("price", "energy_price", "setup_price")
            if (price := getattr(option, name)) is not None
        }


def _refuse_foreign_keys(option: Option, *, is_large: bool) -> None:
    """Refuse with a ``ValueError`` what an option says in vain, or leaves out."""
    foreign = ("validation", "device") if is_large else ("layout", "devices_per_node")
    for name in foreign:
        if getattr(option, name) is not None:
            kind = "work.workload" if is_large else "work.model"
            raise ValueError(f"{name} of {option.name} must come with {kind}")
    if not is_large:
        return
    if option.cluster is not None and option.devices_per_node is not None:
        raise ValueError(f"devices_per_node of {option.name} must be left out: its cluster says it")
    if option.device_memory is None:
        raise ValueError(f"device_memory of {option.name} must be given with work.model")
    searched = len(option.device_counts) * len(option.batches)
    if searched > MOST_SEARCHED:
        raise ValueError(
            f"counts x batches of {option.name} must be <= {MOST_SEARCHED} with work.model, got {searched}"
        )


def read_plan(path: Path, *, today: dt.date) -> PlanFile:
    """Read a plan in TOML.

    Raises ``InvalidDocument`` if a file cannot be read, breaks a rule, or contradicts itself or today.
    """
    plan = checked(read_toml(path, what="plan"), PlanFile, where=path)
    refuse_future_prices(plan.prices(), path=path, today=today)
    start = plan.limits.start or today
    if start < today:
        raise InvalidDocument(
            f"{path}: limits.start: must not be before {today}, got {start}; give a later one, or none"
        )
    if plan.limits.deadline <= start:
        raise InvalidDocument(
            f"{path}: limits.deadline: must be after the start ({start}), got {plan.limits.deadline}; "
            "give a later one"
        )
    return plan


class PlanRow(Record):
    """One option at one size."""

    option: str
    devices: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt
    step_s: Interval
    elapsed_s: Interval
    """From the start to the end of the job, stops included; nominal is the nominal one. [s]"""
    cost: Interval
    """In the currency of the plan."""
    energy_kwh: float | None
    """Nominal, with the data centre's share; None if the plan gives no power. [kWh]"""
    power_kw: float | None
    deadline_probability: Share
    probability: Share
    """That deadline and budget are both kept."""
    end: dt.date
    """Day on which it ends, nominally."""
    latest_end: dt.date
    """Day on which the p95 of the time ends."""
    expected_stops: float
    checkpoint_interval_s: float | None
    """Of one write, where a calibration timed it; None if the plan says it, or nothing fails. [s]"""
    evidence: Evidence
    """The weakest of its terms; inferred: from runs of others, no part measured alone."""
    layout: str | None = None
    """Of a large model, in the grammar of ``predict --layout``."""
    needed_bytes: PositiveFloat | None = None
    """Of the fullest device; None if the plan gives no device memory. [B]"""
    fit_probability: Share | None = None
    """That this is below the memory of the device."""


class OptionVerdict(Record):
    """The best size of an option, and why it was not taken."""

    row: PlanRow
    """The cheapest that keeps all limits, or the one that comes nearest."""
    is_feasible: bool
    reason: str
    break_even_price: float | None
    """Per device-hour: below it this row would cost less than the winner; None for the winner, or if
    no price helps."""
    smallest_devices: PositiveInt | None
    """Fewest devices that meet the deadline with the probability asked for, whatever they cost."""


class Swing(Record):
    """One assumption at its low and at its high end, all else nominal."""

    assumption: str
    low_cost: float
    high_cost: float
    low_elapsed_s: float
    high_elapsed_s: float
    measurement: str
    """What would narrow it; empty if no measurement does."""
    minutes: float | None
    """About how long that takes."""


class PlanAccuracy(Record):
    """What a validation found on the machine: errors as fractions, inside the calibrated range."""

    validation: str
    """As the plan names it."""
    num_settings: PositiveInt
    mape: float
    worst_absolute: float
    coverage: Share
    """Share of the settings inside their 90 % intervals."""
    passed: bool


class PlanMachine(Record):
    """What the predictions of some options rest on."""

    options: tuple[str, ...]
    profile: str
    """As the plan names it."""
    digest: str
    device: str
    basis: Literal["measured", "inferred"]
    """Measured here by ``calibrate``, or inferred from runs of others."""
    made_utc: str
    num_runs: PositiveInt
    """Settings of training steps that were timed, or runs that were read."""
    most_devices: PositiveInt
    """Devices of the largest group among them."""
    accuracy: PlanAccuracy | None
    """None: nobody checked predictions of this machine against fresh runs."""


class PlanDocument(Shown, Document):
    """The answer to a plan."""

    schema_version: int = 5
    title: ClassVar[str] = "plan"
    made_by: ClassVar[str] = "perfmodel plan options"

    command_line: tuple[str, ...]
    today: dt.date
    start: dt.date
    plan: PlanFile
    machines: tuple[PlanMachine, ...]
    num_candidates: int
    num_feasible: int
    num_skipped: int
    """Sizes into which a global batch cannot be split evenly."""
    num_too_large: int
    """Sizes and batches that do not fit into the memory of the devices."""
    ranked: tuple[PlanRow, ...]
    """The cheapest first; empty if nothing is feasible."""
    options: Annotated[tuple[OptionVerdict, ...], Field(min_length=1)]
    """One per option: the winner first, or what comes nearest; then by cost, or by what they lack."""
    front: tuple[PlanRow, ...]
    """Feasible, and nothing is both sooner and cheaper; the soonest first."""
    tornado: tuple[Swing, ...]
    """Of the first row, or of the nearest; the largest swing of the cost first."""
    next_measurement: str
    caveats: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def machine_of(self) -> dict[str, PlanMachine]:
        """What each option rests on, by its name."""
        return {name: machine for machine in self.machines for name in machine.options}
