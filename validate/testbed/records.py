"""Records of the testbed: which collectives run on which links, and what they took."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter

from perfmodel.documents import Record, read_lines
from perfmodel.units import MBIT

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"
]
#: What an idle shaped link lets through at once. Below 64 KiB the shaper splits segmented packets in
#: software, which costs twenty times the CPU time.
BURST_BYTES: Final = 70_000


class CollectiveSetting(Record):
    """Collectives of one kind and several sizes, one at a time, between nodes of one rank on one switch."""

    name: str
    collective: CollectiveKind
    num_ranks: PositiveInt
    mbit: PositiveFloat
    """Rate at which each node may send. [Mbit/s]"""
    sizes_bytes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Of the whole array, as nccl-tests counts it."""
    target_s: PositiveFloat = 0.05
    """Repeat each size for about so long, 3 to 30 times. [s]"""
    warm_up_bytes: NonNegativeInt = 4 * BURST_BYTES
    """Of each size, unrecorded, before it is timed. Without it the median of some sizes is a time with the
    burst of idle links, of others one without."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of the links. [B/s]"""
        return self.mbit * MBIT


class CollectiveRun(Record):
    """What the collectives took."""

    setting: CollectiveSetting
    started_utc: float
    durations_s: tuple[tuple[PositiveFloat, ...], ...]
    """For each size all repeats: from the last rank's start to the last rank's end. [s]"""


_RUN: Final[TypeAdapter[CollectiveRun]] = TypeAdapter(CollectiveRun)


def read_runs(path: Path) -> list[CollectiveRun]:
    """All complete lines of a file of runs; ``InvalidDocument`` if one breaks the schema."""
    return read_lines(path, _RUN, what="runs") if path.exists() else []
