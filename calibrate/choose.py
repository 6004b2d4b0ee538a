"""Which layers to time next: those that tell most about all that may occur; pure, repeatable.

The layers to choose from are drawn as workloads have them, so that they stand for what will be asked.
Timing one of them takes doubt from itself and from its neighbours; chosen is what takes most from
all together [1]_. Doubt depends on where was timed, and through the fitted lengths, spreads and noise
on how rough the curves have been so far.

References
----------
.. [1] D. A. Cohn, Z. Ghahramani, M. I. Jordan, "Active Learning with Statistical Models", Journal of
   Artificial Intelligence Research 4, 1996: the expected reduction of variance over the inputs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.fit.gaussian_process import TYPICAL_LENGTH, TYPICAL_NOISE, TYPICAL_SPREAD
from perfmodel.arrays import FloatArray
from perfmodel.cost.families import family, features
from perfmodel.cost.gaussian_process import covariance
from perfmodel.documents.profile import OperatorFamily
from perfmodel.workload.operator import Operator

Places = tuple[tuple[str, tuple[float, ...]], ...]
"""Family and features of every operator of a layer."""


def places(operators: Sequence[Operator]) -> Places:
    """Where the operators of a layer stand on their curves; views move nothing and are left out."""
    found = ((family(entry), features(entry)) for entry in operators if not entry.view)
    return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class _Belief:
    """Doubt about the candidates' operators of one family."""

    doubt: FloatArray
    """Covariance of their log times."""
    noise: float
    owners: list[int]
    """Candidate of each operator."""

    def gains(self, num_candidates: int) -> FloatArray:
        """By candidate, the variance that timing its operators takes from all. [log^2]"""
        own = np.diag(self.doubt) + self.noise**2
        taken: FloatArray = np.zeros(num_candidates)
        np.add.at(taken, self.owners, np.sum(self.doubt**2, axis=0) / own)
        return taken

    def learn(self, candidate: int) -> None:
        """What remains once a candidate is timed."""
        for at, owner in enumerate(self.owners):
            if owner == candidate:
                column = self.doubt[:, at].copy()
                self.doubt -= np.outer(column, column) / (column[at] + self.noise**2)


def most_telling(
    candidates: Sequence[Places], known: Mapping[str, OperatorFamily], *, count: int
) -> tuple[int, ...]:
    """Positions of the ``count`` candidates to time, in the order of choice.

    Parameters
    ----------
    known
        Curves so far; of a family without one, nothing is known.
    """
    members: dict[str, list[tuple[int, tuple[float, ...]]]] = defaultdict(list)
    for index, candidate in enumerate(candidates):
        for name, point in candidate:
            members[name].append((index, point))
    beliefs = [_belief(group, known.get(name)) for name, group in sorted(members.items())]
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = sum((b.gains(len(candidates)) for b in beliefs), np.zeros(len(candidates)))
        gains[chosen] = -np.inf
        chosen.append(int(np.argmax(gains)))
        for belief in beliefs:
            belief.learn(chosen[-1])
    return tuple(chosen)


def _belief(
    group: Sequence[tuple[int, tuple[float, ...]]], entry: OperatorFamily | None
) -> _Belief:
    owners = [index for index, _ in group]
    points = np.array([point for _, point in group])
    if entry is None or len(entry.lengths) != points.shape[1]:
        lengths = np.full(points.shape[1], TYPICAL_LENGTH)
        doubt = covariance(points, points, lengths, TYPICAL_SPREAD)
        return _Belief(doubt=doubt, noise=TYPICAL_NOISE, owners=owners)
    lengths, timed = np.array(entry.lengths), np.array(entry.features)
    own = covariance(timed, timed, lengths, entry.spread)
    own += (entry.noise**2 + 1e-9) * np.eye(len(timed))
    cross = covariance(points, timed, lengths, entry.spread)
    explained = cross @ np.linalg.solve(own, cross.T)
    doubt = covariance(points, points, lengths, entry.spread) - explained
    return _Belief(doubt=doubt, noise=max(entry.noise, 1e-3), owners=owners)
