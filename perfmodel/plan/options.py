"""Use case: a plan file -> ranked options, the chance of each, and what would change the answer.

Every option at every size and batch is a candidate. Candidates that keep all limits with the
probability asked for are ranked by nominal cost, then time, then devices.
"""

import datetime as dt
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

import numpy as np

from perfmodel.answer import interval
from perfmodel.cost import Samples
from perfmodel.documents import age_notes, asked_by
from perfmodel.documents.budget import invented_prices, stale_prices
from perfmodel.documents.plan import Option, OptionVerdict, PlanDocument, PlanFile, PlanRow, Swing
from perfmodel.engine.job import best_intervals_s, elapsed_moments
from perfmodel.errors import NotFeasible
from perfmodel.files import unsealed_notes
from perfmodel.plan.machines import Sources, machine_records, open_tables
from perfmodel.plan.steps import Knobs, Steps, nearest, next_measurement, tornado
from perfmodel.statistics import FloatArray, IntArray
from perfmodel.units import DAY_S, HOUR_S, KILOWATT_W, Seconds, format_duration

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


#: Rows that are named are predicted, not read between others, which may change who is named.
_MOST_ROUNDS: Final = 8


def plan_options(plan: PlanFile, sources: Sources, *, today: dt.date) -> PlanDocument:
    """Rank the options of a plan; ``today`` is the first day of training, if the plan says none."""
    return _Planner(plan, sources, today=today).answer()


class _Planner:
    """A plan with the machines of its options opened."""

    def __init__(self, plan: PlanFile, sources: Sources, *, today: dt.date) -> None:
        self.plan, self.today = plan, today
        self.start = plan.limits.start or today
        self.available_s: Seconds = (plan.limits.deadline - self.start).days * DAY_S
        self._sources = sources
        self._tables = open_tables(plan, sources)
        if not any(len(table.counts) for table in self._tables.values()):
            refusals = dict.fromkeys(
                f"{plan.option[index].name}, {table.refusal}"
                for (index, _), table in self._tables.items()
            )
            raise NotFeasible(f"plan: no size can be run: {'; '.join(refusals)}")
        self._places: dict[int, list[tuple[int, int]]] = {}
        for place, table in self._tables.items():
            self._places.setdefault(id(table), []).append(place)
        self._known: dict[int, Candidates] = {}

    def answer(self) -> PlanDocument:
        """Rank all candidates."""
        pool = self._evaluated()
        named = name_candidates(pool, self.plan)
        for _ in range(_MOST_ROUNDS):
            mentioned = {pool[index] for index in named.mentioned}
            fresh = [c for c in mentioned if not self._table(c).has(c.count)]
            if not fresh:
                break
            for candidate in fresh:
                table = self._table(candidate)
                table.predict([candidate.count])
                self._known.pop(id(table), None)
            pool = self._evaluated()
            named = name_candidates(pool, self.plan)
        return self._document(pool, named)

    def _evaluated(self) -> Candidates:
        for key, places in self._places.items():
            table = self._tables[places[0]]
            if len(table.counts) and key not in self._known:
                self._known[key] = evaluate(self.plan, places, table, available_s=self.available_s)
        return Candidates.joined([self._known[key] for key in self._places if key in self._known])

    def _table(self, candidate: Candidate) -> Steps:
        return self._tables[candidate.option, candidate.batch]

    def _outcome(self, candidate: Candidate, knobs: Knobs = Knobs()) -> Outcome:  # noqa: B008 - frozen
        option = self.plan.option[candidate.option]
        table, counts = self._table(candidate), np.array([candidate.count])
        return outcome(
            self.plan, option, table, counts, step_factor=knobs.step, failure_factor=knobs.failures
        )

    def _document(self, pool: Candidates, named: Named) -> PlanDocument:
        shown = {*named.ranked, *named.best, *named.front}
        rows = {index: self._row(pool[index]) for index in shown}
        plan, first = self.plan, named.best[0]
        winner = pool[first]
        swings = self._tornado(winner)
        tables = {id(table): table for table in self._tables.values()}.values()
        machines = machine_records(plan, self._sources)
        return PlanDocument(
            command_line=asked_by(),
            today=self.today,
            start=self.start,
            plan=plan,
            machines=machines,
            num_candidates=len(pool.cost),
            num_feasible=int((pool.probability >= plan.limits.probability).sum()),
            num_skipped=sum(table.num_skipped for table in tables),
            num_too_large=sum(table.num_too_large for table in tables),
            ranked=tuple(rows[index] for index in named.ranked),
            options=tuple(self._verdict(pool, rows, index, first) for index in named.best),
            front=tuple(rows[index] for index in named.front),
            tornado=swings,
            next_measurement=next_measurement(swings),
            caveats=(
                *plan_caveats(plan, self._tables),
                *self._table(winner).caveats(winner.count),
                *_what_plans_mean(plan),
            ),
            warnings=(
                *invented_prices(plan.prices()),
                *unsealed_notes(),
                *stale_prices(plan.prices(), today=self.today),
                *(
                    f"{machine.profile}: {note}"
                    for machine in machines
                    for note in age_notes(machine.made_utc, today=self.today)
                ),
            ),
        )

    def _row(self, candidate: Candidate) -> PlanRow:
        option = self.plan.option[candidate.option]
        table, count = self._table(candidate), candidate.count
        evidence, layout, memory = table.evidence(count), table.layout(count), table.memory(count)
        found = self._outcome(candidate)
        in_time, kept = chances(self.plan, found, self.available_s)
        power = float(power_kw(option, candidate.count)) if option.power_per_device_w else None
        checkpoint_s = float(found.interval_s[0])
        elapsed_s = interval(found.elapsed_s[0])
        return PlanRow(
            option=option.name,
            devices=candidate.count,
            micro_batch=layout.micro_batch,
            global_batch=layout.global_batch,
            step_s=interval(table.drawn_s(count)),
            elapsed_s=elapsed_s,
            cost=interval(found.cost[0]),
            energy_kwh=None if power is None else power * elapsed_s.nominal / HOUR_S,
            power_kw=power,
            deadline_probability=float(in_time[0]),
            probability=float(kept[0]),
            end=self._day_after(elapsed_s.nominal),
            latest_end=self._day_after(elapsed_s.p95),
            expected_stops=float(found.expected_stops[0]),
            checkpoint_interval_s=checkpoint_s if math.isfinite(checkpoint_s) else None,
            evidence=evidence,
            layout=None if self.plan.work.model is None else str(layout),
            needed_bytes=None if memory is None else memory.needed_bytes,
            fit_probability=None if memory is None else memory.probability,
        )

    def _day_after(self, elapsed_s: Seconds) -> dt.date:
        return self.start + dt.timedelta(days=math.floor(elapsed_s / DAY_S))

    def _verdict(
        self, pool: Candidates, rows: Mapping[int, PlanRow], index: int, first: int
    ) -> OptionVerdict:
        plan, row, winner = self.plan, rows[index], rows[first]
        wanted = plan.limits.probability
        is_feasible = bool(pool.probability[index] >= wanted)
        is_rival = is_feasible and index != first
        text = "taken" if index == first else reason(row, winner, plan.currency)
        if not is_feasible:
            text = nearest_reason(plan, row, self._outcome(pool[index]), self.start)
        option = plan.option[pool[index].option]
        enough = (pool.option == pool.option[index]) & (pool.deadline_probability >= wanted)
        return OptionVerdict(
            row=row,
            is_feasible=is_feasible,
            reason=text,
            break_even_price=break_even(option, row, winner) if is_rival else None,
            smallest_devices=int(pool.count[enough].min()) if enough.any() else None,
        )

    def _tornado(self, candidate: Candidate) -> tuple[Swing, ...]:
        option = self.plan.option[candidate.option]

        def total(knobs: Knobs) -> tuple[Seconds, float]:
            elapsed_s = float(self._outcome(candidate, knobs).elapsed_s[0, 0])
            running = elapsed_s / HOUR_S * candidate.count * hourly_price(option) * knobs.price
            return elapsed_s, setup_cost(option) + running

        return tornado(
            self._table(candidate).ends(candidate.count),
            total,
            fails=self.plan.failures is not None,
            is_validated=option.validation is not None,
        )


def reason(row: PlanRow, winner: PlanRow, currency: str) -> str:
    """Why a feasible row lost: it costs more, or as much and takes longer."""
    dearer = row.cost.nominal - winner.cost.nominal
    later_s = row.elapsed_s.nominal - winner.elapsed_s.nominal
    when = f"{format_duration(abs(later_s))} {'later' if later_s > 0 else 'sooner'}"
    return (
        f"{dearer:,.0f} {currency} dearer ({100 * dearer / winner.cost.nominal:+.1f} %), "
        f"{when if later_s else 'done at the same time'}"
    )


def nearest_reason(plan: PlanFile, row: PlanRow, found: Outcome, start: dt.date) -> str:
    """Which limits a row breaks, and what they would have to be."""
    limits = plan.limits
    needed_s, needed_cost = (
        float(np.quantile(draws[0, 1:], limits.probability, method="higher"))
        for draws in (found.elapsed_s, found.cost)
    )
    wanted = []
    end = start + dt.timedelta(days=int(np.ceil(needed_s / DAY_S)))
    if needed_s >= NEVER_S:
        wanted.append("far fewer failures or faster recoveries: it hardly gets on")
    elif end > limits.deadline:
        wanted.append(f"a deadline of {end}")
    if limits.budget is not None and needed_cost > limits.budget:
        wanted.append(f"a budget of {needed_cost:,.0f} {plan.currency}")
    if limits.power_kw is not None and row.power_kw is not None and row.power_kw > limits.power_kw:
        wanted.append(f"{row.power_kw:,.1f} kW")
    return (
        f"keeps deadline and budget with {100 * row.probability:.0f} % only; for "
        f"{100 * limits.probability:.0f} % it needs "
        f"{' and '.join(wanted) or 'a little more time'}"
    )


def break_even(option: Option, row: PlanRow, winner: PlanRow) -> float | None:
    """Price per device-hour at which a row costs as much as the winner; None if it cannot."""
    device_hours = row.devices * row.elapsed_s.nominal / HOUR_S
    energy = hourly_price(option) - option.price.value
    price = (winner.cost.nominal - setup_cost(option)) / device_hours - energy
    return price if price > 0 else None


def plan_caveats(plan: PlanFile, tables: Mapping[tuple[int, int], Steps]) -> Iterator[str]:
    """What a plan leaves out."""
    for index, option in enumerate(plan.option):
        refusals = [tables[index, batch].refusal for batch in option.batches]
        if all(refusals):
            yield f"{option.name} is left out: batch {option.batches[0]}: {refusals[0]}"
    if plan.failures is None:
        yield "the plan says nothing about failures: none are assumed"


def _what_plans_mean(plan: PlanFile) -> Iterator[str]:
    """What every plan takes for granted."""
    kind = "of each device" if plan.work.scaling == "weak" else "of all devices together"
    yield (
        f"{plan.work.scaling} scaling: the batches are those {kind}; the samples are taken to be as many "
        "whatever the global batch, see perfmodel batch"
    )
    yield "every device-hour is paid for from the start to the end of the job, stops included"
