"""Swing of a plan's answer when one assumption at a time is at its low and at its high end."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost import Samples
from perfmodel.documents.plan import Swing
from perfmodel.plan.goodput import Stops
from perfmodel.units import Seconds

#: Failure rates are rarely known better than within this factor, and prices than within this share.
FAILURE_FACTOR: Final = 2.0
PRICE_SHARE: Final = 0.1


class Assumption(StrEnum):
    """What a plan varies alone; the value is what people read."""

    COMPUTING = "computing"
    COMMUNICATION = "communication"
    INTERFERENCE = "interference"
    STRAGGLERS = "stragglers"
    MODEL = "errors of the model"
    FITTED = "the inferred parameters"
    LAYOUT_FORMULA = "what the formula of layouts misses"
    STALLS = "stalls between nodes"
    CHECKPOINT = "the time of a checkpoint"
    FAILURE_RATE = "failure rate, halved or doubled"
    PRICES = "prices, 10 % up or down"


class Remedy(NamedTuple):
    """What narrows an assumption."""

    measurement: str
    minutes: float


#: No measurement narrows the others.
_REMEDIES: Final[Mapping[Assumption, Remedy]] = {
    Assumption.COMPUTING: Remedy(
        "perfmodel calibrate --budget standard, with this micro-batch among its own", 10
    ),
    Assumption.COMMUNICATION: Remedy(
        "perfmodel calibrate on as many nodes as can be had, at least two", 10
    ),
    Assumption.INTERFERENCE: Remedy("perfmodel calibrate --budget thorough", 30),
    Assumption.STRAGGLERS: Remedy(
        "perfmodel calibrate with more ranks at once (--nproc, --nnodes)", 10
    ),
    Assumption.MODEL: Remedy(
        "perfmodel validate on that machine, named as validation of the option: measured errors "
        "replace guessed ones",
        5,
    ),
    Assumption.FITTED: Remedy(
        "more runs of that machine into the table of perfmodel calibrate --from-runs", 30
    ),
    Assumption.LAYOUT_FORMULA: Remedy(
        "some steps of this very layout on that machine, added to the table of "
        "perfmodel calibrate --from-runs",
        20,
    ),
    Assumption.CHECKPOINT: Remedy(
        "perfmodel calibrate in a folder on the storage of the job, which times checkpoints", 12
    ),
    Assumption.STALLS: Remedy(
        "some steps of this layout on as many nodes, repeated on another day", 40
    ),
}
#: Where a validation was named already, it says how wrong the model is of the devices it had.
_VALIDATED: Final = Remedy(
    "perfmodel calibrate, then validate, with more devices at once: the errors in use are of few",
    25,
)


def remedy(assumption: Assumption, *, is_validated: bool) -> Remedy | None:
    """What narrows an assumption, of a machine with or without a validation; None if nothing does."""
    if assumption is Assumption.MODEL and is_validated:
        return _VALIDATED
    return _REMEDIES.get(assumption)


#: An assumption, and the factors on the step at its low and at its high end.
Ends = tuple[Assumption, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """What a plan comes to, nominally."""

    elapsed_s: Seconds
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a total is computed from, relative to what is assumed."""

    step: float = 1.0
    failures: float = 1.0
    price: float = 1.0
    checkpoint: float = 1.0


def tornado(
    ends: Iterable[Ends],
    total: Callable[[Knobs], Total],
    *,
    stops: Stops | None,
    is_validated: bool = False,
) -> tuple[Swing, ...]:
    """Swing of every assumption from its 5th to its 95th percentile, the largest first.

    Failure rates are varied by a factor of 2 and prices by 10 %: their uncertainty is not measured.

    ``ends``: by which factors each assumption about the step moves it.
    ``is_validated``: whether the errors of the model come from a validation already.
    """
    varied = [(name, [Knobs(step=factor) for factor in factors]) for name, factors in ends]
    if stops is not None:
        factors = (1 / FAILURE_FACTOR, FAILURE_FACTOR)
        varied.append((Assumption.FAILURE_RATE, [Knobs(failures=f) for f in factors]))
    if stops is not None and stops.is_timed:
        times = [Knobs(checkpoint=f) for f in draws_ends(stops.write_s)]
        varied.append((Assumption.CHECKPOINT, times))
    shares = (1 - PRICE_SHARE, 1 + PRICE_SHARE)
    varied.append((Assumption.PRICES, [Knobs(price=share) for share in shares]))
    swings = []
    for name, knobs in varied:
        found = [total(each) for each in knobs]
        narrows = remedy(name, is_validated=is_validated)
        swings.append(
            Swing(
                assumption=name.value,
                low_cost=min(each.cost for each in found),
                high_cost=max(each.cost for each in found),
                low_elapsed_s=min(each.elapsed_s for each in found),
                high_elapsed_s=max(each.elapsed_s for each in found),
                measurement=narrows.measurement if narrows else "",
                minutes=narrows.minutes if narrows else None,
            )
        )
    return tuple(sorted(swings, key=lambda swing: swing.low_cost - swing.high_cost))


def next_measurement(swings: tuple[Swing, ...]) -> str:
    """The measurement that bears on the largest swing for its minutes."""
    measurable = [swing for swing in swings if swing.minutes]
    best = max(
        measurable, key=lambda s: (s.high_cost - s.low_cost) / (s.minutes or 1), default=None
    )
    if best is None or best.high_cost == best.low_cost:
        return "none: no measurement moves this answer"
    return f"{best.measurement} (about {best.minutes:g} minutes; bears on {best.assumption})"


def draws_ends(draws: Samples) -> tuple[float, float]:
    """5th and 95th percentile over the nominal draw, the first; 1 is always inside."""
    low, high = np.quantile(draws, [0.05, 0.95]) / draws[0]
    return float(min(low, 1.0)), float(max(high, 1.0))
