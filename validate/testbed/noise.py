"""Draw how the pace of emulated devices varies."""

import numpy as np

from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import Noise

#: Tail index of the slow steps: the variance is barely finite.
_PARETO_SHAPE = 2.5


def draw_factors(noise: Noise, *, num_ranks: int, num_steps: int) -> FloatArray:
    """Pace of each device in each step, shape ``(num_ranks, num_steps)``; the seed decides."""
    rng = np.random.default_rng([noise.seed, num_ranks])
    factors = np.ones((num_ranks, num_steps))
    if noise.kind == "lognormal":
        factors *= np.exp(noise.spread * rng.standard_normal(factors.shape))
    elif noise.kind == "pareto":
        is_slow = rng.random(factors.shape) < noise.slow_share
        # Lomax: shape * scale / (shape - 1) - ... has mean ``scale / (shape - 1)``.
        excess = noise.spread * (_PARETO_SHAPE - 1) * rng.pareto(_PARETO_SHAPE, factors.shape)
        factors += is_slow * excess
    factors *= np.exp(noise.rank_spread * rng.standard_normal((num_ranks, 1)))
    for rank, factor in noise.slow_ranks:
        factors[rank] *= factor
    return factors
