"""How long an all-reduce or a broadcast takes in a prediction, from measured group sizes to any."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.curve import CurveDraws, Samples
from perfmodel.documents.prediction import Evidence
from perfmodel.documents.profile import CollectiveProfile, CurvePoint
from perfmodel.units import Bytes

#: Doubt per doubling of the group beyond the largest one measured: a prior.
_DOUBT_PER_DOUBLING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingAllReduce:
    """A ring of ``n`` ranks sends ``2 (n - 1)`` messages of ``size / n`` bytes one after another.

    What is measured is therefore read as the time of one message over its size, whatever regimes
    that has, and serves every group size. Where the library also has trees (NCCL), it takes the
    faster: ``2 log2 n`` messages of latency plus twice the bytes at the rate of large messages.

    References
    ----------
    .. [1] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
       workstations", J. Parallel Distrib. Comput. 69(2):117-124, 2009.
    .. [2] NCCL, src/graph/tuning.cc: the library chooses the algorithm with the least predicted time.
    """

    message: CurveDraws
    largest_world_size: int
    has_tree: bool
    doubt: Samples
    """Deviates, shape ``(num_draws,)``, of the error beyond the largest group; draw 0 is 0."""

    @classmethod
    def sample(
        cls,
        profiles: Iterable[CollectiveProfile],
        *,
        has_tree: bool,
        num_draws: int,
        rng: np.random.Generator,
    ) -> "RingAllReduce":
        """Draw message curves from the measured all-reduces of at least two ranks."""
        by_size: dict[float, list[CurvePoint]] = {}
        largest = 1
        for profile in profiles:
            num_ranks = profile.world_size
            largest = max(largest, num_ranks)
            for point in profile.points:
                message = CurvePoint(
                    at=point.at / num_ranks,
                    time_s=point.time_s / (2 * (num_ranks - 1)),
                    relative_error=point.relative_error,
                )
                by_size.setdefault(message.at, []).append(message)
        merged = _monotone([_merged(by_size[size]) for size in sorted(by_size)])
        doubt = rng.standard_normal(num_draws)
        doubt[0] = 0.0
        return cls(
            message=CurveDraws.sample(merged, num_draws=num_draws, rng=rng),
            largest_world_size=largest,
            has_tree=has_tree,
            doubt=doubt,
        )

    def time_s(self, size_bytes: Bytes, *, world_size: int) -> Samples:
        """Time of one all-reduce alone, shape ``(num_draws,)``. [s]"""
        if world_size == 1:
            return np.zeros(self.message.time_s.shape[1])
        num_messages = 2 * (world_size - 1)
        time_s = num_messages * self.message.read(size_bytes / world_size)
        if self.has_tree:
            time_s = np.minimum(time_s, self._tree_s(size_bytes, world_size=world_size))
        return time_s * self._widening(world_size)

    def evidence(self, sizes_bytes: Iterable[Bytes], *, world_size: int) -> Evidence:
        """How well the data support a group size and the messages of all its all-reduces."""
        smallest, largest = self.message.at[0], self.message.at[-1]
        inside = all(smallest <= size / world_size <= largest for size in sizes_bytes)
        if inside and world_size <= self.largest_world_size:
            return Evidence.INTERPOLATED
        return Evidence.EXTRAPOLATED

    def _tree_s(self, size_bytes: Bytes, *, world_size: int) -> Samples:
        latency_s = self.message.time_s[0]
        bytes_per_s = self.message.at[-1] / self.message.time_s[-1]
        result: Samples = 2 * math.ceil(math.log2(world_size)) * latency_s + (
            2 * size_bytes / bytes_per_s
        )
        return result

    def _widening(self, world_size: int) -> Samples:
        doublings = max(0.0, math.log2(world_size / self.largest_world_size))
        result: Samples = np.exp(_DOUBT_PER_DOUBLING * doublings * self.doubt)
        return result


def tree_broadcast_time(curve: CurveDraws, size_bytes: Bytes, *, world_size: int) -> Samples:
    """Time of a binomial-tree broadcast: ``ceil(log2 n)`` rounds, each as long as between two ranks. [s]

    Parameters
    ----------
    curve
        Broadcast between two ranks over the size in bytes.
    """
    rounds = math.ceil(math.log2(world_size)) if world_size > 1 else 0
    return rounds * curve.read(size_bytes)


def _monotone(points: list[CurvePoint]) -> list[CurvePoint]:
    """Groups differ in their errors: a larger message must not be faster for that.

    Halfway, in log, between the envelope that only rises and the one that is never above a later
    point: both are monotone, and so is their mean.
    """
    logs = np.log([point.time_s for point in points])
    above, below = np.maximum.accumulate(logs), np.minimum.accumulate(logs[::-1])[::-1]
    return [
        point.model_copy(update={"time_s": math.exp(value)})
        for point, value in zip(points, (above + below) / 2, strict=True)
    ]


def _merged(points: list[CurvePoint]) -> CurvePoint:
    """Geometric mean of what different group sizes say about one message size."""
    logs = [math.log(point.time_s) for point in points]
    errors = [point.relative_error for point in points]
    return CurvePoint(
        at=points[0].at,
        time_s=math.exp(sum(logs) / len(logs)),
        relative_error=max(max(errors) / math.sqrt(len(errors)), float(np.std(logs))),
    )
