"""The law of the batch, and the noise scale of gradients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.convergence import (
    TUNING_SPREAD,
    BatchPoint,
    CriticalBatch,
    GradientNorms,
    fit_convergence,
    log_growth,
    noise_scale,
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


def test_a_noise_scale_is_a_critical_batch_with_the_error_of_its_law() -> None:
    """0.24 of its own and 0.7 of the law: 0.74."""
    found = CriticalBatch.of_noise_scale(500.0, relative_error=0.24)
    assert found.batch == 500.0
    assert found.log_error == pytest.approx(0.74)


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


def measured(
    rng: np.random.Generator, *, ranks: int, local_batch: int, noise: float
) -> GradientNorms:
    """Gradients of 200 parameters, |G|^2 = 1, trace of the covariance of one sample = noise."""
    size = 200
    true = np.full(size, 1 / math.sqrt(size))
    scatter = math.sqrt(noise / size / local_batch)
    gradients = true + scatter * rng.standard_normal((ranks, size))
    return GradientNorms(
        ranks=ranks,
        local_batch=local_batch,
        mean_square=float((gradients**2).sum(axis=1).mean()),
        square_of_mean=float((gradients.mean(axis=0) ** 2).sum()),
    )


@pytest.mark.parametrize(("ranks", "local_batch"), [(2, 8), (8, 2), (4, 64)])
def test_a_known_noise_scale_comes_back(ranks: int, local_batch: int) -> None:
    rng = np.random.default_rng(0)
    steps = [measured(rng, ranks=ranks, local_batch=local_batch, noise=50.0) for _ in range(400)]
    found = noise_scale(steps)
    assert found is not None
    assert found.batch == pytest.approx(50, rel=0.1)
    assert abs(found.batch - 50) < 4 * found.relative_error * 50


def exact(scale: float, *, num_steps: int) -> list[GradientNorms]:
    """Steps of 2 ranks with 15 samples, |G|^2 = 1, and exactly so much noise."""
    # mean square = |G|^2 + tr / local batch, square of the mean = |G|^2 + tr / batch
    step = GradientNorms(
        ranks=2, local_batch=15, mean_square=1 + scale / 15, square_of_mean=1 + scale / 30
    )
    return [step] * num_steps


def test_a_training_whose_noise_grows_by_hand() -> None:
    """Scales 30, then 90, at batch 30: weights 1/2 and 1/4, (15 + 22.5) / 0.75 = 50.

    Steps at any batch, n (1/2 (1 + 30 / B) + 1/4 (1 + 90 / B)), are those of one scale of 50.
    """
    steps = exact(30, num_steps=32) + exact(90, num_steps=32)
    found = noise_scale(steps)
    assert found is not None
    assert found.windows == pytest.approx((30,) * 4 + (90,) * 4)
    assert found.batch == pytest.approx(50)
    for batch in (1, 30, 1000):
        parts = 32 * (0.5 * (1 + 30 / batch) + 0.25 * (1 + 90 / batch))
        assert parts == pytest.approx(32 * 0.75 * (1 + found.batch / batch))


def test_a_part_whose_signal_drowns_takes_as_many_samples_at_any_batch() -> None:
    """Scale 30 at batch 30 (weight 1/2), then no signal at all (0): 30 (1 / 0.25 - 1) = 90."""
    drowned = GradientNorms(ranks=2, local_batch=15, mean_square=2.0, square_of_mean=0.9)
    found = noise_scale(exact(30, num_steps=32) + [drowned] * 32)
    assert found is not None
    assert found.batch == pytest.approx(90)
    assert found.windows[-1] == math.inf


def test_a_training_without_enough_steps_or_signal_or_noise_has_no_scale() -> None:
    noisy = GradientNorms(ranks=2, local_batch=1, mean_square=1.0, square_of_mean=0.4)
    clean = GradientNorms(ranks=2, local_batch=1, mean_square=1.0, square_of_mean=1.0)
    assert noise_scale([clean] * 50) is None
    assert noise_scale(exact(30, num_steps=7)) is None
    assert noise_scale([noisy] * 50) is None
