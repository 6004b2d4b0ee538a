"""End, cost and chances of the candidates of a plan: every option at every batch and size, as columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

import numpy as np

from perfmodel.cost import Samples
from perfmodel.documents.plan import Option, PlanFile
from perfmodel.engine.job import best_intervals_s, elapsed_moments
from perfmodel.plan.steps import Steps, nearest
from perfmodel.statistics import FloatArray, IntArray
from perfmodel.units import HOUR_S, KILOWATT_W, Seconds

#: A thousand years: longer than anybody waits, and still a date. [s]
NEVER_S: Final = 1000 * 365.25 * 24 * HOUR_S
#: Sizes that are evaluated at once: their draws fit into a cache.
_CHUNK: Final = 128
#: With more sizes, draws are evaluated at this number, evenly in log; the others take the spread of the nearest.
_MOST_SPREAD: Final = 2048
_SEED: Final = 0
#: Rows of the ranking that are kept, and of the front, evenly over it.
MOST_RANKED: Final = 10
MOST_OF_FRONT: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Draws of one option at some sizes; draw 0 is nominal."""

    elapsed_s: Samples
    """Shape ``(num_counts, num_draws)``. [s]"""
    cost: Samples
    """Shape ``(num_counts, num_draws)``."""
    expected_stops: Samples
    """Nominal, shape ``(num_counts,)``."""
    interval_s: Samples
    """Work between two checkpoints, shape ``(num_counts,)``; infinite if nothing fails. [s]"""


def outcome(  # noqa: PLR0913 - one parameter per part of the question
    plan: PlanFile,
    option: Option,
    table: Steps,
    counts: IntArray,
    *,
    step_factor: float = 1.0,
    failure_factor: float = 1.0,
    num_draws: int | None = None,
) -> Outcome:
    """Draws of an option at some sizes, by closed forms over the draws of the step.

    The end of the job varies with the draws of the step, and normally around its mean with the luck
    of the failures; the luck is the same for all candidates.

        work    = step_factor * ceil(samples / global batch) * step
        elapsed = max(work, mean(work) + spread(work) * luck)

    ``step_factor``: ratio of the step to the predicted one; ``failure_factor``: of failures to those of the plan.
    ``num_draws``: 1 is the nominal one alone, None are all.
    """
    steps = np.ceil(plan.work.total_samples / table.global_batches(counts))
    work_s = step_factor * steps[:, None] * table.step_s(counts, num_draws=num_draws)
    failures = plan.failures
    if failures is None:
        elapsed_s, interval_s = work_s, np.full(len(counts), np.inf)
        expected_stops = np.zeros(len(counts))
    else:
        mtbf_s = failures.mtbf_device_hours * HOUR_S / failure_factor / counts
        best_s = best_intervals_s(write_s=failures.checkpoint_s, mtbf_s=mtbf_s)
        interval_s = np.minimum(best_s, work_s[:, 0])
        mean_s, spread_s = elapsed_moments(
            work_s,
            interval_s=interval_s[:, None],
            write_s=np.array([failures.checkpoint_s]),
            mtbf_s=mtbf_s[:, None],
            recovery_s=np.array([failures.detection_s + failures.restart_s]),
        )
        luck: Samples = np.random.default_rng(_SEED).standard_normal((work_s.shape[1],))
        luck[0] = 0.0
        with np.errstate(invalid="ignore"):
            elapsed_s = np.maximum(work_s, _at_most_never(mean_s + spread_s * luck))
        expected_stops = _at_most_never(mean_s[:, 0]) / mtbf_s
    return Outcome(
        elapsed_s=elapsed_s,
        cost=setup_cost(option) + elapsed_s / HOUR_S * counts[:, None] * hourly_price(option),
        expected_stops=expected_stops,
        interval_s=interval_s,
    )


def hourly_price(option: Option) -> float:
    """Of one device with its energy, in the currency of the plan."""
    energy = option.energy_price.value if option.energy_price else 0.0
    return option.price.value + energy * option.power_w / KILOWATT_W


def setup_cost(option: Option) -> float:
    """What is paid once."""
    return option.setup_price.value if option.setup_price else 0.0


def power_kw(option: Option, count: int | IntArray) -> Samples:
    """Of all devices with the data centre's share; 0 if nothing is said. [kW]"""
    return np.asarray(count * option.power_w / KILOWATT_W, dtype=float)


def chances(plan: PlanFile, found: Outcome, available_s: Seconds) -> tuple[Samples, Samples]:
    """Share of the draws in time, and of those in time and in budget; power is no matter of chance."""
    in_time = found.elapsed_s[:, 1:] <= available_s
    in_budget = found.cost[:, 1:] <= (plan.limits.budget or np.inf)
    return in_time.mean(axis=1), (in_time & in_budget).mean(axis=1)


def _at_most_never(elapsed_s: Samples) -> Samples:
    """Courses that hardly get on end never: far away, but finite. [s]"""
    return np.minimum(np.where(np.isnan(elapsed_s), NEVER_S, elapsed_s), NEVER_S)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option, by its place in the plan, at one batch and one size."""

    option: int
    batch: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """All candidates, nominal figures and chances; columns of shape ``(num_candidates,)``."""

    option: FloatArray
    batch: FloatArray
    count: FloatArray
    elapsed_s: FloatArray
    cost: FloatArray
    deadline_probability: FloatArray
    probability: FloatArray
    """That deadline, budget and power are all kept."""
    excess: FloatArray
    """Largest of time, cost and power over its limit; above 1 a limit is broken."""

    def __getitem__(self, index: int) -> Candidate:
        """One of them."""
        return Candidate(int(self.option[index]), int(self.batch[index]), int(self.count[index]))

    @classmethod
    def joined(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """All candidates of some tables."""
        names = [field.name for field in fields(cls)]
        return cls(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


class _Spread:
    """How the draws of the end lie around the nominal end, at some sizes of a table; the others read the nearest."""

    def __init__(self, plan: PlanFile, option: Option, table: Steps) -> None:
        counts = table.counts
        places = np.arange(len(counts))
        if len(counts) > _MOST_SPREAD:
            wanted = np.geomspace(counts[0], counts[-1], _MOST_SPREAD)
            places = np.unique(np.searchsorted(counts, wanted).clip(0, len(counts) - 1))
        rows = []
        for start in range(0, len(places), _CHUNK):
            at = counts[places[start : start + _CHUNK]]
            draws_s = outcome(plan, option, table, at).elapsed_s
            rows.append(np.sort(draws_s[:, 1:] / draws_s[:, :1], axis=1))
        self._ratios = np.concatenate(rows)
        """Ascending, one row per size that was evaluated."""
        of_row = nearest(np.log(counts[places]), np.log(counts))
        self._edges = np.searchsorted(of_row, np.arange(len(places) + 1)).tolist()
        """Where the sizes of each row begin."""

    def chance(self, limits: FloatArray) -> FloatArray:
        """Share of the draws up to a limit, over the nominal end, of every size."""
        below = np.empty(len(limits))
        for ratios, (first, last) in zip(self._ratios, pairwise(self._edges), strict=True):
            below[first:last] = np.searchsorted(ratios, limits[first:last], side="right")
        return np.asarray(below / self._ratios.shape[1])


def evaluate(
    plan: PlanFile, places: Sequence[tuple[int, int]], table: Steps, *, available_s: Seconds
) -> Candidates:
    """All counts of a table, for every (option, batch) that shares it.

    ``available_s``: from the start to the deadline. [s]
    """
    counts, limits = table.counts, plan.limits
    options = [plan.option[index] for index, _ in places]
    nominal = outcome(plan, options[0], table, counts, num_draws=1)
    elapsed_s = nominal.elapsed_s[:, 0]
    spread = _Spread(plan, options[0], table)
    in_time = spread.chance(available_s / elapsed_s)
    found = []
    for (index, batch), option in zip(places, options, strict=True):
        probability = in_time
        if limits.budget is not None:
            left = limits.budget - setup_cost(option)
            spent_s = left * HOUR_S / (counts * hourly_price(option))
            probability = spread.chance(np.minimum(available_s, spent_s) / elapsed_s)
        cost = setup_cost(option) + elapsed_s / HOUR_S * counts * hourly_price(option)
        excess = np.maximum(elapsed_s / available_s, cost / (limits.budget or np.inf))
        if limits.power_kw is not None:
            used = power_kw(option, counts) / limits.power_kw
            excess = np.maximum(excess, used)
            probability = np.where(used <= 1, probability, 0.0)
        found.append(
            Candidates(
                option=np.full(len(counts), float(index)),
                batch=np.full(len(counts), float(batch)),
                count=counts.astype(float),
                elapsed_s=elapsed_s,
                cost=cost,
                deadline_probability=in_time,
                probability=probability,
                excess=excess,
            )
        )
    return Candidates.joined(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Candidates of which the answer speaks, by index."""

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


def name_candidates(pool: Candidates, plan: PlanFile) -> Named:
    """Rank what keeps all limits by nominal cost, then time, then devices."""
    wanted = plan.limits.probability
    is_feasible, in_time = pool.probability >= wanted, pool.deadline_probability >= wanted
    feasible = np.flatnonzero(is_feasible)
    cheapest = (pool.cost, pool.elapsed_s, pool.count)
    best, fewest = [], []
    for index in range(len(plan.option)):
        is_own = pool.option == index
        fewest += _least(np.flatnonzero(in_time & is_own), (pool.count,))
        own = _least(np.flatnonzero(is_feasible & is_own), cheapest)
        nearly = (-pool.probability, pool.excess)
        best += own or _least(np.flatnonzero(is_own), nearly)

    def distance(index: int) -> tuple[float, float, float]:
        """From the winner: feasible ones by cost, others by what they lack."""
        if pool.probability[index] >= wanted:
            return (-1.0, float(pool.cost[index]), float(pool.elapsed_s[index]))
        return (0.0, -float(pool.probability[index]), float(pool.excess[index]))

    return Named(
        ranked=tuple(_least(feasible, cheapest, MOST_RANKED)),
        best=tuple(sorted(best, key=distance)),
        front=_front(pool, feasible),
        fewest=tuple(fewest),
    )


def _least(indices: IntArray, keys: Sequence[FloatArray], most: int = 1) -> list[int]:
    """The first of some candidates by keys, of which the first counts most; at most ``most``."""
    if len(indices) > most:
        # Only these can be among them: to sort a million takes a second.
        leading = keys[0][indices]
        indices = indices[leading <= np.partition(leading, most - 1)[most - 1]]
    order = np.lexsort([key[indices] for key in reversed(keys)])
    found: list[int] = indices[order][:most].tolist()
    return found


def _front(pool: Candidates, feasible: IntArray) -> tuple[int, ...]:
    """Feasible candidates that none beats in both time and cost, the soonest first; ``MOST_OF_FRONT`` of more."""
    order = feasible[np.lexsort((pool.cost[feasible], pool.elapsed_s[feasible]))]
    cost = pool.cost[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(cost)[:-1]])[: len(cost)]
    front = order[cost < before]
    if len(front) > MOST_OF_FRONT:
        front = front[np.linspace(0, len(front) - 1, MOST_OF_FRONT).round().astype(int)]
    return tuple(front.tolist())
