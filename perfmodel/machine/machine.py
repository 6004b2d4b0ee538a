"""What a training step runs on: what every machine says, however its costs were found."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

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
