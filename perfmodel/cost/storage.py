"""What writing and reading a checkpoint takes, by those that a calibration timed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.checks import at_least, positive
from perfmodel.cost.curve import CurveDraws, Samples
from perfmodel.documents.prediction import Evidence, Interval
from perfmodel.documents.profile import CheckpointProfile, CurvePoint
from perfmodel.units import Bytes

_NUM_DRAWS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointDraws:
    """Time of one checkpoint, draw by draw; the first is nominal, shape ``(num_draws,)``. [s]"""

    write_s: Samples
    read_s: Samples
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """Time of one checkpoint and its doubt. [s]"""

    write_s: Interval
    read_s: Interval
    evidence: Evidence


def checkpoint_cost(
    profile: CheckpointProfile, size_bytes: Bytes, *, writers: int = 1
) -> CheckpointCost:
    """Time of a checkpoint and its doubt; see ``checkpoint_draws``."""
    found = checkpoint_draws(profile, size_bytes, writers=writers, num_draws=_NUM_DRAWS)
    return CheckpointCost(
        write_s=_interval(found.write_s), read_s=_interval(found.read_s), evidence=found.evidence
    )


def checkpoint_draws(
    profile: CheckpointProfile, size_bytes: Bytes, *, writers: int = 1, num_draws: int
) -> CheckpointDraws:
    """Time of a checkpoint that so many processes write and read in equal parts, at the same time.

    Each part takes as long as a file of its size did with one process: that storage and network carry
    so many at once is an assumption.

    Raises
    ------
    ValueError
        If the size is not above zero, or nobody writes.
    """
    positive("size_bytes", size_bytes)
    at_least("writers", writers, 1)
    part_bytes = size_bytes / writers
    rng = np.random.default_rng(0)
    write, read = (
        CurveDraws.sample(points, num_draws=num_draws, rng=rng)
        for points in (profile.write, profile.read)
    )
    return CheckpointDraws(
        write_s=write.read(part_bytes),
        read_s=read.read(part_bytes),
        evidence=Evidence.ASSUMED if writers > 1 else write.evidence(part_bytes),
    )


def rate_bytes_per_s(points: tuple[CurvePoint, ...]) -> float:
    """Of the largest file, its start included. [B/s]"""
    largest = max(points, key=lambda point: point.at)
    return largest.at / largest.time_s


def _interval(draws_s: Samples) -> Interval:
    return Interval.of(draws_s[1:], nominal=float(draws_s[0]))
