"""Scatter of published timings: a log that rises has none, one that jumps has its jumps."""

import numpy as np
import pytest

from validate.published.collectives import Row, log_scatter, scatter


def test_a_log_that_rises_has_no_scatter() -> None:
    rows = [Row(2.0**k, n, 1, 1e-5 * n * (1 + 2.0**k / 1e4)) for k in range(20) for n in (2, 4)]
    assert log_scatter(rows) == pytest.approx(0.0, abs=1e-12)


def test_a_pair_that_falls_by_a_factor_lies_half_of_it_on_either_side() -> None:
    """Of 4 timings two trade places by a factor of 4: log 2 for each of them, mean over all four."""
    rows = [
        Row(size, 2, 1, time_s)
        for size, time_s in ((1.0, 1.0), (2.0, 8.0), (4.0, 2.0), (8.0, 16.0))
    ]
    assert log_scatter(rows) == pytest.approx(np.log(2) / np.sqrt(2))


def test_repeats_and_timings_in_place_say_what_no_model_can_beat() -> None:
    """Three repeats of 1, 4 and 16 s: the others' geometric means are 8, 4 and 2."""
    rows = [Row(1.0, 8, 1, time_s, in_place_s=2 * time_s) for time_s in (1.0, 4.0, 16.0)]
    found = scatter(rows)
    assert found["the other repeats"] == pytest.approx([8.0, 4.0, 2.0])
    assert found["timed in place"] == pytest.approx([2.0, 8.0, 32.0])
    assert scatter([Row(1.0, 8, 1, 1.0)]) == {}
