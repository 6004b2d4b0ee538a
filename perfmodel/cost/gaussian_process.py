"""Gaussian process regression with one length per feature; small, exact, repeatable.

References
----------
.. [1] C. E. Rasmussen, C. K. I. Williams, "Gaussian Processes for Machine Learning",
   MIT Press, 2006: algorithm 2.1, the kernel is Matern 3/2 (4.17).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfmodel.arrays import FloatArray


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
    result: FloatArray = spread**2 * (1 + distance) * np.exp(-distance)
    return result
