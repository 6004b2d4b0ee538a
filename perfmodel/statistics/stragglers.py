"""A synchronous step waits for the slowest rank."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

#: Beyond the sample the tail is continued as an exponential through its upper part.
_TAIL_FRACTION = 0.1


def median_of_slowest(ratios: Sequence[float], *, world_size: int) -> float:
    """Median over steps of the slowest of ``world_size`` ranks, over the median of one rank.

    The ranks' steps are independent draws from the measured ratios (step over median step), so
    the median of their maximum is the quantile ``0.5 ** (1 / n)`` of one rank's distribution.
    Beyond the sample an exponential tail continues it.

    Parameters
    ----------
    ratios
        Measured steps of one rank over their median.

    References
    ----------
    .. [1] H. A. David, H. N. Nagaraja, "Order Statistics", 3rd ed., 2003, section 2.1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if world_size == 1 or len(ratios) == 0:
        return 1.0
    return max(1.0, quantile_with_tail(ratios, 0.5 ** (1 / world_size)))


def quantile_with_tail(values: Sequence[float], probability: float) -> float:
    """Empirical quantile, continued by an exponential tail beyond the sample."""
    ordered = np.sort(np.asarray(values, dtype=float))
    num_tail = max(2, math.ceil(len(ordered) * _TAIL_FRACTION))
    threshold_probability = 1 - num_tail / len(ordered)
    if len(ordered) < 4 or probability <= threshold_probability:
        return float(np.quantile(ordered, probability))
    threshold = float(np.quantile(ordered, threshold_probability))
    mean_excess = float(np.mean(ordered[-num_tail:]) - threshold)
    return threshold + mean_excess * math.log((1 - threshold_probability) / (1 - probability))


def expected_largest_deviate(world_size: int) -> float:
    """Expected largest of ``world_size`` standard normal deviates, by Blom's approximation.

    References
    ----------
    .. [1] G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    if world_size == 1:
        return 0.0
    probability = (world_size - 0.375) / (world_size + 0.25)

    return NormalDist().inv_cdf(probability)
