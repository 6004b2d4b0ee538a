"""Two times of which the larger decides, and a little more where they are close."""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.arrays import FloatArray

#: Two times of nothing take nothing. [s]
_NOTHING_S: Final = 1e-30


def soft_maximum(first: ArrayLike, second: ArrayLike, exponent: ArrayLike) -> FloatArray:
    """(a^k + b^k)^(1/k): a sum for k = 1, the maximum for large k (AdaptDL, OSDI'21); arrays broadcast."""
    larger, power = np.maximum(first, second), np.asarray(exponent)
    ratio = np.minimum(first, second) / np.maximum(larger, _NOTHING_S)
    return np.asarray(larger * (1 + ratio**power) ** (1 / power))
