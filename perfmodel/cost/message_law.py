"""What a message of gloo costs in a group of any size: links of each rank's own, processors that all share.

Both work at the same time, so that the larger of the two decides. What they have to do follows from
what gloo does: rings, a binomial tree, and all-to-all at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.curve import Samples
from perfmodel.cost.soft_maximum import soft_maximum
from perfmodel.documents.profile import CurvePoint

#: Beliefs, as medians, each within a factor of exp(3): a hop and a byte of a link, handling a message
#: and a byte of it; and how much sharper than a sum the larger of the two wins. [s, s/B, s, s/B, 1]
_BELIEFS: Final = (40e-6, 1e-9, 1e-6, 1e-11, 7.0)
NUM_PARAMETERS: Final = len(_BELIEFS)
_SPREADS: Final = (3.0, 3.0, 3.0, 3.0, 1.0)
#: Error of a point, in log, against which parameters are read: points of a group err together.
_POINT_ERROR: Final = 0.05
#: Keeps the law rising in the size where it is flat to the last digit.
_TILT: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one of a collective's equal messages stands for."""

    rounds: float
    """Hops that follow one another."""
    loads: float
    """Messages that the busiest link carries one after another."""
    handled: float
    """Messages that all ranks together handle."""


def _everything_shared(
    groups: Mapping[int, Sequence[CurvePoint]], works: Mapping[int, Work]
) -> tuple[float, ...]:
    """Parameters by which the smallest group's messages show links, the largest's only processors."""
    smallest, largest = min(groups), max(groups)
    pairs = []
    for ranks, count in ((smallest, works[smallest].loads), (largest, works[largest].handled)):
        low, high = groups[ranks][0], groups[ranks][-1]
        pairs += [low.time_s / count, high.time_s / high.at / count]
    return (*pairs, _BELIEFS[-1])


def work(collective: str, ranks: int, num_messages: int) -> Work:
    """What gloo does, over the messages that the collective is counted as.

    References
    ----------
    .. [1] gloo, broadcast.cc, allgather.cc, alltoall.cc, allreduce.cc; reduce-scatter in torch is an
       all-reduce of which each rank keeps a part.
    """
    match collective:
        case "broadcast":
            return Work(
                rounds=1.0,
                loads=_tree_loads(ranks) / num_messages,
                handled=(ranks - 1) / num_messages,
            )
        case "all_to_all":
            return Work(rounds=1 / num_messages, loads=1.0, handled=ranks)
        case "reduce_scatter":
            return Work(rounds=2.0, loads=2.0, handled=2 * ranks)
        case "send_recv":
            return Work(rounds=1.0, loads=1.0, handled=1.0)
        case _:
            return Work(rounds=1.0, loads=1.0, handled=ranks)


def _tree_loads(ranks: int) -> int:
    """Messages on the slowest way from the root to a leaf of a binomial tree.

    A rank sends to all its children at once, so that they share its link and receive at the same time.
    """
    rounds = math.ceil(math.log2(ranks))
    done = [0] * ranks
    for rank in range(ranks):
        first = rank.bit_length()
        children = [rank + 2**i for i in range(first, rounds) if rank + 2**i < ranks]
        for child in children:
            done[child] = done[rank] + len(children)
    return max(done)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageLaw:
    """Logarithms of the parameters, shape ``(5, num_draws)``; draw 0 is the fit."""

    logs: Samples

    @classmethod
    def fit(
        cls,
        groups: Mapping[int, Sequence[CurvePoint]],
        works: Mapping[int, Work],
        deviates: Samples,
    ) -> "MessageLaw":
        """Fit to messages of several groups, least squares on logarithms.

        Parameters
        ----------
        deviates
            Of a standard normal distribution, shape ``(5, num_draws)``.
        """
        from scipy.optimize import least_squares  # noqa: PLC0415 - slow, and one group needs none

        sizes = [np.array([point.at for point in points]) for points in groups.values()]
        logs = np.log([point.time_s for points in groups.values() for point in points])
        centre = np.log(_BELIEFS)

        def residuals(p: Samples) -> Samples:
            law = cls(logs=p[:, np.newaxis])
            found = [
                law.message_s(of_one[:, np.newaxis], works[ranks])[:, 0]
                for ranks, of_one in zip(groups, sizes, strict=True)
            ]
            data: Samples = (np.log(np.concatenate(found)) - logs) / _POINT_ERROR
            return np.concatenate([data, (p - centre) / _SPREADS])

        # What is hidden at the start stays hidden: begin without shared processors, and with them.
        shared = np.log(_everything_shared(groups, works))
        starts = (centre, shared, np.where(np.arange(NUM_PARAMETERS) == 0, shared - 2.0, shared))
        solution = min(
            (least_squares(residuals, start, loss="soft_l1") for start in starts),
            key=lambda found: float(found.cost),
        )
        jacobian = np.asarray(solution.jac, dtype=np.float64)
        covariance = np.linalg.inv(jacobian.T @ jacobian)
        # What the law misses makes its parameters more doubtful than points alone.
        excess = max(1.0, float(np.mean(residuals(solution.x)[: len(logs)] ** 2)))
        spread = np.linalg.cholesky(covariance) * math.sqrt(excess)
        shifts = spread @ deviates
        shifts[:, 0] = 0.0
        return cls(logs=solution.x[:, np.newaxis] + np.clip(shifts, -3.0, 3.0))

    def message_s(self, message_bytes: Samples, of: Work) -> Samples:
        """Time of one message, shape ``(num_sizes, num_draws)`` for sizes of shape ``(num_sizes, 1)``. [s]"""
        hop_s, s_per_byte, handling_s, handling_s_per_byte, sharpness = np.exp(self.logs)
        link_s = of.rounds * hop_s + of.loads * s_per_byte * message_bytes
        host_s = of.handled * (handling_s + handling_s_per_byte * message_bytes)
        return soft_maximum(link_s, host_s, 1.0 + sharpness) * (1 + _TILT * np.log1p(message_bytes))

    def nominal(self) -> "MessageLaw":
        """The fit alone."""
        return MessageLaw(logs=self.logs[:, :1])
