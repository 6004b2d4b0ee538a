"""Which assumption moves the answer most, one at a time, and what would narrow it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfmodel.cost.terms import Price, Samples, Terms
from perfmodel.documents.plan import Swing
from perfmodel.plan.goodput import Stops
from perfmodel.plan.steps import Assumption, Ends, Remedy, remedy
from perfmodel.predictor import StepPrediction, step_times
from perfmodel.units import Seconds

#: Failure rates are rarely known better than within this factor, and prices than within this share.
FAILURE_FACTOR: Final = 2.0
PRICE_SHARE: Final = 0.1
_COMPUTE: Final = ("compute_s", "issue_s", "bucket_s", "bucket_s_per_byte", "load_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a plan comes to, nominally."""

    elapsed_s: Seconds
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What an answer is computed from, relative to what is assumed."""

    step: float = 1.0
    failures: float = 1.0
    price: float = 1.0
    checkpoint: float = 1.0


def tornado(
    ends: Iterable[Ends],
    answer: Callable[[Knobs], Answer],
    *,
    stops: Stops | None,
    is_validated: bool = False,
) -> tuple[Swing, ...]:
    """Swing of every assumption from its 5th to its 95th percentile, the largest first.

    Failure rates are varied by a factor of 2 and prices by 10 %: their uncertainty is not measured.

    Parameters
    ----------
    ends
        By which factors each assumption about the step moves it.
    is_validated
        Whether the errors of the model come from a validation already.
    """
    varied = [(name, [Knobs(step=factor) for factor in factors]) for name, factors in ends]
    if stops is not None:
        factors = (1 / FAILURE_FACTOR, FAILURE_FACTOR)
        varied.append((Assumption.FAILURE_RATE, [Knobs(failures=f) for f in factors]))
    if stops is not None and stops.is_timed:
        times = [Knobs(checkpoint=f) for f in draws_ends(stops.write_s)]
        varied.append((Assumption.CHECKPOINT, times))
    shares = (1 - PRICE_SHARE, 1 + PRICE_SHARE)
    varied.append((Assumption.PRICES, [Knobs(price=s) for s in shares]))
    swings = [
        _swing(name, [answer(each) for each in knobs], remedy(name, is_validated=is_validated))
        for name, knobs in varied
    ]
    return tuple(sorted(swings, key=lambda swing: swing.low_cost - swing.high_cost))


def next_measurement(swings: tuple[Swing, ...]) -> str:
    """The measurement that bears on the largest swing for its minutes."""
    measurable = [swing for swing in swings if swing.minutes]
    best = max(
        measurable, key=lambda s: (s.high_cost - s.low_cost) / (s.minutes or 1), default=None
    )
    if best is None or best.high_cost == best.low_cost:
        return "none: no measurement moves this answer"
    return f"{best.measurement} (about {best.minutes:g} minutes; bears on {best.assumption})"


def _swing(name: Assumption, found: Sequence[Answer], narrows: Remedy | None) -> Swing:
    return Swing(
        assumption=name.value,
        low_cost=min(a.cost for a in found),
        high_cost=max(a.cost for a in found),
        low_elapsed_s=min(a.elapsed_s for a in found),
        high_elapsed_s=max(a.elapsed_s for a in found),
        measurement=narrows.measurement if narrows else "",
        minutes=narrows.minutes if narrows else None,
    )


def step_ends(step: StepPrediction) -> Iterator[Ends]:
    """Assumptions about the step, and by which factors each alone moves it."""
    terms = step.terms
    nominal = _nominal(terms)
    parts = {
        Assumption.COMPUTING: {name: getattr(terms, name) for name in _COMPUTE},
        Assumption.COMMUNICATION: {
            "all_reduce_s": terms.all_reduce_s,
            "broadcast_s": terms.broadcast_s,
        },
        Assumption.INTERFERENCE: {
            "compute_speed": terms.compute_speed,
            "comm_speed": terms.comm_speed,
        },
        Assumption.STRAGGLERS: {"slowest": terms.slowest},
    }
    for name, values in parts.items():
        alone = dataclasses.replace(nominal, **values)
        yield name, draws_ends(_times(step, alone))
    yield Assumption.MODEL, draws_ends(step.step_s / _times(step, terms))


def _times(step: StepPrediction, terms: Terms) -> Samples:
    return step_times(step.program, terms, terms.durations(step.program))


def draws_ends(draws: Samples) -> tuple[float, float]:
    """5th and 95th percentile over the nominal draw, the first; 1 is always inside."""
    low, high = np.quantile(draws, [0.05, 0.95]) / draws[0]
    return float(min(low, 1.0)), float(max(high, 1.0))


def _nominal(terms: Terms) -> Terms:
    """The same terms without uncertainty."""

    def still(draws: Samples) -> Samples:
        return np.broadcast_to(draws[..., :1], draws.shape)

    def stills(time_s: Price) -> Price:
        return lambda size_bytes: still(time_s(size_bytes))

    return dataclasses.replace(
        terms,
        compute_s={cause: still(draws) for cause, draws in terms.compute_s.items()},
        issue_s={cause: still(draws) for cause, draws in terms.issue_s.items()},
        bucket_s=still(terms.bucket_s),
        bucket_s_per_byte=still(terms.bucket_s_per_byte),
        all_reduce_s=stills(terms.all_reduce_s),
        broadcast_s=stills(terms.broadcast_s),
        load_s=still(terms.load_s),
        slowest=still(terms.slowest),
        compute_speed=still(terms.compute_speed),
        comm_speed=still(terms.comm_speed),
    )
