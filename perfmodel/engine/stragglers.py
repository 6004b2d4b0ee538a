"""A synchronous step waits for the slowest rank."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from perfmodel import checks
from perfmodel.statistics import FloatArray

#: Beyond the sample the tail is continued through its upper part.
_TAIL_FRACTION = 0.1
#: Tails are exponential unless their values say otherwise: a shape counts from so many standard errors
#: on (one is 1 over the root of the values), and up to where a tail has hardly a variance. So a shape
#: needs more than 25 values in the tail.
_STANDARD_ERRORS = 2.0
_HEAVIEST_SHAPE = 0.4
#: Fewer values than this have no tail to continue.
_MINIMUM_FOR_TAIL = 4


def slowest_of_ranks(
    ratios: FloatArray | Sequence[float], *, world_size: int, probability: float = 0.5
) -> FloatArray:
    """Quantile over steps of the slowest of ``world_size`` ranks, over what is typical of one.

    The ranks' steps are independent draws from the measured ratios (step over typical step), so
    the quantile ``p`` of their maximum is the quantile ``p ** (1 / n)`` of one rank's distribution.
    Beyond the sample a tail continues it, exponential or heavier
    [David and Nagaraja, "Order Statistics", 3rd ed., 2003, section 2.1].

    ``ratios``: measured steps of one rank over the typical one, shape ``(..., num_ratios)``.

    Returns shape ``(...)``; 1 where nothing was measured, and never below 1 in the median or above.
    """
    checks.at_least("world_size", world_size, 1)
    values = np.asarray(ratios, dtype=float)
    if values.shape[-1] == 0 or (world_size == 1 and probability == 0.5):
        return np.ones(values.shape[:-1])
    return np.maximum(1.0, quantile_with_tail(values, probability ** (1 / world_size)))


def quantile_with_tail(values: FloatArray | Sequence[float], probability: float) -> FloatArray:
    """Empirical quantile over the last axis, beyond the sample that of an exponential or heavier tail."""
    ordered = np.sort(np.asarray(values, dtype=float), axis=-1)
    count = ordered.shape[-1]
    num_tail = max(2, math.ceil(count * _TAIL_FRACTION))
    threshold_probability = 1 - num_tail / count
    if count < _MINIMUM_FOR_TAIL or probability <= threshold_probability:
        return _between(ordered, probability)
    threshold = _between(ordered, threshold_probability)
    efolds = math.log((1 - threshold_probability) / (1 - probability))
    return np.asarray(threshold + _excess(ordered[..., -num_tail:] - threshold[..., None], efolds))


def _between(ordered: FloatArray, probability: float) -> FloatArray:
    """Quantile of values in order, by the line between the two that are nearest."""
    place = probability * (ordered.shape[-1] - 1)
    below, above = ordered[..., math.floor(place)], ordered[..., math.ceil(place)]
    return np.asarray(below + (place % 1) * (above - below))


def _excess(excesses: FloatArray, efolds: float) -> FloatArray:
    """Excess over a threshold that is exceeded again with a probability of ``exp(-efolds)``.

    Probability-weighted moments tell the shape of a generalised Pareto distribution, 0 for an
    exponential; the mean is kept [Hosking and Wallis, Technometrics 29(3):339-349, 1987].

    ``excesses``: ascending, shape ``(..., num_tail)``.
    """
    count = excesses.shape[-1]
    mean = excesses.mean(axis=-1)
    weighted = (excesses * (np.arange(count)[::-1] / (count - 1))).mean(axis=-1)
    spread = mean - 2 * weighted
    found = 2 - np.divide(mean, spread, out=np.full_like(mean, 2.0), where=spread > 0)
    heavy = np.minimum(found, _HEAVIEST_SHAPE)
    shape = np.where(heavy * math.sqrt(count) > _STANDARD_ERRORS, heavy, 0.0)
    growth = np.divide(
        np.expm1(shape * efolds), shape, out=np.full_like(shape, efolds), where=shape > 0
    )
    result: FloatArray = mean * (1 - shape) * growth
    return result


def expected_largest_deviate(world_size: int) -> float:
    """Expected largest of ``world_size`` standard normal deviates, by Blom's approximation of 1958."""
    if world_size == 1:
        return 0.0
    probability = (world_size - 0.375) / (world_size + 0.25)

    return NormalDist().inv_cdf(probability)


def slowest_pace(
    step_ratios: FloatArray,
    *,
    rank_spread: float,
    num_ranks: int,
    probability: float,
    num_draws: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Pace of the slowest of so many ranks over the typical one at a quantile of the steps, shape ``(num_draws,)``.

    The first draw is that of the measured ratios; the others resample them.

    ``step_ratios``: measured steps of single ranks over what is typical of their rank.
    ``rank_spread``: standard deviation of the logarithm of what stays with a rank.
    """
    persistent = math.exp(rank_spread * expected_largest_deviate(num_ranks))
    count = len(step_ratios)
    rows = np.tile(step_ratios, (num_draws, 1))
    if count > 1:
        rows[1:] = rng.choice(step_ratios, (num_draws, count))[1:]
    return persistent * slowest_of_ranks(rows, world_size=num_ranks, probability=probability)
