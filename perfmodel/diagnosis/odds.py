"""Use case: logged step times of a training, what was to be expected, which causes fit, what to measure next.

A small Bayesian table. A cause changes the model's own terms: link rates, host time, arithmetic, units.
Draws of the terms (priors of the data sheet) and of the change predict every logged number:

    odds(cause)  =  prior(cause) * mean over draws of  prod_i Normal(ln observed_i - ln predicted_i, 0.12)

The next measurement is the one whose outcome, over the same draws, tells most about the cause:

    information  =  H(cause) - sum over outcomes  P(outcome) H(cause | outcome)         [nats]

Where one cause has nine tenths, the measurement confirms it: causes are then that one, and all others together.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost.jobs import DeviceSheet, FittedParameters, medians, step_time_priors
from perfmodel.diagnosis.cases import NUM_DRAWS, Observation, Run, Trained
from perfmodel.diagnosis.causes import (
    CAUSES,
    MEASUREMENTS,
    SLOW_NETWORK,
    Cause,
    Changes,
    Context,
    Measurement,
    at_devices,
    step_s,
    with_second_cause,
)
from perfmodel.machine import UNKNOWN_NETWORK
from perfmodel.statistics import FloatArray, Interval
from perfmodel.units import BytesPerSecond, Seconds

#: Runs of one setting, rounding of what people write down. [log]
_OBSERVED_ERROR: Final = 0.12
#: Steps of an unknown cause: anything within a factor of 10. [log]
_UNKNOWN: Final = 2.3
#: Of the dense peak and of the memory bandwidth that a data sheet names; the best matrix products that
#: somebody timed reach 87 % (A100, ml-engineering).
_MOST_OF_PEAK: Final = 0.9
#: Outcomes of a measurement that differ by less are one. [log]
_BIN: Final = 0.25
#: What a measurement that takes longer must tell more. [nats/min]
_PER_MINUTE: Final = 0.005
#: What was believed before the numbers, in the choice of what to measure next.
_BELIEVED: Final = 0.1
#: Odds from which on the likeliest cause is to be confirmed, its rivals no longer told apart.
_CONFIRMED: Final = 0.9
NORMAL: Final = "normal"
UNKNOWN: Final = "something else"
_UNKNOWN_PRIOR: Final = 0.02
#: Prior of causes that shorten no step, where one is faster than any device computes.
_IMPOSSIBLE: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One cause after the numbers."""

    cause: str
    means: str
    odds: float
    """Probability, all causes together 1."""
    size: float | None
    """Of the change, median over draws that fit; of slow links the rate that is left, [B/s] by a data sheet,
    else over that of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One logged number beside what a normal machine does."""

    observation: Observation
    expected_s: Interval
    """90 % of normal steps. [s]"""
    over_first: Interval | None = None
    """The same over the step of the first that was timed: what both share cancels; None of that one."""

    @property
    def is_normal(self) -> bool | None:
        """None where nothing was logged."""
        step = self.observation.step_s
        return None if step is None else self.expected_s.holds(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What fits the logged numbers."""

    judged: tuple[Judged, ...]
    fits: tuple[Fit, ...]
    """Likeliest first."""
    next_name: str | None
    next_command: str | None
    information: float | None
    """Expected of it, over the uncertainty that is left; None where it comes before all odds. [0, 1]"""


def diagnose(  # noqa: PLR0913 - one parameter per part of the question
    trained: Trained,
    observations: Sequence[Observation],
    terms: FittedParameters,
    *,
    usual: FittedParameters,
    device: str | None,
    capacity_bytes: float,
    own_links: bool,
    rng: np.random.Generator,
) -> Diagnosis:
    """Judge logged numbers by draws of the terms of a step: of a data sheet, or of a calibrated machine.

    ``usual``: The terms beside another cause than a slow network, see ``usual_network``; ``terms`` itself where
    the network is known.
    ``device``: Of the data sheet; None on a calibrated machine, whose commands are others.
    """
    runs = [each.run for each in observations]
    context = Context(trained, runs, terms, capacity_bytes, own_links, usual is not terms)
    logged = [(i, each) for i, each in enumerate(observations) if each.step_s is not None]
    normal_s = [step_s(trained, run, terms, Changes()) for run in runs]
    judged = tuple(
        Judged(
            observation=each,
            expected_s=Interval.of(normal_s[i]),
            over_first=_of_runs(normal_s[i] / normal_s[logged[0][0]])
            if i in dict(logged[1:])
            else None,
        )
        for i, each in enumerate(observations)
    )
    if not logged:
        return Diagnosis(judged=judged, fits=(), next_name=None, next_command=None, information=0)
    is_possible = all(each.is_possible for each in observations)
    weighed = []
    for cause in CAUSES:
        possible = 1.0 if cause.may_be_faster or is_possible else _IMPOSSIBLE
        if (prior := min(cause.prior(context), possible)) > 0:
            changed, own = cause.draw(rng, context), context
            if cause.name != NORMAL:
                changed = with_second_cause(changed, rng)
            if cause.name not in (NORMAL, SLOW_NETWORK):
                own = context._replace(terms=usual)
            logs = _log_likelihood(own, logged, changed)
            weighed.append(_Weighed(cause, prior, own.terms, changed, logs))
    unknown = _UNKNOWN_PRIOR * math.exp(_log_unknown(judged, logged))
    evidence = [each.prior * float(np.exp(each.logs).mean()) for each in weighed]
    total = sum(evidence) + unknown
    fits = [
        Fit(cause=each.cause.name, means=each.cause.means, odds=e / total, size=_size(each))
        for each, e in zip(weighed, evidence, strict=True)
    ]
    fits.append(Fit(cause=UNKNOWN, means="none of these", odds=unknown / total, size=None))
    # With a little of what was believed before, so that the likeliest cause is confirmed, not its rivals alone.
    before = sum(each.prior for each in weighed)
    shares = [
        (1 - _BELIEVED) * e / total + _BELIEVED * each.prior / before
        for each, e in zip(weighed, evidence, strict=True)
    ]
    shares = [share / sum(shares) for share in shares]
    told_apart = list(range(len(weighed)))
    if max(evidence) >= _CONFIRMED * total:
        told_apart = [int(e == max(evidence)) for e in evidence]
    name, command, information = _next(context, weighed, shares, told_apart, device)
    return Diagnosis(
        judged=judged,
        fits=tuple(sorted(fits, key=lambda fit: -fit.odds)),
        next_name=name,
        next_command=command,
        information=information,
    )


def _of_runs(ratios: FloatArray) -> Interval:
    """A ratio of two steps, as two runs show it."""
    found = Interval.of(ratios)
    scatter = 1.645 * math.sqrt(2) * _OBSERVED_ERROR
    below = math.hypot(math.log(found.nominal / found.p5), scatter)
    above = math.hypot(math.log(found.p95 / found.nominal), scatter)
    nominal = found.nominal
    return Interval(nominal * math.exp(-below), nominal, nominal * math.exp(above))


#: Between these a network is sought that is fast enough. [B/s]
_NETWORKS: Final = (1e7, 1e12)
_BISECTIONS: Final = 30
_ENOUGH: Final = 0.9


def enough_network(trained: Trained, run: Run, sheet: DeviceSheet) -> BytesPerSecond | None:
    """Bandwidth of a device between nodes that keeps 90 % of one node's speed; None if none does. [B/s]

    At the medians of all other terms, with the same batch of each device.
    """
    terms = medians(step_time_priors(sheet))
    alone = at_devices(run, run.devices_per_node)
    goal_s = float(trained.step_s(alone, terms)[0]) / _ENOUGH

    def at(rate: float) -> Seconds:
        return float(trained.step_s(run, {**terms, "node_bytes_per_s": rate})[0])

    low, high = map(math.log, _NETWORKS)
    if at(_NETWORKS[1]) > goal_s:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(math.exp(middle)) <= goal_s else (middle, high)
    return math.exp(high)


def draw_terms(
    sheet: DeviceSheet, rng: np.random.Generator, *, known_network: bool
) -> dict[str, FloatArray]:
    """Draws of every term before any run; shape ``(num_draws,)``."""
    found = {}
    for name, prior in step_time_priors(sheet).items():
        sigma = prior.log_sigma
        if name == "node_bytes_per_s" and not known_network:
            sigma = UNKNOWN_NETWORK
        drawn = prior.median * np.exp(sigma * rng.standard_normal(NUM_DRAWS))
        found[name] = np.minimum(drawn, _MOST_OF_PEAK * getattr(sheet, name, np.inf))
    return found


def usual_network(sheet: DeviceSheet, terms: FittedParameters) -> dict[str, FloatArray]:
    """Draws of ``draw_terms`` with an open network as near the usual as a known one; shape ``(num_draws,)``.

    Beside other causes it is: else a slow network would count for each of them, and none would be told.
    """
    prior = step_time_priors(sheet)["node_bytes_per_s"]
    rate = np.asarray(terms["node_bytes_per_s"])
    nearer = prior.median * (rate / prior.median) ** (prior.log_sigma / UNKNOWN_NETWORK)
    return {
        **{name: np.asarray(values) for name, values in terms.items()},
        "node_bytes_per_s": nearer,
    }


_Logged = Sequence[tuple[int, Observation]]


class _Weighed(NamedTuple):
    """A cause that can be, and how well each draw of it meets all logged numbers."""

    cause: Cause
    prior: float
    terms: FittedParameters
    changed: Changes
    logs: FloatArray


def _log_likelihood(context: Context, logged: _Logged, changed: Changes) -> FloatArray:
    """Of all logged numbers together, in every draw."""
    total = np.zeros(NUM_DRAWS)
    for place, each in logged:
        here = changed
        if changed.elsewhere is not None:
            here = dataclasses.replace(changed, hardware=changed.elsewhere[place])
        predicted_s = step_s(context.trained, each.run, context.terms, here)
        logs = np.log(predicted_s) + np.log(np.asarray(changed.unit))
        logs = logs + changed.unit_power * math.log(each.run.devices)
        assert each.step_s is not None
        total -= ((math.log(each.step_s) - logs) / _OBSERVED_ERROR) ** 2 / 2
    return total


def _log_unknown(judged: Sequence[Judged], logged: _Logged) -> float:
    """Likelihood of steps that nothing explains, on the scale of the others."""
    total = 0.0
    for place, each in logged:
        assert each.step_s is not None
        away = math.log(each.step_s / judged[place].expected_s.nominal) / _UNKNOWN
        total += math.log(_OBSERVED_ERROR / _UNKNOWN) - away**2 / 2
    return total


#: Rates that are left where links are slow.
_RATES: Final = {"between": "node_bytes_per_s", "inside": "data_bytes_per_s"}


def _size(weighed: _Weighed) -> float | None:
    """Median of the change over the draws, each weighed by how well it fits."""
    logs, shown = weighed.logs, weighed.cause.shown
    if not shown:
        return None
    values = np.broadcast_to(np.asarray(getattr(weighed.changed, shown)), logs.shape)
    if shown in _RATES:
        values = np.asarray(weighed.terms[_RATES[shown]]) / values
    order = np.argsort(values)
    weights = np.exp(logs - logs.max())[order]
    place = int(np.searchsorted(np.cumsum(weights), weights.sum() / 2))
    return float(values[order][min(place, len(order) - 1)])


def _next(
    context: Context,
    weighed: Sequence[_Weighed],
    shares: Sequence[float],
    told_apart: Sequence[int],
    device: str | None,
) -> tuple[str | None, str | None, float]:
    """The measurement with the largest expected information for its time, and that over what is open.

    ``told_apart``: Causes of one number count as one.
    """
    together = np.bincount(told_apart, weights=shares)
    open_nats = -sum(share * math.log(share) for share in together if share > 0)
    # The order in which runs were typed is no matter.
    runs = sorted(context.runs, key=lambda run: run.devices)
    run, best, worth, told = runs[-1], None, -math.inf, 0.0
    for each in MEASUREMENTS:
        if not each.applies(context._replace(runs=runs)):
            continue
        found = _information(context.trained, run, weighed, shares, told_apart, each)
        if found - _PER_MINUTE * each.minutes > worth:
            best, worth, told = each, found - _PER_MINUTE * each.minutes, found
    if best is None or open_nats <= 0:
        return None, None, 0.0
    return best.name, best.typed(run, device), min(1.0, told / open_nats)


def _information(
    trained: Trained,
    run: Run,
    weighed: Sequence[_Weighed],
    shares: Sequence[float],
    told_apart: Sequence[int],
    measurement: Measurement,
) -> float:
    """Entropy of the causes less what is left of it, on average, after the outcome. [nats]"""
    masses: dict[tuple[int, int], float] = defaultdict(float)
    for each, share, number in zip(weighed, shares, told_apart, strict=True):
        weights = np.exp(each.logs - each.logs.max())
        outcome = measurement.outcome(trained, run, each.terms, each.changed)
        bins = np.round(np.broadcast_to(outcome, weights.shape) / _BIN).astype(int)
        places, inverse = np.unique(bins, return_inverse=True)
        sums = np.bincount(inverse, weights=weights) * share / weights.sum()
        for place, mass in zip(places.tolist(), sums.tolist(), strict=True):
            masses[number, place] += mass
    of_cause: dict[int, float] = defaultdict(float)
    of_outcome: dict[int, float] = defaultdict(float)
    for (number, place), mass in masses.items():
        of_cause[number] += mass
        of_outcome[place] += mass
    return sum(
        mass * math.log(mass / of_outcome[place] / of_cause[number])
        for (number, place), mass in masses.items()
        if mass > 0
    )
