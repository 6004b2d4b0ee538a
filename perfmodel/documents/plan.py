"""Ranked ways to get the work done by a day, for some money."""

import datetime as dt
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Record, Share
from perfmodel.documents.plan_file import PlanFile
from perfmodel.documents.prediction import Evidence, Interval


class PlanRow(Record):
    """One option at one size."""

    option: str
    devices: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt
    step_s: Interval
    elapsed_s: Interval
    """From the start to the end of the job, stops included; p50 is the nominal one. [s]"""
    cost: Interval
    """In the currency of the plan."""
    energy_kwh: float | None
    """Nominal, with the site's share; None if the plan gives no power. [kWh]"""
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
    checkpoint_s: Interval | None = None
    """Of one write, where a calibration timed it; None if the plan says it, or nothing fails. [s]"""
    evidence: Evidence | Literal["inferred"]
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


class ScalingStatement(Record):
    """How the first row grows from fewer devices, under one of the two questions."""

    scaling: Literal["weak", "strong"]
    batch: PositiveInt
    """Weak: of each device, in every pass; strong: of all devices together. What stays fixed."""
    devices: PositiveInt
    from_devices: PositiveInt
    speedup: Interval
    """Samples per second over those of the fewer devices."""
    efficiency: Interval
    """Speed-up over the ratio of devices."""


class PlanDocument(Document):
    """The answer to a plan."""

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "plan"

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
    scaling: tuple[ScalingStatement, ...]
    """Of the first row, or of the nearest: weak and strong; a question that cannot be put is left out."""
    tornado: tuple[Swing, ...]
    """Of the first row, or of the nearest; the largest swing of the cost first."""
    next_measurement: str
    caveats: tuple[str, ...]
    warnings: tuple[str, ...]
