"""The law of the batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.plan.batch import TUNING_SPREAD, BatchPoint, fit_convergence, log_growth

BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def law(batch: float, *, critical: float, exponent: float = 1.0) -> float:
    """A million samples for a tiny batch."""
    return 1e6 * (1 + math.pow(batch / critical, exponent))


def test_a_batch_as_large_as_the_critical_one_needs_twice_the_samples() -> None:
    """1 + 1 = 2; at three times the critical batch, q = 1: 1 + 3 = 4."""
    at = np.array([0.0, math.log(3)])
    np.testing.assert_allclose(np.exp(log_growth(at, np.ones(2))), [2, 4])
    assert log_growth(np.array([1000.0]), np.ones(1)) == pytest.approx(1000)


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.3])
def test_known_parameters_come_back_from_exact_points(exponent: float) -> None:
    points = [
        BatchPoint(batch=b, samples=law(b, critical=1000, exponent=exponent)) for b in BATCHES
    ]
    fit = fit_convergence(points)
    critical = fit.critical_batch
    assert critical.p5 < 1000 < critical.p95
    assert critical.nominal == pytest.approx(1000, rel=0.25)
    assert fit.samples(16_384).nominal == pytest.approx(
        law(16_384, critical=1000, exponent=exponent), rel=0.12
    )


def test_larger_batches_of_noisy_tasks_lie_inside_the_intervals() -> None:
    """300 tasks of 4 fitted points with 6 % of scatter: 90 % intervals hold the next point."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        critical = 1024 * math.exp(rng.normal())
        exponent = rng.choice([0.6, 0.8, 1.0, 1.3])
        noisy = [
            law(b, critical=critical, exponent=exponent) * math.exp(TUNING_SPREAD * rng.normal())
            for b in (128, 256, 512, 1024, 2048)
        ]
        points = [
            BatchPoint(batch=b, samples=s)
            for b, s in zip((128, 256, 512, 1024), noisy, strict=False)
        ]
        predicted = fit_convergence(points).samples(2048)
        covered += predicted.p5 <= noisy[-1] <= predicted.p95
    assert 0.85 <= covered / 300 <= 0.95


@given(
    samples=st.lists(st.floats(1e3, 1e9), min_size=2, max_size=6),
    first=st.floats(1, 1e4),
    batch=st.floats(1, 1e6),
)
def test_a_larger_batch_never_needs_fewer_samples_nor_more_steps_than_in_proportion(
    samples: list[float], first: float, batch: float
) -> None:
    """Whatever the points: steps fall by at most the ratio of the batches, for exponents up to 1."""
    points = [BatchPoint(batch=first * 2**i, samples=s) for i, s in enumerate(samples)]
    fit = fit_convergence(points)
    ratio = fit.samples_ratio(2 * batch, reference=batch)
    assert 1 <= ratio.p5 <= ratio.nominal <= ratio.p95 <= 2**1.3 * (1 + 1e-9)


@pytest.mark.parametrize("batches", [[], [64], [64, 64]])
def test_fewer_than_two_batches_tell_nothing(batches: list[int]) -> None:
    with pytest.raises(ValueError, match="at least two different batches"):
        fit_convergence([BatchPoint(batch=batch, samples=1.0) for batch in batches])
