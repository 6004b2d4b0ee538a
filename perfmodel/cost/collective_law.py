"""Time of a collective over size, ranks and nodes: a law with a handful of parameters.

Every algorithm is latency and transfer, joined by a p-norm::

    L = base + a_in * steps inside nodes + a_out * steps between nodes
    W = size * volume / bandwidth of the narrowest tier
    T = (L^p + W^p)^(1/p),  and the library takes the fastest algorithm

With p = 1 this is the textbook's sum, with large p the larger of the two (a link that is shaped
and processors that are busy hide each other), with p < 1 middle sizes are slower than both ends
say, as protocols of NCCL make them. Where one side is 10 times the other is where a regime
begins; so the breakpoints follow from the parameters at every size and group. Both sides may grow
with the group faster than the algorithm says (shared processors, fabrics that are not flat): as
powers, whose exponents are 0 unless data say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.cost.collective_steps import Algorithm, steps, volume

FloatArray = NDArray[np.float64]

#: Parameters of the law, in this order; all times and bytes as natural logarithms.
PARAMETERS: Final = (
    "log_latency_s",
    "log_s_per_byte",
    "log_norm",
    "latency_growth",
    "transfer_growth",
    "log_latency_between_ratio",
    "log_transfer_between_ratio",
    "log_base_s",
)
#: Transfer of a tree over that of a ring with the same links; NCCL grants its trees 0.92 [1]_.
#:
#: .. [1] NCCL, src/graph/tuning.cc.
TREE_EFFICIENCY: Final = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Arrays of one shape: where a law is evaluated."""

    size_bytes: FloatArray
    ranks: FloatArray
    nodes: FloatArray

    @classmethod
    def of(cls, size_bytes: ArrayLike, *, ranks: ArrayLike, nodes: ArrayLike = 1.0) -> "Points":
        """Broadcast sizes, ranks and nodes against each other."""
        size, n, m = np.broadcast_arrays(
            np.asarray(size_bytes, dtype=np.float64),
            np.asarray(ranks, dtype=np.float64),
            np.asarray(nodes, dtype=np.float64),
        )
        return cls(size_bytes=size, ranks=n, nodes=m)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Which collective, by which algorithms, and how far growth has been seen."""

    collective: str
    algorithms: tuple[Algorithm, ...]
    largest_ranks: float = 2.0
    """Below no growth a group beyond this is never taken to be faster than its law."""
    largest_nodes: float = 1.0

    def log_time(self, parameters: Sequence[FloatArray] | FloatArray, at: Points) -> FloatArray:
        """Logarithm of the time in seconds; parameters broadcast against the points."""
        times = [self._norm(parameters, *self.sides(parameters, a, at)) for a in self.algorithms]
        fastest: FloatArray = np.minimum.reduce(times)
        return fastest

    def fastest(
        self, parameters: Sequence[FloatArray] | FloatArray, at: Points
    ) -> NDArray[np.int_]:
        """Which of the algorithms the library takes, as an index."""
        times = [self._norm(parameters, *self.sides(parameters, a, at)) for a in self.algorithms]
        result: NDArray[np.int_] = np.argmin(np.stack(times), axis=0)
        return result

    def sides(
        self, parameters: Sequence[FloatArray] | FloatArray, algorithm: Algorithm, at: Points
    ) -> tuple[FloatArray, FloatArray]:
        """Logarithms of the latency and of the transfer, each alone. [log s]"""
        p = dict(zip(PARAMETERS, parameters, strict=True))
        many = at.nodes > 1
        inside, between = _step_split(algorithm, self.collective, at)
        grown_n = self._reach(p["latency_growth"], at, many=many)
        latency_s = np.exp(p["log_base_s"]) + np.exp(p["log_latency_s"]) * (
            inside * np.where(many, 1.0, grown_n)
            + between * np.exp(p["log_latency_between_ratio"]) * np.where(many, grown_n, 1.0)
        )
        grown_b = self._reach(p["transfer_growth"], at, many=many)
        narrowing = np.maximum(1.0, np.exp(p["log_transfer_between_ratio"]) * grown_b)
        efficiency = (
            TREE_EFFICIENCY if algorithm is Algorithm.TREE and len(self.algorithms) > 1 else 1.0
        )
        share = volume(algorithm, self.collective, at.ranks) / efficiency
        transfer = (
            p["log_s_per_byte"]
            + np.log(np.maximum(at.size_bytes * share, 1e-30))
            + np.log(np.where(many, narrowing, grown_b))
        )
        return np.log(latency_s), transfer

    def _norm(
        self,
        parameters: Sequence[FloatArray] | FloatArray,
        latency: FloatArray,
        transfer: FloatArray,
    ) -> FloatArray:
        norm = np.exp(parameters[PARAMETERS.index("log_norm")])
        return np.logaddexp(norm * latency, norm * transfer) / norm

    def _reach(self, growth: FloatArray, at: Points, *, many: NDArray[np.bool_]) -> FloatArray:
        """Growth relative to a pair (of ranks, or of nodes where there are several)."""
        members = np.where(many, at.nodes, at.ranks)
        largest = np.where(many, self.largest_nodes, self.largest_ranks)
        seen = np.minimum(members, np.maximum(largest, 2.0))
        return np.exp(growth * np.log(np.where(growth < 0, seen, members) / 2.0))


def _step_split(algorithm: Algorithm, collective: str, at: Points) -> tuple[FloatArray, FloatArray]:
    """Messages inside nodes and between nodes, one after another.

    A ring through m nodes crosses between them in 2 (m - 1) of its 2 (n - 1) steps; a tree is a
    chain inside each node below a tree of nodes [1]_.

    References
    ----------
    .. [1] NCCL, src/graph/tuning.cc.
    """
    many = at.nodes > 1
    between = np.where(many, steps(algorithm, collective, at.nodes), 0.0)
    if algorithm is Algorithm.TREE:
        chain = (2.0 if collective == "all_reduce" else 1.0) * (at.ranks / at.nodes - 1.0)
        return np.where(many, chain, steps(algorithm, collective, at.ranks)), between
    return np.maximum(steps(algorithm, collective, at.ranks) - between, 0.0), between
