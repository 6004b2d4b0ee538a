"""All candidates of a plan as arrays, and which of them an answer speaks of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray, IntArray
from perfmodel.documents.plan_file import PlanFile
from perfmodel.plan.outcome import Summary

#: Rows of the ranking that are kept, and of the front, evenly over it.
MOST_RANKED: Final = 10
MOST_OF_FRONT: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One option at one batch and one size."""

    option: int
    batch: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All candidates as arrays of one shape."""

    option: FloatArray
    batch: FloatArray
    count: FloatArray
    elapsed_s: FloatArray
    cost: FloatArray
    deadline_probability: FloatArray
    probability: FloatArray
    excess: FloatArray

    def candidate(self, index: int) -> Candidate:
        """One of them."""
        return Candidate(
            option=int(self.option[index]),
            batch=int(self.batch[index]),
            count=int(self.count[index]),
        )


def pool_of(found: Sequence[tuple[int, int, Summary]]) -> Pool:
    """Join the summaries of options, by their place in the plan, at batches."""

    def joined(name: str) -> FloatArray:
        return np.concatenate([np.asarray(getattr(e, name), dtype=float) for _, _, e in found])

    return Pool(
        option=np.concatenate([np.full(len(s.counts), float(i)) for i, _, s in found]),
        batch=np.concatenate([np.full(len(s.counts), float(b)) for _, b, s in found]),
        count=joined("counts"),
        elapsed_s=joined("elapsed_s"),
        cost=joined("cost"),
        deadline_probability=joined("deadline_probability"),
        probability=joined("probability"),
        excess=joined("excess"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Which candidates the answer speaks of, by index in the pool."""

    ranked: tuple[int, ...]
    best: tuple[int, ...]
    """Of every option, the best, or the one that comes nearest; the winner first."""
    front: tuple[int, ...]
    fewest: tuple[int, ...]
    """Of every option that can, the smallest size that meets the deadline."""

    @property
    def mentioned(self) -> set[int]:
        """All of them."""
        return {*self.ranked, *self.best, *self.front, *self.fewest}


def name_candidates(pool: Pool, plan: PlanFile) -> Named:
    """Rank what keeps all limits by nominal cost, then time, then devices."""
    wanted = plan.limits.probability
    feasible = np.flatnonzero(pool.probability >= wanted)
    order = np.lexsort((pool.count[feasible], pool.elapsed_s[feasible], pool.cost[feasible]))
    ranked = feasible[order]
    best, fewest = [], []
    in_time = pool.deadline_probability >= wanted
    for index in range(len(plan.option)):
        enough = np.flatnonzero(in_time & (pool.option == index))
        fewest.extend(enough[np.argsort(pool.count[enough], kind="stable")][:1].tolist())
        own = ranked[pool.option[ranked] == index]
        if len(own) == 0:
            own = np.flatnonzero(pool.option == index)
            own = own[np.lexsort((pool.excess[own], -pool.probability[own]))]
        best.extend(own[:1].tolist())
    return Named(
        ranked=tuple(ranked[:MOST_RANKED].tolist()),
        best=tuple(sorted(best, key=lambda index: _distance(pool, index, wanted))),
        front=_thinned(_front(pool, ranked)),
        fewest=tuple(fewest),
    )


def _distance(pool: Pool, index: int, wanted: float) -> tuple[float, float, float]:
    """How far a candidate is from the winner: feasible ones by cost, others by what they lack."""
    if pool.probability[index] >= wanted:
        return (-1.0, float(pool.cost[index]), float(pool.elapsed_s[index]))
    return (0.0, -float(pool.probability[index]), float(pool.excess[index]))


def _front(pool: Pool, feasible: IntArray) -> tuple[int, ...]:
    """Feasible candidates that none beats in both time and cost; the soonest first."""
    order = feasible[np.lexsort((pool.cost[feasible], pool.elapsed_s[feasible]))]
    cost = pool.cost[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(cost)[:-1]])[: len(cost)]
    return tuple(order[cost < before].tolist())


def _thinned(indices: tuple[int, ...]) -> tuple[int, ...]:
    """At most so many, both ends among them."""
    if len(indices) <= MOST_OF_FRONT:
        return indices
    places = np.linspace(0, len(indices) - 1, MOST_OF_FRONT).round().astype(int)
    return tuple(indices[place] for place in places)
