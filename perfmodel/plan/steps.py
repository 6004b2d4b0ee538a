"""What a plan asks of a way to train: steps over device counts, whatever predicts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

from perfmodel.arrays import IntArray
from perfmodel.cost.terms import Samples
from perfmodel.documents.plan import ScalingStatement
from perfmodel.machine.evidence import Evidence


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


#: An assumption, and the factors on the step at its low and at its high end.
Ends = tuple[Assumption, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInMemory:
    """Whether a step fits into a device."""

    needed_bytes: float
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """One size at one batch."""

    micro_batch: int
    global_batch: int
    step_s: Samples
    """Draws; the first is nominal, shape ``(num_draws,)``. [s]"""
    evidence: Evidence | Literal["inferred"]
    memory: FitInMemory | None
    layout: str | None = None


class Steps(Protocol):
    """Steps of one workload at one batch on one machine, over device counts."""

    counts: IntArray
    """Ascending: sizes that split the batch and fit into memory."""
    num_skipped: int
    """Sizes that do not split the batch."""
    num_too_large: int
    """Sizes that do not fit into memory."""
    refusal: str
    """Why there is no size at all; empty if there is one."""

    def global_batches(self, counts: IntArray) -> IntArray:
        """Samples per step of all devices together, one per count."""

    def step_s(self, counts: IntArray) -> Samples:
        """Draws of the step at any counts, shape ``(len(counts), num_draws)``. [s]"""

    def predict(self, counts: list[int]) -> None:
        """Predict these counts, so that they are read exactly from now on."""

    def has(self, count: int) -> bool:
        """Whether a count was predicted, and not only read between others."""

    def facts(self, count: int) -> Facts:
        """One size."""

    def ends(self, count: int) -> list[Ends]:
        """Assumptions about the step, and by which factors each alone moves it."""

    def scaling(self, count: int) -> list[ScalingStatement]:
        """Weak and strong scaling up to a size."""

    def caveats(self, count: int) -> list[str]:
        """What must be known before acting on a size."""
