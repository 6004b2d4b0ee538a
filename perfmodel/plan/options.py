"""Use case: a plan file -> ranked options, the chance of each, and what would change the answer.

Every option at every size and batch is a candidate. Candidates that keep all limits with the
probability asked for are ranked by nominal cost, then time, then devices.
"""

import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfmodel.context import critical_caveats
from perfmodel.cost.curve import Samples
from perfmodel.documents.base import command_line
from perfmodel.documents.budget import stale_prices
from perfmodel.documents.plan import OptionVerdict, PlanDocument, PlanRow, Swing
from perfmodel.documents.plan_file import Option, PlanFile
from perfmodel.documents.prediction import Evidence
from perfmodel.documents.profile import ProfileDocument, WorkloadProfile
from perfmodel.errors import NotFeasible
from perfmodel.forecast import open_workload
from perfmodel.plan.outcome import (
    HOUR_S,
    Outcome,
    Summary,
    chances,
    hourly_price,
    outcome,
    power_kw,
    setup_cost,
    summaries,
)
from perfmodel.plan.reasons import break_even, nearest_reason, reason, smallest_devices
from perfmodel.plan.step_table import StepTable
from perfmodel.plan.tornado import Answer, Knobs, next_measurement, tornado
from perfmodel.predictor import Predictor, interval
from perfmodel.units import Seconds

#: Rows of the ranking that are kept, and of the front, evenly over it.
MOST_RANKED: Final = 10
MOST_OF_FRONT: Final = 12
_DAY_S: Final[Seconds] = 86400.0
#: Rows that are named are predicted, not read between others, which may change who is named.
_MOST_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One option at one batch and one size."""

    option: int
    batch: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """All candidates as arrays of one shape."""

    option: Samples
    batch: Samples
    count: Samples
    elapsed_s: Samples
    cost: Samples
    deadline_probability: Samples
    probability: Samples
    excess: Samples

    def candidate(self, index: int) -> Candidate:
        return Candidate(
            option=int(self.option[index]),
            batch=int(self.batch[index]),
            count=int(self.count[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Which candidates the answer speaks of, by index in the pool."""

    ranked: tuple[int, ...]
    best: tuple[int, ...]
    """Of every option, the best, or the one that comes nearest; the winner first."""
    front: tuple[int, ...]
    fewest: tuple[int, ...]
    """Of every option that can, the smallest size that meets the deadline."""


class Planner:
    """A plan with the machines of its options opened.

    Parameters
    ----------
    profiles
        By option.
    today
        First day of training, if the plan says none.

    Raises
    ------
    UsageError, CalibrationUnavailable
        If a profile does not know the workload, or holds one rank and several are asked for.
    NotFeasible
        If no size of any option can split its batch evenly.
    """

    def __init__(
        self, plan: PlanFile, profiles: Mapping[str, ProfileDocument], *, today: dt.date
    ) -> None:
        self.plan, self.today = plan, today
        self.start = plan.limits.start or today
        self.available_s: Seconds = (plan.limits.deadline - self.start).days * _DAY_S
        self._profiles = profiles
        self._digests = {name: profile.digest for name, profile in profiles.items()}
        machines: dict[str, tuple[Predictor, WorkloadProfile]] = {}
        self._tables: dict[tuple[int, int], StepTable] = {}
        shared: dict[tuple[str, int, tuple[int, ...]], StepTable] = {}
        for index, option in enumerate(plan.option):
            digest = self._digests[option.name]
            if digest not in machines:
                predictor = Predictor(profiles[option.name])
                machines[digest] = (
                    predictor,
                    open_workload(predictor, plan.work.workload, where="work.workload"),
                )
            for batch in option.batches:
                key = (digest, batch, option.device_counts)
                if key not in shared:
                    shared[key] = self._table(*machines[digest], batch, option)
                self._tables[index, batch] = shared[key]
        if not any(len(table.counts) for table in self._tables.values()):
            raise NotFeasible(
                "plan: scaling strong: each batch must be a multiple of devices x accumulation, got none "
                "that is; choose other batches or counts"
            )
        self._places: dict[StepTable, list[tuple[int, int]]] = {}
        for place, table in self._tables.items():
            self._places.setdefault(table, []).append(place)
        self._summaries: dict[StepTable, list[Summary]] = {}

    def _table(
        self, predictor: Predictor, workload: WorkloadProfile, batch: int, option: Option
    ) -> StepTable:
        return StepTable(
            predictor,
            workload,
            scaling=self.plan.work.scaling,
            batch=batch,
            accumulation=self.plan.work.accumulation,
            counts=option.device_counts,
        )

    def answer(self, *, argv: Sequence[str]) -> PlanDocument:
        """Rank all candidates; see the head of this module."""
        pool = self._evaluated()
        named = self._named(pool)
        for _ in range(_MOST_ROUNDS):
            fresh = [c for c in self._mentioned(pool, named) if not self._is_exact(c)]
            if not fresh:
                break
            for candidate in fresh:
                table = self._tables[candidate.option, candidate.batch]
                table.predict([candidate.count])
                self._summaries.pop(table, None)
            pool = self._evaluated()
            named = self._named(pool)
        return self._document(pool, named, argv)

    def outcome(self, candidate: Candidate) -> Outcome:
        """Draws of one candidate."""
        table = self._tables[candidate.option, candidate.batch]
        option = self.plan.option[candidate.option]
        return outcome(self.plan, option, table, np.array([candidate.count]))

    def _evaluated(self) -> _Pool:
        found = []
        for table, places in self._places.items():
            if table not in self._summaries:
                self._summaries[table] = summaries(
                    self.plan,
                    [self.plan.option[index] for index, _ in places],
                    table,
                    available_s=self.available_s,
                )
            for (index, batch), entry in zip(places, self._summaries[table], strict=True):
                found.append((index, batch, entry))

        def joined(read: Callable[[Summary], Samples]) -> Samples:
            return np.concatenate([read(entry) for _, _, entry in found])

        return _Pool(
            option=np.concatenate([np.full(len(s.counts), float(i)) for i, _, s in found]),
            batch=np.concatenate([np.full(len(s.counts), float(b)) for _, b, s in found]),
            count=joined(lambda entry: entry.counts.astype(float)),
            elapsed_s=joined(lambda entry: entry.elapsed_s),
            cost=joined(lambda entry: entry.cost),
            deadline_probability=joined(lambda entry: entry.deadline_probability),
            probability=joined(lambda entry: entry.probability),
            excess=joined(lambda entry: entry.excess),
        )

    def _named(self, pool: _Pool) -> _Named:
        feasible = np.flatnonzero(pool.probability >= self.plan.limits.probability)
        order = np.lexsort((pool.count[feasible], pool.elapsed_s[feasible], pool.cost[feasible]))
        ranked = feasible[order]
        best, fewest = [], []
        in_time = pool.deadline_probability >= self.plan.limits.probability
        for index in range(len(self.plan.option)):
            enough = np.flatnonzero(in_time & (pool.option == index))
            fewest.extend(enough[np.argsort(pool.count[enough], kind="stable")][:1].tolist())
            own = ranked[pool.option[ranked] == index]
            if len(own) == 0:
                own = np.flatnonzero(pool.option == index)
                own = own[np.lexsort((pool.excess[own], -pool.probability[own]))]
            best.extend(own[:1].tolist())
        return _Named(
            ranked=tuple(ranked[:MOST_RANKED].tolist()),
            best=tuple(sorted(best, key=lambda index: self._distance(pool, index))),
            front=_thinned(_front(pool, ranked)),
            fewest=tuple(fewest),
        )

    def _mentioned(self, pool: _Pool, named: _Named) -> set[Candidate]:
        indices = {*named.ranked, *named.best, *named.front, *named.fewest}
        return {pool.candidate(index) for index in indices}

    def _is_exact(self, candidate: Candidate) -> bool:
        return self._tables[candidate.option, candidate.batch].has(candidate.count)

    def _document(self, pool: _Pool, named: _Named, argv: Sequence[str]) -> PlanDocument:
        rows = {
            index: self._row(pool.candidate(index))
            for index in {*named.ranked, *named.best, *named.front}
        }
        plan = self.plan
        first = named.best[0]
        swings = self._tornado(pool.candidate(first))
        return PlanDocument(
            schema_version=PlanDocument.current_version,
            command_line=command_line(argv),
            today=self.today,
            start=self.start,
            plan=plan,
            profile_digests=self._digests,
            num_candidates=len(pool.cost),
            num_feasible=int((pool.probability >= plan.limits.probability).sum()),
            num_skipped=sum(table.num_skipped for table in self._tables.values()),
            ranked=tuple(rows[index] for index in named.ranked),
            options=tuple(self._verdict(pool, rows, index, first) for index in named.best),
            front=tuple(rows[index] for index in named.front),
            tornado=swings,
            next_measurement=next_measurement(swings),
            caveats=(*self._caveats(), *self._critical(rows.values())),
            warnings=tuple(stale_prices(plan.prices(), today=self.today)),
        )

    def _distance(self, pool: _Pool, index: int) -> tuple[float, float, float]:
        """How far a candidate is from the winner: feasible ones by cost, others by what they lack."""
        if pool.probability[index] >= self.plan.limits.probability:
            return (-1.0, float(pool.cost[index]), float(pool.elapsed_s[index]))
        return (0.0, -float(pool.probability[index]), float(pool.excess[index]))

    def _row(self, candidate: Candidate) -> PlanRow:
        option = self.plan.option[candidate.option]
        step = self._tables[candidate.option, candidate.batch].step(candidate.count)
        found = self.outcome(candidate)
        in_time, kept = chances(self.plan, found, self.available_s)
        power = float(power_kw(option, candidate.count)) if option.power_per_device_w else None
        checkpoint_s = float(found.interval_s[0])
        order = list(Evidence)
        return PlanRow(
            option=option.name,
            devices=candidate.count,
            micro_batch=step.setting.micro_batch,
            global_batch=step.setting.global_batch,
            step_s=interval(step.step_s),
            elapsed_s=interval(found.elapsed_s[0]),
            cost=interval(found.cost[0]),
            energy_kwh=None if power is None else power * float(found.elapsed_s[0, 0]) / HOUR_S,
            power_kw=power,
            deadline_probability=float(in_time[0]),
            probability=float(kept[0]),
            expected_stops=float(found.expected_stops[0]),
            checkpoint_interval_s=checkpoint_s if math.isfinite(checkpoint_s) else None,
            evidence=max(step.terms.evidence.values(), key=order.index),
        )

    def _verdict(
        self, pool: _Pool, rows: Mapping[int, PlanRow], index: int, first: int
    ) -> OptionVerdict:
        plan, row = self.plan, rows[index]
        option = plan.option[int(pool.option[index])]
        is_feasible = bool(pool.probability[index] >= plan.limits.probability)
        if is_feasible:
            text = "taken" if index == first else reason(row, rows[first], plan.currency)
        else:
            text = nearest_reason(plan, row, self.outcome(pool.candidate(index)), self.start)
        is_rival = is_feasible and index != first
        own = pool.option == pool.option[index]
        return OptionVerdict(
            row=row,
            is_feasible=is_feasible,
            reason=text,
            break_even_price=break_even(option, row, rows[first]) if is_rival else None,
            smallest_devices=smallest_devices(
                pool.count[own], pool.deadline_probability[own], plan.limits.probability
            ),
        )

    def _tornado(self, candidate: Candidate) -> tuple[Swing, ...]:
        option, plan = self.plan.option[candidate.option], self.plan
        step = self._tables[candidate.option, candidate.batch].step(candidate.count)

        def answer(knobs: Knobs) -> Answer:
            failures = plan.failures
            if failures is not None:
                hours = failures.mtbf_device_hours / knobs.failures
                failures = failures.model_copy(update={"mtbf_device_hours": hours})
            other = plan.model_copy(update={"failures": failures})
            table = self._tables[candidate.option, candidate.batch]
            count = np.array([candidate.count])
            found = outcome(other, option, table, count, step_factor=knobs.step)
            elapsed_s = float(found.elapsed_s[0, 0])
            running = elapsed_s / HOUR_S * candidate.count * hourly_price(option) * knobs.price
            return Answer(elapsed_s=elapsed_s, cost=setup_cost(option) + running)

        return tornado(step, answer, has_failures=plan.failures is not None)

    def _caveats(self) -> list[str]:
        kind = "of each device" if self.plan.work.scaling == "weak" else "of all devices together"
        found = [
            (
                f"{self.plan.work.scaling} scaling: the batches are those {kind}; the samples are taken "
                "to be as many whatever the global batch, see perfmodel batch"
            ),
            "every device-hour is paid for from the start to the end of the job, stops included",
        ]
        empty = [
            option.name
            for index, option in enumerate(self.plan.option)
            if not any(len(self._tables[index, batch].counts) for batch in option.batches)
        ]
        if empty:
            found.append(f"no size splits the batches of {', '.join(empty)} evenly: left out")
        if self.plan.failures is None:
            found.append("the plan says nothing about failures: none are assumed")
        return found

    def _critical(self, rows: Iterable[PlanRow]) -> list[str]:
        """Where rows that are shown pass the critical batch of the workload."""
        found: dict[str, None] = {}
        workload = self.plan.work.workload
        for row in sorted(rows, key=lambda row: -row.global_batch):
            found |= dict.fromkeys(
                critical_caveats(self._profiles[row.option], workload, [row.global_batch])
            )
        return list(found)[:1]


def plan_options(
    plan: PlanFile,
    profiles: Mapping[str, ProfileDocument],
    *,
    today: dt.date,
    argv: Sequence[str],
) -> PlanDocument:
    """Rank the options of a plan.

    Parameters
    ----------
    profiles
        Of every option, by its name.
    """
    return Planner(plan, profiles, today=today).answer(argv=argv)


def _front(pool: _Pool, feasible: NDArray[np.int64]) -> tuple[int, ...]:
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
