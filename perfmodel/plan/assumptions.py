"""What an answer of a plan rests on, and which measurement would narrow it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Assumption(StrEnum):
    """What a plan varies alone; the value is what people read."""

    COMPUTING = "computing"
    COMMUNICATION = "communication"
    INTERFERENCE = "interference"
    STRAGGLERS = "stragglers"
    MODEL = "errors of the model"
    LATENTS = "the inferred parameters"
    LAYOUT_FORMULA = "what the formula of layouts misses"
    STALLS = "stalls between nodes"
    CHECKPOINT = "the time of a checkpoint"
    FAILURE_RATE = "failure rate, halved or doubled"
    PRICES = "prices, 10 % up or down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What narrows an assumption."""

    measurement: str
    minutes: float


#: No measurement narrows the others.
REMEDIES: Final[Mapping[Assumption, Remedy]] = {
    Assumption.COMPUTING: Remedy(
        measurement="perfmodel calibrate --budget standard, with this micro-batch among its own",
        minutes=10,
    ),
    Assumption.COMMUNICATION: Remedy(
        measurement="perfmodel calibrate on as many nodes as can be had, at least two", minutes=10
    ),
    Assumption.INTERFERENCE: Remedy(
        measurement="perfmodel calibrate --budget thorough", minutes=30
    ),
    Assumption.STRAGGLERS: Remedy(
        measurement="perfmodel calibrate with more ranks at once (--nproc, --nnodes)", minutes=10
    ),
    Assumption.MODEL: Remedy(
        measurement="perfmodel validate on that machine, named as validation of the option: measured errors "
        "replace guessed ones",
        minutes=5,
    ),
    Assumption.LATENTS: Remedy(
        measurement="more runs of that machine into the table of perfmodel calibrate --from-runs",
        minutes=30,
    ),
    Assumption.LAYOUT_FORMULA: Remedy(
        measurement="some steps of this very layout on that machine, added to the table of "
        "perfmodel calibrate --from-runs",
        minutes=20,
    ),
    Assumption.CHECKPOINT: Remedy(
        measurement="perfmodel calibrate in a folder on the storage of the job, which times checkpoints",
        minutes=12,
    ),
    Assumption.STALLS: Remedy(
        measurement="some steps of this layout on as many nodes, repeated on another day",
        minutes=40,
    ),
}
#: Where a validation was named already, it says how wrong the model is of the devices it had.
_VALIDATED: Final = Remedy(
    measurement="perfmodel calibrate, then validate, with more devices at once: the errors in use are of "
    "few",
    minutes=25,
)


def remedy(assumption: Assumption, *, is_validated: bool) -> Remedy | None:
    """What narrows an assumption, of a machine with or without a validation; None if nothing does."""
    if assumption is Assumption.MODEL and is_validated:
        return _VALIDATED
    return REMEDIES.get(assumption)
