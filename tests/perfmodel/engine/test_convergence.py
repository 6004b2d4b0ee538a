"""The law of the batch: by hand, recovered, and where it is all prior."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.batch import (
    TUNING_SPREAD,
    BatchPoint,
    CriticalBatch,
    fit_convergence,
    log_growth,
)

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


def test_a_noise_scale_and_one_run_tell_the_law() -> None:
    """Scale 100, 1,000 samples at batch 25: 800 at least, 800 (1 + 400 / 100) = 4,000 at 400."""
    told = CriticalBatch.of_noise_scale(100, relative_error=0.1)
    law = fit_convergence([BatchPoint(batch=25, samples=1000)], critical=told)
    assert law.critical_batch.nominal == pytest.approx(100, rel=0.05)
    assert law.samples(25).nominal == pytest.approx(1000, rel=0.02)
    large = law.samples(400)
    # the exponent is a nuisance: the median law is a little flatter than this one
    assert large.nominal == pytest.approx(4000, rel=0.15)
    assert large.p5 < 2600
    assert large.p95 > 6000


def test_runs_overrule_a_noise_scale_that_is_wrong() -> None:
    points = [BatchPoint(batch=b, samples=1000 * (1 + b / 500)) for b in (25, 100, 400, 1600)]
    told = CriticalBatch.of_noise_scale(100, relative_error=0.1)
    assert fit_convergence(points, critical=told).critical_batch.nominal == pytest.approx(
        500, rel=0.15
    )


def test_points_that_are_little_known_pull_little_and_leave_more_uncertainty() -> None:
    """Precisions 1 / 0.06^2 and 1 / (0.06^2 + 0.6^2), 101 : 1: the height is that of the first."""
    batches = (1, 2)  # far below the critical batch, where samples stay the same
    told = CriticalBatch(batch=1e6, log_error=0.1)
    sure, unsure = BatchPoint(batch=1, samples=1000), BatchPoint(batch=2, samples=3000)
    vague = BatchPoint(batch=2, samples=3000, log_error=0.6)
    equal, uneven = (
        fit_convergence([sure, other], critical=told).samples(batches[0])
        for other in (unsure, vague)
    )
    assert equal.nominal == pytest.approx(1000 * math.sqrt(3), rel=0.02)
    assert uneven.nominal == pytest.approx(1000 * 3 ** (1 / 102), rel=0.02)
    alone = fit_convergence([vague], critical=told).samples(2)
    assert math.log(alone.p95 / alone.p5) == pytest.approx(2 * 1.645 * 0.606, rel=0.05)
