"""Types: numpy arrays, whose shapes and units stand where a value is described, and numbers within bounds."""

from typing import Annotated, Final, TypeAlias

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import ArrayLike, NDArray

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
