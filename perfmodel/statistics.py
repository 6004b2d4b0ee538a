"""Quantities with their uncertainty: intervals, distributions, draws of two machines, the slowest of many ranks."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Annotated, Final, Self, TypeAlias

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import check_at_least

# Types: numpy arrays, whose shapes and units stand where a value is described, and numbers within bounds.
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]

#: Two times of nothing take nothing. [s]
_NOTHING_S: Final = 1e-30


def soft_maximum(first: ArrayLike, second: ArrayLike, exponent: ArrayLike) -> FloatArray:
    """(a^k + b^k)^(1/k): a sum for k = 1, the maximum for large k (AdaptDL, OSDI'21); arrays broadcast."""
    larger, power = np.maximum(first, second), np.asarray(exponent)
    ratio = np.minimum(first, second) / np.maximum(larger, _NOTHING_S)
    return np.asarray(larger * (1 + ratio**power) ** (1 / power))


Positive: TypeAlias = Annotated[float, Gt(0)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Count: TypeAlias = Annotated[int, Gt(0)]


#: Standard deviations to either side that hold the middle 90 %.
DEVIATE_90: Final = 1.6448536269514715
#: Deviate of Student's distribution with four degrees of freedom that 5 % exceed: tails of errors are heavy.
HEAVY_TAILED_90: Final = 2.132
#: Standard error of the median of many values over that of their mean.
MEDIAN_OVER_MEAN: Final = math.sqrt(math.pi / 2)
#: Ratio of throughputs above which something is faster; less is rounding, which differs by processor.
FASTER: Final = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A quantity and its uncertainty: 90 % of outcomes should lie between p5 and p95."""

    p5: float
    nominal: float
    """At the fitted values; the median of a quantity that is only known by its draws."""
    p95: float

    def __post_init__(self) -> None:
        """Refuse what is not in order."""
        if not self.p5 <= self.nominal <= self.p95:
            raise ValueError(
                f"p5 <= nominal <= p95 must hold, got {self.p5}, {self.nominal}, {self.p95}"
            )

    @classmethod
    def of(cls, draws: FloatArray, *, nominal: float | None = None) -> Self:
        """The middle 90 % of draws around their median, or around a nominal value, always inside."""
        # What numpy.quantile does, without the masked arrays that it imports.
        places = np.array([0.05, 0.5, 0.95]) * (len(draws) - 1)
        p5, median, p95 = np.interp(places, np.arange(len(draws)), np.sort(draws)).tolist()
        nominal = median if nominal is None else nominal
        return cls(min(p5, nominal), nominal, max(p95, nominal))

    def __mul__(self, factor: float) -> "Interval":
        return Interval(self.p5 * factor, self.nominal * factor, self.p95 * factor)

    def __truediv__(self, divisor: float) -> "Interval":
        return self * (1 / divisor)

    def __rtruediv__(self, dividend: float) -> "Interval":
        return Interval(dividend / self.p95, dividend / self.nominal, dividend / self.p5)

    def __neg__(self) -> "Interval":
        return Interval(-self.p95, -self.nominal, -self.p5)

    def holds(self, measured: float) -> bool:
        """Whether a value lies inside, ends included."""
        return self.p5 <= measured <= self.p95

    def signed_error(self, measured: float) -> float:
        """Predicted over measured, minus 1."""
        return self.nominal / measured - 1


#: Up to this number, values take less time one by one than SciPy takes to be imported.
_FEW: Final = 2**14


def normal_cdf(deviates: ArrayLike) -> FloatArray:
    """Probability that a standard normal variable is at most so large."""
    values = np.asarray(deviates, dtype=np.float64)
    if values.size > _FEW:
        from scipy.special import ndtr  # noqa: PLC0415 - see above

        return np.asarray(ndtr(values))
    tails = map(math.erfc, (values * -math.sqrt(0.5)).ravel().tolist())
    return 0.5 * np.fromiter(tails, np.float64, values.size).reshape(values.shape)


def heavy_tailed_quantiles(probabilities: FloatArray) -> FloatArray:
    """Quantiles of Student's distribution with four degrees of freedom, in closed form [Shaw 2006].

    t = sign(p - 1/2) 2 sqrt(cos(arccos(sqrt(a)) / 3) / sqrt(a) - 1),  a = 4 p (1 - p)
    """
    root = np.sqrt(4 * probabilities * (1 - probabilities))
    size = 2 * np.sqrt(np.maximum(np.cos(np.arccos(root) / 3) / root - 1, 0.0))
    return np.asarray(np.sign(probabilities - 0.5) * size)


def unpaired(first: FloatArray, other: FloatArray, *, seed: str) -> tuple[FloatArray, FloatArray]:
    """As many draws of both sides, the nominal first, those of the second in random order.

    The generator gives the parameters of any machine the same random numbers, by their names. That
    pairs the errors of one machine with themselves; the errors of two machines have nothing to do
    with each other.

    ``first``, ``other``: Shape ``(num_draws,)``, the nominal one at 0; their lengths may differ.
    ``seed``: Any text; the same order for the same text.
    """
    count = min(len(first), len(other))
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return first[:count], np.concatenate([other[:1], rng.permutation(other[1:])])[:count]


# A synchronous step waits for the slowest rank.

#: Beyond the sample the tail is continued through its upper part.
_TAIL_FRACTION = 0.1
#: Tails are exponential unless their values say otherwise: a shape counts from this number of standard errors
#: on (one is 1 over the root of the values), and up to where a tail has hardly a variance. So a shape
#: needs more than 25 values in the tail.
_STANDARD_ERRORS = 2.0
_HEAVIEST_SHAPE = 0.4
#: Fewer values than this have no tail to continue.
_MINIMUM_FOR_TAIL = 4


def slowest_of_ranks(ratios: FloatArray | Sequence[float], *, world_size: int) -> FloatArray:
    """Median over steps of the slowest of ``world_size`` ranks, over what is typical of one.

    The ranks' steps are independent draws from the measured ratios (step over typical step), so
    the median of their maximum is the quantile ``(1 / 2) ** (1 / n)`` of one rank's distribution.
    Beyond the sample a tail continues it, exponential or heavier
    [David and Nagaraja, "Order Statistics", 3rd ed., 2003, section 2.1].

    ``ratios``: measured steps of one rank over the typical one, shape ``(..., num_ratios)``.

    Returns shape ``(...)``; 1 where nothing was measured, and never below 1.
    """
    check_at_least("world_size", world_size, 1)
    values = np.asarray(ratios, dtype=float)
    if values.shape[-1] == 0 or world_size == 1:
        return np.ones(values.shape[:-1])
    return np.maximum(1.0, quantile_with_tail(values, 0.5 ** (1 / world_size)))


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
    return np.asarray(mean * (1 - shape) * growth)


def expected_largest_deviate(world_size: int) -> float:
    """Expected largest of ``world_size`` standard normal deviates."""
    return _expected_deviate(world_size, world_size)


def expected_largest_over_median(count: int) -> float:
    """Expected largest of ``count`` standard normal deviates, less the lower of the middle two (``median_low``)."""
    return expected_largest_deviate(count) - _expected_deviate((count + 1) // 2, count)


def _expected_deviate(place: int, count: int) -> float:
    """Expected deviate at a place, 1 the smallest, of ``count`` normal ones, by Blom's approximation of 1958."""
    if 2 * place == count + 1:
        return 0.0
    return NormalDist().inv_cdf((place - 0.375) / (count + 0.25))


def slowest_pace(
    step_ratios: FloatArray,
    *,
    rank_spread: float,
    num_ranks: int,
    num_draws: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Pace of the slowest of ``num_ranks`` ranks over the typical one in the median step, shape ``(num_draws,)``.

    The first draw is that of the measured ratios; the others resample them.

    ``step_ratios``: measured steps of single ranks over what is typical of their rank.
    ``rank_spread``: standard deviation of the logarithm of what stays with a rank.
    """
    persistent = math.exp(rank_spread * expected_largest_deviate(num_ranks))
    count = len(step_ratios)
    rows = np.tile(step_ratios, (num_draws, 1))
    if count > 1:
        rows[1:] = rng.choice(step_ratios, (num_draws, count))[1:]
    return persistent * slowest_of_ranks(rows, world_size=num_ranks)


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A smooth function through noisy points; far from them it returns to their mean."""

    inputs: FloatArray
    """Shape ``(num_points, num_features)``."""
    targets: FloatArray
    """Shape ``(num_points,)``."""
    lengths: FloatArray
    """How far apart points are that still tell about each other, by feature."""
    spread: float
    """Standard deviation of the function around its mean."""
    noise: float
    """Standard deviation of the targets around the function."""

    @cached_property
    def _solved(self) -> tuple[FloatArray, FloatArray, float]:
        """Inverse of the covariance's Cholesky factor, weights of the points, mean.

        With numpy alone: scipy takes longer to import than this takes to run.
        """
        count = len(self.targets)
        own = covariance(self.inputs, self.inputs, self.lengths, self.spread)
        inverse = np.linalg.inv(np.linalg.cholesky(own + self.noise**2 * np.eye(count)))
        ones = inverse @ np.ones(count)
        mean = float(ones @ (inverse @ self.targets) / (ones @ ones))
        weights: FloatArray = inverse.T @ (inverse @ (self.targets - mean))
        return inverse, weights, mean

    def predict(self, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the function at points of shape ``(n, num_features)``."""
        inverse, weights, mean = self._solved
        cross = covariance(inputs, self.inputs, self.lengths, self.spread)
        explained = np.sum((cross @ inverse.T) ** 2, axis=1)
        variance = np.maximum(self.spread**2 - explained, 0.0)
        return mean + cross @ weights, np.sqrt(variance)


def covariance(
    first: FloatArray, second: FloatArray, lengths: FloatArray, spread: float
) -> FloatArray:
    """Matern 3/2: shape ``(len(first), len(second))``."""
    # One feature after another: a table for all of them at once is slow to add up.
    squares = sum(
        np.subtract.outer(one, other) ** 2
        for one, other in zip((first / lengths).T, (second / lengths).T, strict=True)
    )
    distance = math.sqrt(3) * np.sqrt(squares)
    return np.asarray(spread**2 * (1 + distance) * np.exp(-distance))
