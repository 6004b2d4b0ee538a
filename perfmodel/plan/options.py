"""Use case: a plan file -> ranked options, the chance of each, and what would change the answer.

Every option at every size and batch is a candidate. Candidates that keep all limits with the
probability asked for are ranked by nominal cost, then time, then devices.
"""

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from perfmodel.context import critical_caveats
from perfmodel.documents.base import command_line
from perfmodel.documents.budget import stale_prices
from perfmodel.documents.plan import OptionVerdict, PlanDocument, PlanRow, Swing
from perfmodel.documents.plan_file import PlanFile
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import NotFeasible
from perfmodel.plan.candidates import Candidate, Named, Pool, name_candidates, pool_of
from perfmodel.plan.machines import Sources, machine_records, open_tables
from perfmodel.plan.outcome import (
    Outcome,
    Summary,
    chances,
    hourly_price,
    outcome,
    power_kw,
    setup_cost,
    summaries,
)
from perfmodel.plan.reasons import (
    break_even,
    nearest_reason,
    plan_caveats,
    reason,
    smallest_devices,
    stale_machines,
)
from perfmodel.plan.steps import Steps
from perfmodel.plan.stops import Stops, stops_of
from perfmodel.plan.tornado import Answer, Knobs, next_measurement, tornado
from perfmodel.predictor import interval
from perfmodel.units import DAY_S, HOUR_S, Seconds

#: Rows that are named are predicted, not read between others, which may change who is named.
_MOST_ROUNDS: Final = 8


class Planner:
    """A plan with the machines of its options opened.

    Parameters
    ----------
    sources
        The files that the plan names.
    today
        First day of training, if the plan says none.

    Raises
    ------
    UsageError, CalibrationUnavailable
        If a profile does not know the workload, or holds one rank and several are asked for.
    NotFeasible
        If no size of any option can split its batch evenly, or none fits into memory.
    """

    def __init__(self, plan: PlanFile, sources: Sources, *, today: dt.date) -> None:
        self.plan, self.today = plan, today
        self.start = plan.limits.start or today
        self.available_s: Seconds = (plan.limits.deadline - self.start).days * DAY_S
        self._sources = sources
        self._machines = machine_records(plan, sources)
        self._tables = open_tables(plan, sources)
        self._stops = {option.name: _stops(plan, sources, option.name) for option in plan.option}
        if not any(len(table.counts) for table in self._tables.values()):
            refusals = dict.fromkeys(
                f"{plan.option[index].name}, {table.refusal}"
                for (index, _), table in self._tables.items()
            )
            raise NotFeasible(f"plan: no size can be run: {'; '.join(refusals)}")
        self._places: dict[int, list[tuple[int, int]]] = {}
        for place, table in self._tables.items():
            self._places.setdefault(id(table), []).append(place)
        self._summaries: dict[int, list[Summary]] = {}

    def answer(self, *, argv: Sequence[str]) -> PlanDocument:
        """Rank all candidates; see the head of this module."""
        pool = self._evaluated()
        named = name_candidates(pool, self.plan)
        for _ in range(_MOST_ROUNDS):
            mentioned = {pool.candidate(index) for index in named.mentioned}
            fresh = [c for c in mentioned if not self._table(c).has(c.count)]
            if not fresh:
                break
            for candidate in fresh:
                table = self._table(candidate)
                table.predict([candidate.count])
                self._summaries.pop(id(table), None)
            pool = self._evaluated()
            named = name_candidates(pool, self.plan)
        return self._document(pool, named, argv)

    def outcome(self, candidate: Candidate) -> Outcome:
        """Draws of one candidate."""
        option = self.plan.option[candidate.option]
        return outcome(
            self.plan,
            option,
            self._table(candidate),
            np.array([candidate.count]),
            stops=self._stops[option.name],
        )

    def _table(self, candidate: Candidate) -> Steps:
        return self._tables[candidate.option, candidate.batch]

    def _evaluated(self) -> Pool:
        found = []
        for places in self._places.values():
            table = self._tables[places[0]]
            if not len(table.counts):
                continue
            if id(table) not in self._summaries:
                self._summaries[id(table)] = summaries(
                    self.plan,
                    [self.plan.option[index] for index, _ in places],
                    table,
                    # options that share a table share the profile, and thereby its checkpoints
                    stops=self._stops[self.plan.option[places[0][0]].name],
                    available_s=self.available_s,
                )
            for (index, batch), entry in zip(places, self._summaries[id(table)], strict=True):
                found.append((index, batch, entry))
        return pool_of(found)

    def _document(self, pool: Pool, named: Named, argv: Sequence[str]) -> PlanDocument:
        rows = {
            index: self._row(pool.candidate(index))
            for index in {*named.ranked, *named.best, *named.front}
        }
        plan, first = self.plan, named.best[0]
        winner = pool.candidate(first)
        swings = self._tornado(winner)
        tables = {id(table): table for table in self._tables.values()}.values()
        return PlanDocument(
            schema_version=PlanDocument.current_version,
            command_line=command_line(argv),
            today=self.today,
            start=self.start,
            plan=plan,
            machines=self._machines,
            num_candidates=len(pool.cost),
            num_feasible=int((pool.probability >= plan.limits.probability).sum()),
            num_skipped=sum(table.num_skipped for table in tables),
            num_too_large=sum(table.num_too_large for table in tables),
            ranked=tuple(rows[index] for index in named.ranked),
            options=tuple(self._verdict(pool, rows, index, first) for index in named.best),
            front=tuple(rows[index] for index in named.front),
            scaling=tuple(self._table(winner).scaling(winner.count)),
            tornado=swings,
            next_measurement=next_measurement(swings),
            caveats=(
                *plan_caveats(plan, self._tables),
                *dict.fromkeys(n for s in self._stops.values() if s is not None for n in s.notes),
                *self._table(winner).caveats(winner.count),
                *self._critical(rows.values()),
            ),
            warnings=(
                *stale_prices(plan.prices(), today=self.today),
                *stale_machines(self._machines, today=self.today),
            ),
        )

    def _row(self, candidate: Candidate) -> PlanRow:
        option = self.plan.option[candidate.option]
        facts = self._table(candidate).facts(candidate.count)
        found = self.outcome(candidate)
        in_time, kept = chances(self.plan, found, self.available_s)
        power = float(power_kw(option, candidate.count)) if option.power_per_device_w else None
        checkpoint_s = float(found.interval_s[0])
        stops = self._stops[option.name]
        elapsed_s = interval(found.elapsed_s[0])
        return PlanRow(
            option=option.name,
            devices=candidate.count,
            micro_batch=facts.micro_batch,
            global_batch=facts.global_batch,
            step_s=interval(facts.step_s),
            elapsed_s=elapsed_s,
            cost=interval(found.cost[0]),
            energy_kwh=None if power is None else power * elapsed_s.p50 / HOUR_S,
            power_kw=power,
            deadline_probability=float(in_time[0]),
            probability=float(kept[0]),
            end=self._day_after(elapsed_s.p50),
            latest_end=self._day_after(elapsed_s.p95),
            expected_stops=float(found.expected_stops[0]),
            checkpoint_interval_s=checkpoint_s if math.isfinite(checkpoint_s) else None,
            checkpoint_s=interval(stops.write_s) if stops is not None and stops.is_timed else None,
            evidence=facts.evidence,
            layout=facts.layout,
            needed_bytes=None if facts.memory is None else facts.memory.needed_bytes,
            fit_probability=None if facts.memory is None else facts.memory.probability,
        )

    def _day_after(self, elapsed_s: Seconds) -> dt.date:
        return self.start + dt.timedelta(days=math.floor(elapsed_s / DAY_S))

    def _verdict(
        self, pool: Pool, rows: Mapping[int, PlanRow], index: int, first: int
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
        table, count = self._table(candidate), np.array([candidate.count])
        stops = self._stops[option.name]

        def answer(knobs: Knobs) -> Answer:
            other = (
                None
                if stops is None
                else stops.scaled(failures=knobs.failures, checkpoint=knobs.checkpoint)
            )
            found = outcome(plan, option, table, count, stops=other, step_factor=knobs.step)
            elapsed_s = float(found.elapsed_s[0, 0])
            running = elapsed_s / HOUR_S * candidate.count * hourly_price(option) * knobs.price
            return Answer(elapsed_s=elapsed_s, cost=setup_cost(option) + running)

        ends = table.ends(candidate.count)
        return tornado(ends, answer, stops=stops, is_validated=option.validation is not None)

    def _critical(self, rows: Iterable[PlanRow]) -> list[str]:
        """Where rows that are shown pass the critical batch of the workload."""
        found: dict[str, None] = {}
        workload = self.plan.work.workload
        for row in sorted(rows, key=lambda row: -row.global_batch):
            profile = self._sources.profiles[row.option]
            if isinstance(profile, ProfileDocument) and workload is not None:
                found |= dict.fromkeys(critical_caveats(profile, workload, [row.global_batch]))
        return list(found)[:1]


def _stops(plan: PlanFile, sources: Sources, option: str) -> Stops | None:
    """What stops cost an option; None if the plan says nothing about failures."""
    if plan.failures is None:
        return None
    where, timed = sources.checkpoints.get(option, ("", None))
    return stops_of(plan.failures, timed, where=where)


def plan_options(
    plan: PlanFile, sources: Sources, *, today: dt.date, argv: Sequence[str]
) -> PlanDocument:
    """Rank the options of a plan.

    Parameters
    ----------
    sources
        The files that the plan names, read.
    """
    return Planner(plan, sources, today=today).answer(argv=argv)
