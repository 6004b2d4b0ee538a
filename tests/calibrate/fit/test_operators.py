"""What a step adds to its operators is recovered; what cannot be known is assumed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.operators import (
    KernelCosts,
    Timing,
    convolved_alike,
    fit_family,
    fit_operators,
    unit_costs,
)
from perfmodel.cost.operators import work_s
from perfmodel.documents.observation import OperatorsObservation
from tests.perfmodel.operators import observation

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


def kernel(size_bytes: float, *, flop: float = 0.0) -> Timing:
    """A kernel of a GPU that starts in 2 us, moves 1 TB/s and multiplies at 10 TFLOP/s."""
    return Timing(
        features=(float(np.log(size_bytes)),),
        time_s=2e-6 + size_bytes / 1e12 + flop / 1e13,
        flop=flop,
        moved_bytes=size_bytes,
        units=(1.0, flop, size_bytes, 0.0, 0.0, 0.0),
    )


def test_a_family_with_one_point_on_a_gpu_starts_as_fast_as_any_kernel() -> None:
    """One dropout of 1 ms must not make a small one as slow: that made a perceptron 3.6 times too slow."""
    points = {"pointwise": [kernel(1e3), kernel(1e9)], "native_dropout": [kernel(1e9)]}
    kernels = KernelCosts.seen(points)
    assert kernels is not None
    assert kernels.start_s == pytest.approx(2e-6, rel=0.01)
    alone, informed = (
        fit_family("native_dropout", points["native_dropout"], kernels=each)
        for each in (None, kernels)
    )
    assert alone.least_s > 1e-3
    small = work_s((1.0, 0.0, 1e6), informed.unit_s, least_s=informed.least_s)
    assert small == pytest.approx(kernel(1e6).time_s, rel=0.35)
    large = work_s((1.0, 0.0, 1e9), informed.unit_s, least_s=informed.least_s)
    assert large == pytest.approx(kernel(1e9).time_s, rel=0.01)


def test_a_gpu_convolves_few_samples_as_it_does_many() -> None:
    """Which way a CPU takes is no family of a GPU: the few points of one would stand alone."""
    few, many, other = kernel(1e3), kernel(1e6), kernel(1e9)
    found = convolved_alike(
        {"convolution patches": [few], "convolution dense": [many], "pointwise": [other]}
    )
    assert found["convolution patches"] == found["convolution dense"] == [many, few]
    assert found["pointwise"] == [other]


def drawn(seed: int, *, factor: float) -> OperatorsObservation:
    """A drawn model whose operators take longer than the law of the machine says."""
    entry = observation(seed)
    operators = tuple(
        one.model_copy(update={"times_s": tuple(factor * time_s for time_s in one.times_s)})
        for one in entry.operators
    )
    return entry.model_copy(update={"model": f"model {seed}", "operators": operators})


@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_the_error_of_curves_is_that_of_models_left_out(scatter: float) -> None:
    """What all operators of a model share is no property of any curve."""
    rng = np.random.default_rng(5)
    models = [drawn(seed, factor=float(np.exp(rng.normal(0, scatter)))) for seed in range(12)]
    found = fit_operators([observation(99), *models], workloads=(), rates=())
    assert found is not None
    assert found.curve_log_error == pytest.approx(max(scatter, 0.02), rel=0.5)
