"""Swing of a plan's answer when one assumption at a time is at its low and at its high end."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from perfmodel.cost import Samples
from perfmodel.documents.plan import Swing
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
    FAILURE_RATE = "failure rate, halved or doubled"
    PRICES = "prices, 10 % up or down"


#: What narrows an assumption, and in about how many minutes.
_Remedy: TypeAlias = tuple[str, float]
#: No measurement narrows the others.
_REMEDIES: Final[Mapping[Assumption, _Remedy]] = {
    Assumption.COMPUTING: (
        "perfmodel calibrate --budget standard, with this micro-batch among its own",
        10,
    ),
    Assumption.COMMUNICATION: (
        "perfmodel calibrate on as many nodes as can be had, at least two",
        10,
    ),
    Assumption.INTERFERENCE: ("perfmodel calibrate --budget thorough", 30),
    Assumption.STRAGGLERS: ("perfmodel calibrate with more ranks at once (--nproc, --nnodes)", 10),
    Assumption.MODEL: (
        (
            "perfmodel validate on that machine, named as validation of the option: measured "
            "errors replace guessed ones"
        ),
        5,
    ),
    Assumption.FITTED: (
        "more runs of that machine into the table of perfmodel calibrate --from-runs",
        30,
    ),
    Assumption.LAYOUT_FORMULA: (
        (
            "some steps of this very layout on that machine, added to the table of "
            "perfmodel calibrate --from-runs"
        ),
        20,
    ),
    Assumption.STALLS: ("some steps of this layout on as many nodes, repeated on another day", 40),
}
#: Where a validation was named already, it says how wrong the model is of the devices it had.
_VALIDATED: Final[_Remedy] = (
    "perfmodel calibrate, then validate, with more devices at once: the errors in use are of few",
    25,
)


#: An assumption, and the factors on the step at its low and at its high end.
Ends = tuple[Assumption, tuple[float, float]]


class Knobs(NamedTuple):
    """What a total is computed from, relative to what is assumed."""

    step: float = 1.0
    failures: float = 1.0
    price: float = 1.0


def tornado(
    ends: Iterable[Ends],
    total: Callable[[Knobs], tuple[Seconds, float]],
    *,
    fails: bool,
    is_validated: bool = False,
) -> tuple[Swing, ...]:
    """Swing of every assumption from its 5th to its 95th percentile, the largest first.

    Failure rates are varied by a factor of 2 and prices by 10 %: their uncertainty is not measured.

    ``total``: nominal duration and cost of the plan.
    ``ends``: by which factors each assumption about the step moves it.
    ``fails``: whether the plan knows failures.
    ``is_validated``: whether the errors of the model come from a validation already.
    """
    varied = [(name, [Knobs(step=factor) for factor in factors]) for name, factors in ends]
    if fails:
        factors = (1 / FAILURE_FACTOR, FAILURE_FACTOR)
        varied.append((Assumption.FAILURE_RATE, [Knobs(failures=f) for f in factors]))
    shares = (1 - PRICE_SHARE, 1 + PRICE_SHARE)
    varied.append((Assumption.PRICES, [Knobs(price=share) for share in shares]))
    remedies = {**_REMEDIES, Assumption.MODEL: _VALIDATED} if is_validated else _REMEDIES
    swings = []
    for name, knobs in varied:
        elapsed_s, cost = zip(*map(total, knobs), strict=True)
        measurement, minutes = remedies.get(name, ("", None))
        swings.append(
            Swing(
                assumption=name.value,
                low_cost=min(cost),
                high_cost=max(cost),
                low_elapsed_s=min(elapsed_s),
                high_elapsed_s=max(elapsed_s),
                measurement=measurement,
                minutes=minutes,
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
