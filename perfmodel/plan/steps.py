"""What a plan asks of a way to train: steps over device counts, whatever predicts them."""

from dataclasses import dataclass
from typing import Literal, Protocol

from perfmodel.arrays import IntArray
from perfmodel.cost.terms import Samples
from perfmodel.documents.plan import ScalingStatement
from perfmodel.machine.evidence import Evidence
from perfmodel.plan.tornado import Ends


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
