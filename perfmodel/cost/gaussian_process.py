"""Gaussian process regression with one length per feature; small, exact, repeatable.

References
----------
.. [1] C. E. Rasmussen, C. K. I. Williams, "Gaussian Processes for Machine Learning",
   MIT Press, 2006: algorithm 2.1, equations 5.8 and 5.9; the kernel is Matern 3/2 (4.17).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

Array = NDArray[np.float64]

#: Prior of the fit: lengths in e-folds of a size, spreads in log of a time.
_TYPICAL = (2.5, 0.5, 0.08)
_PRIOR_WIDTH = (0.7, 0.7, 0.7)


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A smooth function through noisy points; far from them it returns to their mean."""

    inputs: Array
    """Shape ``(num_points, num_features)``."""
    targets: Array
    """Shape ``(num_points,)``."""
    lengths: Array
    """How far apart points are that still tell about each other, by feature."""
    spread: float
    """Standard deviation of the function around its mean."""
    noise: float
    """Standard deviation of the targets around the function."""

    @cached_property
    def _solved(self) -> tuple[tuple[Array, bool], Array, float]:
        factor = cho_factor(
            _covariance(self.inputs, self.inputs, self.lengths, self.spread)
            + self.noise**2 * np.eye(len(self.targets)),
            lower=True,
        )
        ones = np.ones(len(self.targets))
        solved_ones = cho_solve(factor, ones)
        mean = float(solved_ones @ self.targets / (solved_ones @ ones))
        weights: Array = cho_solve(factor, self.targets - mean)
        return factor, weights, mean

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the function at points of shape ``(n, num_features)``."""
        factor, weights, mean = self._solved
        cross = _covariance(inputs, self.inputs, self.lengths, self.spread)
        explained = np.sum(cross * cho_solve(factor, cross.T).T, axis=1)
        variance = np.maximum(self.spread**2 - explained, 0.0)
        return mean + cross @ weights, np.sqrt(variance)


def _covariance(first: Array, second: Array, lengths: Array, spread: float) -> Array:
    scaled = (first[:, None, :] - second[None, :, :]) / lengths
    distance = math.sqrt(3) * np.sqrt(np.sum(scaled**2, axis=2))
    result: Array = spread**2 * (1 + distance) * np.exp(-distance)
    return result


def fit_gaussian_process(inputs: Array, targets: Array) -> GaussianProcess:
    """The process of highest posterior density: marginal likelihood times broad priors."""
    num_features = inputs.shape[1]
    typical = np.log([*(_TYPICAL[0],) * num_features, *_TYPICAL[1:]])
    width = np.array([*(_PRIOR_WIDTH[0],) * num_features, *_PRIOR_WIDTH[1:]])

    def loss(logs: Array) -> tuple[float, Array]:
        value, gradient = _negative_log_likelihood(inputs, targets, np.exp(logs))
        deviation = (logs - typical) / width
        return value + 0.5 * float(deviation @ deviation), gradient + deviation / width

    bounds = [(low - 3, low + 3) for low in typical]
    found = minimize(
        loss, typical, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}
    )
    best = np.exp(found.x)
    return GaussianProcess(
        inputs=inputs,
        targets=targets,
        lengths=best[:num_features],
        spread=float(best[-2]),
        noise=float(best[-1]),
    )


def _negative_log_likelihood(
    inputs: Array, targets: Array, parameters: Array
) -> tuple[float, Array]:
    """Value and gradient in the logarithms of lengths, spread and noise."""
    lengths, spread, noise = parameters[:-2], parameters[-2], parameters[-1]
    scaled = (inputs[:, None, :] - inputs[None, :, :]) / lengths
    squares = scaled**2
    distance = math.sqrt(3) * np.sqrt(np.sum(squares, axis=2))
    decay = np.exp(-distance)
    kernel = spread**2 * (1 + distance) * decay
    count = len(targets)
    factor = cho_factor(kernel + (noise**2 + 1e-9) * np.eye(count), lower=True)
    residual = targets - targets.mean()
    weights = cho_solve(factor, residual)
    value = 0.5 * float(residual @ weights) + float(np.sum(np.log(np.diag(factor[0]))))
    inner = cho_solve(factor, np.eye(count)) - np.outer(weights, weights)
    # d kernel / d log length = 3 spread^2 exp(-distance) * squared scaled difference.
    slopes = np.einsum("ij,ijk->k", inner * decay, squares) * 1.5 * spread**2
    gradient = np.array([*slopes, np.sum(inner * kernel), noise**2 * np.trace(inner)])
    return value, gradient
