"""Quantities with their uncertainty: intervals, the normal distribution, draws of two machines."""

import math
import zlib
from dataclasses import dataclass
from typing import Annotated, Final, Self, TypeAlias

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import ArrayLike, NDArray

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


#: So many values take less time one by one than SciPy takes to be imported.
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
    quantiles: FloatArray = np.sign(probabilities - 0.5) * size
    return quantiles


def unpaired(first: FloatArray, other: FloatArray, *, seed: str) -> tuple[FloatArray, FloatArray]:
    """As many draws of both sides, the nominal first, those of the second in random order.

    The generator gives the parameters of any machine the same random numbers, by their names. That
    pairs the errors of one machine with themselves; the errors of two machines have nothing to do
    with each other.

    Parameters
    ----------
    first, other
        Shape ``(num_draws,)``, the nominal one at 0; their lengths may differ.
    seed
        Any text; the same order for the same text.
    """
    count = min(len(first), len(other))
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return first[:count], np.concatenate([other[:1], rng.permutation(other[1:])])[:count]
