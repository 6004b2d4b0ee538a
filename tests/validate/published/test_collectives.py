"""Scatter of published timings: a log that rises has none, one that jumps has its jumps."""

import numpy as np
import pytest

from validate.published.collectives import log_scatter


def test_a_log_that_rises_has_no_scatter() -> None:
    rows = [(2.0**k, n, 1, 1e-5 * n * (1 + 2.0**k / 1e4)) for k in range(20) for n in (2, 4)]
    assert log_scatter(rows) == pytest.approx(0.0, abs=1e-12)


def test_a_pair_that_falls_by_a_factor_lies_half_of_it_on_either_side() -> None:
    """Of 4 timings two trade places by a factor of 4: log 2 for each of them, mean over all four."""
    rows = [(1.0, 2, 1, 1.0), (2.0, 2, 1, 8.0), (4.0, 2, 1, 2.0), (8.0, 2, 1, 16.0)]
    assert log_scatter(rows) == pytest.approx(np.log(2) / np.sqrt(2))
