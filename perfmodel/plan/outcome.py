"""What an option of a plan takes at many sizes: time, money and chance, draw by draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.algebra.elapsed import elapsed_moments
from perfmodel.algebra.goodput import best_interval_s
from perfmodel.arrays import FloatArray, IntArray
from perfmodel.cost.curve import Samples
from perfmodel.documents.plan_file import Option, PlanFile
from perfmodel.plan.steps import Steps
from perfmodel.plan.stops import Stops
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
    """Of all devices with the site's share; 0 if nothing is said. [kW]"""
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
