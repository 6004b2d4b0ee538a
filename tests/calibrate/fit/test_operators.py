"""What a step adds to its operators is recovered; what cannot be known is assumed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.operators import (
    Timing,
    fit_operators,
    unit_costs,
)

NUM_STEPS = 12


def test_without_timings_there_are_no_prices() -> None:
    assert fit_operators([], workloads=(), rates=()) is None


@given(
    costs_s=st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-10), st.floats(1e-11, 1e-9)),
    seed=st.integers(0, 100),
)
def test_what_a_unit_of_work_costs_is_recovered(
    costs_s: tuple[float, float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    timings = [
        Timing(
            features=(0.0,),
            time_s=float(np.dot(units, costs_s)),
            flop=units[1],
            moved_bytes=units[2],
            units=units,
        )
        for units in ((1.0, *map(float, 10 ** rng.uniform(3, 9, 2))) for _ in range(30))
    ]
    assert unit_costs(timings) == pytest.approx(costs_s, rel=1e-3)
