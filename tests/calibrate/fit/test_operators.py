"""What a step adds to its operators is recovered; what cannot be known is assumed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.operators import (
    _per_call,
    _Timing,
    cold_host_s,
    fit_operators,
    middle_s,
    unit_costs,
)
from perfmodel.documents.observation import IsolatedOperator, OperatorsObservation
from perfmodel.workload.operator import Phase
from tests.perfmodel.operators import operator, spec


@given(
    overhead_s=st.floats(1e-6, 1e-4),
    sums=st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(10, 1000)), min_size=2, max_size=6),
)
def test_the_overhead_per_call_is_recovered(
    overhead_s: float, sums: list[tuple[float, int]]
) -> None:
    rows = [(sum_s + overhead_s * calls, sum_s, calls) for sum_s, calls in sums]
    found, error = _per_call(rows)
    assert found == pytest.approx(overhead_s, rel=1e-6)
    assert error == pytest.approx(0.02)


def test_sums_above_the_real_step_have_no_negative_overhead() -> None:
    overhead_s, error = _per_call([(1.0, 1.2, 100), (2.0, 2.4, 50)])
    assert overhead_s == 0.0
    assert error == pytest.approx(0.182, abs=0.001)


def test_hot_and_cold_meet_in_their_geometric_mean() -> None:
    assert middle_s((1e-3,), (4e-3,), host_s=0.0) == pytest.approx(2e-3)
    # 3 ms of the cold call are the interpreter's: hot and cold are the same.
    assert middle_s((1e-3,), (4e-3,), host_s=3e-3) == pytest.approx(1e-3)


def test_what_a_cold_view_costs_is_the_host() -> None:
    view = operator("aten.t.default", (spec(4, 4),), (spec(4, 4),), view=True)
    timed = IsolatedOperator(operator=view, phase=Phase.FORWARD, hot_s=(2e-6,), cold_s=(9e-6,))
    seen = OperatorsObservation(
        task="t", round=0, operators=(timed,), optimizers=(), speed_probe_s=(1e-3,)
    )
    assert cold_host_s([seen]) == pytest.approx(7e-6)
    assert cold_host_s([]) == 0.0


def test_without_timings_there_are_no_prices() -> None:
    assert fit_operators([], workloads=(), rates=(), speed_probe_s=1e-3) is None


@given(
    costs_s=st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-10), st.floats(1e-11, 1e-9)),
    seed=st.integers(0, 100),
)
def test_what_a_unit_of_work_costs_is_recovered(
    costs_s: tuple[float, float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    timings = [
        _Timing(
            features=(0.0,),
            time_s=float(np.dot(units, costs_s)),
            flop=units[1],
            moved_bytes=units[2],
            units=units,
        )
        for units in ((1.0, *map(float, 10 ** rng.uniform(3, 9, 2))) for _ in range(30))
    ]
    assert unit_costs(timings) == pytest.approx(costs_s, rel=1e-3)
