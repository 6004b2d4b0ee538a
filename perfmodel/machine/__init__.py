"""What a training step runs on: what every machine says, machines inferred from runs, clusters as tiers of links."""

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import MinLen

from perfmodel.errors import (
    WrongArgument,
    check_at_least,
    check_non_negative,
    check_positive,
    check_within,
)
from perfmodel.statistics import Count, Positive
from perfmodel.units import MIB, Bytes, BytesPerSecond, Seconds

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

    @classmethod
    def of_step(cls, terms: Mapping[str, "Evidence"]) -> "Evidence":
        """That of the step as a whole, if it was measured, or else the weakest of its terms."""
        return terms.get("step") or cls.weakest(terms.values())


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
    workspace_bytes: Bytes = 0
    """Kept for each thread that multiplies matrices. [B]"""
    group_bytes: Bytes = 0
    """Of the library of collectives, where there is more than one rank. [B]"""


#: CPU: errors of the sweep stay below 1.5 % (validate.memory); the process before any tensor is assumed.
#: CUDA: context with cuBLAS and cuDNN, 0.3 to 1 GiB on data-centre GPUs. An H200 (torch 2.11, CUDA 13.0) held 767 MiB,
#: and 560 MiB more with a group of NCCL of one rank; RCCL on GPUs of AMD is assumed to take as much. Peaks of 17 models
#: on an H100 were 2.7 % off in the mean, at most 9.9 % (docs/records/strangers).
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
        evidence="checked on an H100 and an H200: context assumed, slack from a model of the caching allocator",
        group_bytes=560 * MIB,
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Machine:
    """A machine; a what-if is ``dataclasses.replace`` of one. Equal only to itself."""

    device_name: str
    origin: Origin = Origin()
    """Kept by ``replace``: variants of one machine share their draws. Never in a file."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.device_name}>"

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
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


# A cluster as tiers of links, from the devices of a node outwards; it knows rates, never seconds of work.
DEVICE = "device"
#: Uncertainty, in log, of rates and latencies that a cluster file gives: a prior. Published all-reduces
#: reach 50 to 97 % of the line rate that data sheets name.
UNCERTAINTY_OF_FILE: Final = 0.3
#: The same of the network between nodes where nobody names it, from that with which such nodes ship: within a
#: factor of 7. Published all-reduces and all-gathers of 2 to 8 nodes stray 0.9 to 2.0, one source left out each time.
UNKNOWN_NETWORK: Final = 1.2
#: The tier of this name, if there is one, joins the devices of a machine.
NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Members that reach each other through links of one kind."""

    name: str
    of: str
    """What is joined: ``device``, or the name of the tier inside."""
    count: int
    """Members of one group of the tier."""
    link_bytes_per_s: BytesPerSecond
    """Of one link, each way. [B/s]"""
    latency_s: Seconds
    """Of one message through this tier, beyond that of the tiers inside. [s]"""
    links: int = 1
    """Of each member into the tier, used together."""
    oversubscription: float = 1.0
    """Rate of the members' links over what the tier carries when all of them send."""
    in_switch_reduction: float = 0.0
    """Of a tier whose switches add what members send (NVLS): part of the links' rate that is reached
    then; 0 where they cannot."""
    source: str = ""
    log_error: float = UNCERTAINTY_OF_FILE
    """Standard deviation of the logarithm of rate and latency."""
    as_measured: bool = False
    """Whether messages take what they took between nodes on the calibrated machine, whose rate this is."""

    def __post_init__(self) -> None:
        """Refuse tiers that cannot be built."""
        check_at_least("count", self.count, 1)
        check_at_least("links", self.links, 1)
        check_positive("bandwidth", self.link_bytes_per_s)
        check_non_negative("latency", self.latency_s)
        check_positive("oversubscription", self.oversubscription)
        check_at_least("oversubscription", self.oversubscription, 1)
        if not 0 <= self.in_switch_reduction <= 1:
            raise WrongArgument(
                "in_switch_reduction",
                f"must be a part of the rate, 0 (none) to 1, got {self.in_switch_reduction}",
            )

    @property
    def bytes_per_s(self) -> BytesPerSecond:
        """What one member can send while all others do. [B/s]"""
        return self.links * self.link_bytes_per_s / self.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One tier as a group of devices uses it."""

    tier: str
    place: int
    """Of the tier, from the inside."""
    members: int
    """Of one group of the tier that take part."""
    crossings: int
    """How many edges of a ring through all devices end in another member of this tier."""
    bytes_per_s: BytesPerSecond
    """What the slowest member that takes part can send, through all tiers inside as well. [B/s]"""
    latency_s: Seconds
    """Of one message between members, through all tiers inside as well. [s]"""
    in_switch_reduction: float = 0.0
    """As the tier's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Tiers from the inside out."""

    name: str
    tiers: tuple[Tier, ...]
    evidence: Evidence = Evidence.ASSUMED
    """Where links come from that nobody measured here."""
    straggler_share: float = 0.0
    """How much slower a step is per doubling of the nodes, and the standard deviation of its logarithm."""
    straggler_log_error: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what does not add up."""
        if not self.tiers:
            raise ValueError("a cluster must have at least one tier, got none")
        if chained(self.tiers) != self.tiers:
            names = [tier.name for tier in self.tiers]
            raise ValueError(f"tiers must be in order from the inside out, got {names}")
        for tier in self.tiers[1:]:
            if tier.in_switch_reduction:
                raise ValueError(
                    f"tier {tier.name}: in_switch_reduction must be given for the innermost tier alone, "
                    f"got {tier.in_switch_reduction}"
                )

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return math.prod(tier.count for tier in self.tiers)

    @property
    def first_between_nodes(self) -> int:
        """Place of the tier that joins machines; 0 where a device is one."""
        names = [tier.name for tier in self.tiers]
        return names.index(NODE) + 1 if NODE in names else 0

    @property
    def devices_per_node(self) -> int | None:
        """Devices of a machine; None if no tier is called ``node``."""
        inside = self.tiers[: self.first_between_nodes]
        return math.prod(tier.count for tier in inside) if inside else None

    def levels(self, num_devices: int, *, stride: int = 1) -> tuple[Level, ...]:
        """Tiers in use by devices that fill the cluster node by node.

        ``stride``: How far neighbours are apart; the devices between them are groups of the same kind, with
        which they share the links of what they stand in.
        """
        span = (num_devices - 1) * stride + 1
        check_within("num_devices", span, 1, self.num_devices)
        found: list[Level] = []
        latency_s, reach = 0.0, math.inf
        inside, held, units = 1, 1, num_devices  # devices of a member, those of the group, members
        for place, tier in enumerate(self.tiers):
            latency_s += tier.latency_s
            # A member sends no faster than all that is inside it.
            reach = min(tier.bytes_per_s / min(stride, inside), reach)
            inside *= tier.count
            holds = min(-(-inside // stride), num_devices)
            members, groups = min(units, -(-holds // held)), -(-num_devices // holds)
            if members > 1:
                level = Level(
                    tier=tier.name,
                    place=place,
                    members=members,
                    crossings=units - groups,
                    bytes_per_s=reach,
                    latency_s=latency_s,
                    in_switch_reduction=tier.in_switch_reduction,
                )
                found.append(level)
            held, units, reach = holds, groups, reach * members
        return tuple(found)


def chained(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """Tiers in any order, from the inside out."""
    given = tuple(tiers)
    names = [tier.name for tier in given]
    if len({DEVICE, *names}) <= len(names):
        raise ValueError(f"tiers must have different names, none of them {DEVICE}, got {names}")
    left = dict(zip(names, given, strict=True))
    known = {DEVICE, *left}
    for tier in left.values():
        if tier.of not in known:
            raise ValueError(
                f"tier {tier.name}: of must be {DEVICE} or another tier, got {tier.of!r}"
            )
    found: list[Tier] = []
    while left:
        inner = found[-1].name if found else DEVICE
        joining = [tier for tier in left.values() if tier.of == inner]
        if len(joining) > 1:
            several = ", ".join(tier.name for tier in joining)
            raise ValueError(f"only one tier may join each {inner}, got {several}")
        if not joining:
            raise ValueError(
                f"tiers must lead outwards from {DEVICE}, got a cycle of {', '.join(left)}"
            )
        found.append(left.pop(joining[0].name))
    return tuple(found)
