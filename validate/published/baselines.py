"""Plain models that ours is judged against."""

import numpy as np
from scipy.optimize import least_squares

from perfmodel.arrays import FloatArray


def alpha_beta_ring(
    size: FloatArray, ranks: FloatArray, time_s: FloatArray, *, passes: float
) -> tuple[float, float]:
    """Latency and seconds per byte of a textbook ring, least squares on logarithms."""

    def residuals(p: FloatArray) -> FloatArray:
        return np.log(ring_s(size, ranks, (float(p[0]), float(p[1])), passes=passes) / time_s)

    found = least_squares(residuals, np.log([1e-5, 1e-10])).x
    return float(found[0]), float(found[1])


def ring_s(
    size: FloatArray, ranks: FloatArray, logs: tuple[float, float], *, passes: float
) -> FloatArray:
    """Time of a ring with these logarithms of latency and seconds per byte. [s]"""
    result: FloatArray = passes * (ranks - 1) * (np.exp(logs[0]) + size / ranks * np.exp(logs[1]))
    return result


def linear_scaling(
    batch: FloatArray, gpus: FloatArray, step_s: FloatArray, at: FloatArray
) -> FloatArray:
    """Steps take as long as on the fewest devices with the same batch."""
    fewest = gpus == gpus.min()
    order = np.argsort(batch[fewest])
    logs = np.interp(np.log(at), np.log(batch[fewest][order]), np.log(step_s[fewest][order]))
    steps_s: FloatArray = np.exp(logs)
    return steps_s


def usl(
    batch: FloatArray, gpus: FloatArray, step_s: FloatArray, at: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Universal scalability law: step = linear * (1 + s (n - 1) + k n (n - 1)).

    References
    ----------
    .. [1] N. J. Gunther, "Guerrilla Capacity Planning", Springer, 2007, chapter 4.
    """

    def slower(p: FloatArray, n: FloatArray) -> FloatArray:
        factor: FloatArray = np.log1p(np.exp(p[0]) * (n - 1) + np.exp(p[1]) * n * (n - 1))
        return factor

    ratio = np.log(step_s / linear_scaling(batch, gpus, step_s, batch))

    def residuals(p: FloatArray) -> FloatArray:
        return slower(p, gpus) - ratio

    p = least_squares(residuals, np.log([0.1, 1e-3])).x
    return linear_scaling(batch, gpus, step_s, at[0]) * np.exp(slower(p, at[1]))


def adaptdl(
    features: tuple[FloatArray, FloatArray, FloatArray],
    step_s: FloatArray,
    at: tuple[FloatArray, FloatArray, FloatArray],
) -> FloatArray:
    """Seven parameters: compute, synchronisation in a node and between nodes, and their overlap.

    ``features`` and ``at`` are batch, nodes, devices.

    References
    ----------
    .. [1] A. Qiao et al., "Pollux: Co-adaptive cluster scheduling for goodput-optimized deep
       learning", OSDI 2021, section 3.2.
    """

    def log_step(p: FloatArray, x: tuple[FloatArray, FloatArray, FloatArray]) -> FloatArray:
        batch, nodes, gpus = x
        a_c, b_c, a_r, b_r, a_n, b_n = np.exp(p[:6])
        gamma = 1 + 9 / (1 + np.exp(-p[6]))
        more = np.maximum(gpus - 2, 1e-8)
        sync = np.where(nodes > 1, a_n + b_n * more, a_r + b_r * more)
        sync = np.where(gpus > 1, sync, 1e-12)
        logs: FloatArray = (
            np.logaddexp(gamma * np.log(a_c + b_c * batch), gamma * np.log(sync)) / gamma
        )
        return logs

    scale = np.log(np.median(step_s))
    start = np.array([scale - 1, scale - 5, scale - 2, scale - 4, scale - 1, scale - 3, -1.0])

    def residuals(p: FloatArray) -> FloatArray:
        # Parameters that the data cannot tell stay where they are.
        return np.concatenate([log_step(p, features) - np.log(step_s), 1e-3 * (p - start)])

    found = least_squares(residuals, start, bounds=(-30, 10)).x
    return np.exp(log_step(found, at))
