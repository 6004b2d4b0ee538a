"""What a training step runs on: what every machine says, and machines inferred from runs of others."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import MinLen

from perfmodel.arrays import Count, Positive
from perfmodel.units import MIB, Bytes

#: Of machines for large models, where nobody says it: boards hold eight.
DEVICES_PER_NODE: Final = 8


class Evidence(enum.StrEnum):
    """Where a term comes from, from the best to the weakest."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    INFERRED = "inferred"
    """From runs of others; no part of a step was measured alone."""
    ASSUMED = "assumed"

    @classmethod
    def weakest(cls, found: Iterable["Evidence"]) -> "Evidence":
        """The weakest of some; of none, the weakest there is."""
        return max(found, key=list(cls).index, default=cls.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a process takes beyond tensors, and how far it may be off."""

    context_bytes: Bytes
    context_spread_bytes: Bytes
    """Standard deviation. [B]"""
    reserved_ratio: float
    """Memory held by the allocator over memory in use at the peak."""
    log_spread: float
    """Standard deviation of the logarithm of that ratio and of the tensors' bytes together."""
    evidence: str


#: CPU: errors of the sweep stay below 1.5 % (validate.memory); the process before any tensor is assumed.
#: CUDA: context with cuBLAS and cuDNN, 0.3 to 1 GiB on data-centre GPUs; both figures are assumptions.
OVERHEADS: Final[Mapping[str, Overhead]] = {
    "cpu": Overhead(
        context_bytes=300 * MIB,
        context_spread_bytes=75 * MIB,
        reserved_ratio=1.02,
        log_spread=0.02,
        evidence="tensors checked against the CPU allocator; context and slack assumed",
    ),
    "cuda": Overhead(
        context_bytes=700 * MIB,
        context_spread_bytes=250 * MIB,
        reserved_ratio=1.06,
        log_spread=0.06,
        evidence="not validated on a GPU: context assumed, slack from a model of the caching allocator",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file that a machine was read from."""

    digest: str = ""
    """SHA-256 of what the file says; the same data fitted again gives the same."""
    fingerprint: str = ""
    """Of the host that was measured."""
    made_utc: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """A machine; a what-if is ``dataclasses.replace`` of one. Equal only to itself."""

    device_name: str
    origin: Origin = Origin()
    """Kept by ``replace``: variants of one machine share their draws. Never in a file."""

    @property
    def digest(self) -> str:
        """SHA-256 of what the file says that the machine was read from."""
        return self.origin.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedParameter:
    """One parameter before and after the runs."""

    name: str
    value: Positive
    log_sigma: Positive
    """Standard deviation of its natural logarithm, after the runs."""
    prior: Positive
    prior_log_sigma: Positive
    determined: bool
    """False: the runs hardly tell, and the prior is kept with its wide uncertainty."""
    meaning: str
    draws: Annotated[tuple[Positive, ...], MinLen(1)]
    """Joint draws: entry i of all parameters belongs together; the first is the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviationSpreads:
    """Standard deviations of what the formula leaves unexplained, in log step time."""

    shape: Positive
    layout: Positive
    noise: Positive
    length: Positive
    """Distance at which layouts stop deviating alike, in doublings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedState:
    """A state in which every exchange between nodes stalls, and the odds of being in it."""

    stall_s: Positive
    """Per exchange. [s]"""
    weights: tuple[float, ...]
    """Of the logistic regression on the layout that tells how likely a job is disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Factors on the parts of a rank's memory, inferred from the peaks that runs printed."""

    runs: Annotated[tuple[int, ...], MinLen(1)]
    """Positions of those runs."""
    factors: dict[str, Positive]
    """By part; that of the context is bytes."""
    deviations: tuple[float, ...]
    """What the parts leave unexplained of every peak, log of printed over computed."""
    trust: tuple[Positive, ...]
    spreads: DeviationSpreads
    interval_widening: Positive


@dataclass(frozen=True, kw_only=True, eq=False)
class InferredMachine(Machine):
    """A machine that others trained on: what their runs say, and the runs."""

    num_runs: Count
    runs: dict[str, tuple[float, ...]]
    """Layout and workload of every run, column by column."""
    step_s: tuple[Positive, ...]
    fitted_parameters: Annotated[tuple[FittedParameter, ...], MinLen(1)]
    deviations: tuple[float, ...]
    """What the formula leaves unexplained of every run, log of measured over computed."""
    trust: tuple[Positive, ...]
    """How far every run is believed, in (0, 1]."""
    spreads: DeviationSpreads
    degraded: DegradedState | None
    """None if no run showed it."""
    interval_widening: Positive
    memory: PeakMemory | None = None
    """None if the runs printed no peaks."""
