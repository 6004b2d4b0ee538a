"""Draws of two machines beside each other."""

import zlib
from typing import Final

import numpy as np

from perfmodel.arrays import FloatArray

#: Ratio of throughputs above which something is faster; less is rounding, which differs by processor.
FASTER: Final = 1 + 1e-9


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
