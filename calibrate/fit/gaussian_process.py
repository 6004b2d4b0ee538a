"""How far a family's curve reaches and how rough it is: by likelihood, held by broad priors.

References
----------
.. [1] C. E. Rasmussen, C. K. I. Williams, "Gaussian Processes for Machine Learning",
   MIT Press, 2006: equations 5.8 and 5.9.
"""

import math

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from perfmodel.arrays import FloatArray
from perfmodel.cost.gaussian_process import GaussianProcess

#: Prior of the fit: lengths in e-folds of a size, spreads in log of a time.
TYPICAL_LENGTH = 2.5
TYPICAL_SPREAD = 0.5
TYPICAL_NOISE = 0.08
_PRIOR_WIDTH = (0.7, 0.7, 0.7)


def fit_gaussian_process(inputs: FloatArray, targets: FloatArray) -> GaussianProcess:
    """The process of highest posterior density: marginal likelihood times broad priors."""
    num_features = inputs.shape[1]
    typical = np.log([*(TYPICAL_LENGTH,) * num_features, TYPICAL_SPREAD, TYPICAL_NOISE])
    width = np.array([*(_PRIOR_WIDTH[0],) * num_features, *_PRIOR_WIDTH[1:]])

    def loss(logs: FloatArray) -> tuple[float, FloatArray]:
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
    inputs: FloatArray, targets: FloatArray, parameters: FloatArray
) -> tuple[float, FloatArray]:
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
