"""Use case: a plan file -> ranked options, the chance of each, and what would change the answer.

Every option at every size and batch is a candidate. Candidates that keep all limits with the
probability asked for are ranked by nominal cost, then time, then devices.
"""

import datetime as dt
import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from perfmodel.answer import interval
from perfmodel.documents import age_notes, asked_by, unsealed_notes
from perfmodel.documents.budget import invented_prices, stale_prices
from perfmodel.documents.plan import Option, OptionVerdict, PlanDocument, PlanFile, PlanRow, Swing
from perfmodel.errors import NotFeasible
from perfmodel.plan.machines import Sources, machine_records, open_tables
from perfmodel.plan.outcome import (
    NEVER_S,
    Candidate,
    Candidates,
    Named,
    Outcome,
    chances,
    evaluate,
    hourly_price,
    name_candidates,
    outcome,
    power_kw,
    setup_cost,
)
from perfmodel.plan.steps import Steps
from perfmodel.plan.tornado import Knobs, next_measurement, tornado
from perfmodel.units import DAY_S, HOUR_S, Seconds, format_duration

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
        """Rank all candidates; see the head of this module."""
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
