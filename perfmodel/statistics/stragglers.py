"""A synchronous step waits for the slowest rank."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

#: Beyond the sample the tail is continued as an exponential through its upper part.
_TAIL_FRACTION = 0.1
#: Fewer values than this have no tail to continue.
_MINIMUM_FOR_TAIL = 4


def slowest_of_ranks(
    ratios: NDArray[np.float64] | Sequence[float], *, world_size: int, probability: float = 0.5
) -> NDArray[np.float64]:
    """Quantile over steps of the slowest of ``world_size`` ranks, over the median of one rank.

    The ranks' steps are independent draws from the measured ratios (step over median step), so
    the quantile ``p`` of their maximum is the quantile ``p ** (1 / n)`` of one rank's distribution.
    Beyond the sample an exponential tail continues it.

    Parameters
    ----------
    ratios
        Measured steps of one rank over their median, shape ``(..., num_ratios)``.

    Returns
    -------
    NDArray
        Shape ``(...)``; 1 where nothing was measured, and never below 1 in the median or above.

    References
    ----------
    .. [1] H. A. David, H. N. Nagaraja, "Order Statistics", 3rd ed., 2003, section 2.1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    values = np.asarray(ratios, dtype=float)
    if values.shape[-1] == 0 or (world_size == 1 and probability == 0.5):
        return np.ones(values.shape[:-1])
    return np.maximum(1.0, quantile_with_tail(values, probability ** (1 / world_size)))


def quantile_with_tail(
    values: NDArray[np.float64] | Sequence[float], probability: float
) -> NDArray[np.float64]:
    """Empirical quantile over the last axis, continued by an exponential tail beyond the sample."""
    ordered = np.sort(np.asarray(values, dtype=float), axis=-1)
    count = ordered.shape[-1]
    num_tail = max(2, math.ceil(count * _TAIL_FRACTION))
    threshold_probability = 1 - num_tail / count
    if count < _MINIMUM_FOR_TAIL or probability <= threshold_probability:
        return np.asarray(np.quantile(ordered, probability, axis=-1))
    threshold = np.quantile(ordered, threshold_probability, axis=-1)
    mean_excess = ordered[..., -num_tail:].mean(axis=-1) - threshold
    efolds = math.log((1 - threshold_probability) / (1 - probability))
    return np.asarray(threshold + mean_excess * efolds)


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
