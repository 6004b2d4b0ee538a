"""What an option of a plan takes at many sizes: time, money and chance, draw by draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray, IntArray
from perfmodel.cost.terms import Samples
from perfmodel.documents.plan import Option, PlanFile
from perfmodel.engine.job_algebra import best_interval_s, elapsed_moments
from perfmodel.plan.goodput import Stops
from perfmodel.plan.steps import Steps
from perfmodel.units import HOUR_S, KILOWATT_W, Seconds

#: A thousand years: longer than anybody waits, and still a date. [s]
NEVER_S: Final = 1000 * 365.25 * 24 * HOUR_S
#: So many candidates are evaluated at once: their draws fit into a cache.
_CHUNK: Final = 128
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Draws of some candidates; draw 0 is nominal. Shape ``(num_candidates, num_draws)``."""

    elapsed_s: Samples
    cost: Samples
    expected_stops: Samples
    """Nominal, shape ``(num_candidates,)``."""
    interval_s: Samples
    """Work between two checkpoints, shape ``(num_candidates,)``; infinite if nothing fails. [s]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Summary:
    """Nominal figures and chances of all sizes of an option at one batch; shape ``(num_counts,)``."""

    counts: IntArray
    elapsed_s: FloatArray
    cost: FloatArray
    deadline_probability: FloatArray
    probability: FloatArray
    """That deadline, budget and power are all kept."""
    excess: FloatArray
    """Largest of time, cost and power over its limit, nominal; above 1 a limit is broken."""


def outcome(
    plan: PlanFile,
    option: Option,
    table: Steps,
    counts: IntArray,
    *,
    stops: Stops | None,
    step_factor: float = 1.0,
) -> Outcome:
    """Simulate nothing: closed forms over the draws of the step.

    The end of the job varies with the draws of the step, and normally around its mean with the luck
    of the failures; the luck is the same for all candidates.

    Parameters
    ----------
    step_factor
        By how much steps take longer than predicted.
    """
    course = _course(plan, table, counts, stops, step_factor)
    return Outcome(
        elapsed_s=course.elapsed_s,
        cost=_cost(option, counts[:, None], course.elapsed_s),
        expected_stops=course.expected_stops,
        interval_s=course.interval_s,
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


def summaries(
    plan: PlanFile,
    options: Sequence[Option],
    table: Steps,
    *,
    stops: Stops | None,
    available_s: Seconds,
) -> list[Summary]:
    """Evaluate all counts of a table, a few at a time, for every option that shares it.

    Parameters
    ----------
    available_s
        From the start to the deadline. [s]
    """
    counts = table.counts
    elapsed_s, in_time = np.empty(len(counts)), np.empty(len(counts))
    kept = np.empty((len(options), len(counts)))
    for start in range(0, len(counts), _CHUNK):
        part = slice(start, start + _CHUNK)
        draws_s = _course(plan, table, counts[part], stops, 1.0).elapsed_s
        elapsed_s[part] = draws_s[:, 0]
        in_time[part] = (draws_s[:, 1:] <= available_s).mean(axis=1)
        for row, option in enumerate(options):
            kept[row, part] = (
                in_time[part]
                if plan.limits.budget is None
                else (draws_s[:, 1:] <= _allowed_s(plan, option, counts[part], available_s)).mean(
                    axis=1
                )
            )
    return [
        _summary(plan, option, counts, elapsed_s, in_time, row, available_s)
        for option, row in zip(options, kept, strict=True)
    ]


def _allowed_s(plan: PlanFile, option: Option, counts: IntArray, available_s: Seconds) -> Samples:
    """Until the deadline, or until the budget is spent; shape ``(len(counts), 1)``. [s]"""
    assert plan.limits.budget is not None
    spent_s = (plan.limits.budget - setup_cost(option)) * HOUR_S / (counts * hourly_price(option))
    allowed: Samples = np.minimum(available_s, spent_s)[:, None]
    return allowed


def _summary(  # noqa: PLR0913, PLR0917 - one row of arrays
    plan: PlanFile,
    option: Option,
    counts: IntArray,
    elapsed_s: Samples,
    in_time: Samples,
    kept: Samples,
    available_s: Seconds,
) -> Summary:
    cost = _cost(option, counts, elapsed_s)
    excess: Samples = np.maximum(elapsed_s / available_s, cost / (plan.limits.budget or np.inf))
    if plan.limits.power_kw is not None:
        used = power_kw(option, counts) / plan.limits.power_kw
        excess = np.maximum(excess, used)
        kept = np.where(used <= 1, kept, 0.0)
    return Summary(
        counts=counts,
        elapsed_s=elapsed_s,
        cost=cost,
        deadline_probability=in_time,
        probability=kept,
        excess=excess,
    )


def _cost(option: Option, counts: IntArray, elapsed_s: Samples) -> Samples:
    """Of so many devices for so long, in the currency of the plan."""
    cost: Samples = setup_cost(option) + elapsed_s / HOUR_S * counts * hourly_price(option)
    return cost


def chances(plan: PlanFile, found: Outcome, available_s: Seconds) -> tuple[Samples, Samples]:
    """Share of the draws in time, and of those in time and in budget; power is no matter of chance."""
    in_time = found.elapsed_s[:, 1:] <= available_s
    in_budget = found.cost[:, 1:] <= (plan.limits.budget or np.inf)
    return in_time.mean(axis=1), (in_time & in_budget).mean(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Course:
    """When the job ends, whatever it costs."""

    elapsed_s: Samples
    interval_s: Samples
    expected_stops: Samples


def _end_s(mean_s: Samples, spread_s: Samples, luck: Samples) -> Samples:
    with np.errstate(invalid="ignore"):
        return _at_most_never(mean_s + spread_s * luck)


def _at_most_never(elapsed_s: Samples) -> Samples:
    """Courses that hardly get on end never: far away, but finite. [s]"""
    return np.minimum(np.where(np.isnan(elapsed_s), NEVER_S, elapsed_s), NEVER_S)


def _course(
    plan: PlanFile, table: Steps, counts: IntArray, stops: Stops | None, step_factor: float
) -> _Course:
    steps = np.ceil(plan.work.total_samples / table.global_batches(counts))
    work_s = step_factor * steps[:, None] * table.step_s(counts)
    if stops is None:
        never, none = np.full(len(counts), np.inf), np.zeros(len(counts))
        return _Course(elapsed_s=work_s, interval_s=never, expected_stops=none)
    mtbf_s = stops.mtbf_device_s / counts
    write_s = float(stops.write_s[0])
    best_s = [best_interval_s(write_s=write_s, mtbf_s=each) for each in mtbf_s]
    interval_s = np.minimum(best_s, work_s[:, 0])
    mean_s, spread_s = elapsed_moments(
        work_s,
        interval_s=interval_s[:, None],
        write_s=_once_if_constant(stops.write_s),
        mtbf_s=mtbf_s[:, None],
        recovery_s=_once_if_constant(stops.recovery_s),
    )
    luck: Samples = np.random.default_rng(_SEED).standard_normal((work_s.shape[1],))
    luck[0] = 0.0
    return _Course(
        elapsed_s=np.maximum(work_s, _end_s(mean_s, spread_s, luck)),
        interval_s=interval_s,
        expected_stops=_at_most_never(mean_s[:, 0]) / mtbf_s,
    )


def _once_if_constant(draws: Samples) -> Samples:
    """One number where all are equal, as if typed: what follows from it is computed once per size."""
    return draws[:1] if (draws == draws[0]).all() else draws


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
