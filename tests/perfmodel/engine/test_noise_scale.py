"""The noise scale of gradients that are known."""

import math

import numpy as np
import pytest

from perfmodel.arrays import FloatArray
from perfmodel.cost.batch import GradientNorms, noise_scale


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


def test_the_signal_by_hand() -> None:
    """Gradients 3 and 1 of two ranks: mean square 5, square of the mean 4, signal 2 * 4 - 5 = 3 * 1."""
    step = GradientNorms(ranks=2, local_batch=4, mean_square=5.0, square_of_mean=4.0)
    assert step.signal == 3.0


@pytest.mark.parametrize(("ranks", "local_batch"), [(2, 8), (8, 2), (4, 64)])
def test_a_known_noise_scale_comes_back(ranks: int, local_batch: int) -> None:
    rng = np.random.default_rng(0)
    steps = [measured(rng, ranks=ranks, local_batch=local_batch, noise=50.0) for _ in range(400)]
    found = noise_scale(steps)
    assert found is not None
    assert found.batch == pytest.approx(50, rel=0.1)
    assert abs(found.batch - 50) < 4 * found.relative_error * 50


def best_decrease(gradients: FloatArray, true: FloatArray) -> float:
    """Mean decrease of half the squared distance by one step at the best learning rate.

    A step of rate r from ``true`` along g leaves ``|true - r g|^2 / 2``: best at mean(true g) / mean(g g).
    """
    along = float((gradients @ true).mean())
    return along**2 / float((gradients**2).sum(axis=1).mean()) / 2


def test_the_estimate_predicts_what_a_larger_batch_gains_per_step() -> None:
    """A quadratic bowl, optimal rates: progress per step grows as 1 / (1 + B_noise / B)."""
    rng = np.random.default_rng(5)
    true = np.full(100, 0.1)
    per_sample = math.sqrt(64 / 100)  # trace of the covariance 64, |G|^2 = 1
    steps = []
    for _ in range(300):
        ranks = true + per_sample / math.sqrt(8) * rng.standard_normal((4, 100))
        steps.append(
            GradientNorms(
                ranks=4,
                local_batch=8,
                mean_square=float((ranks**2).sum(axis=1).mean()),
                square_of_mean=float((ranks.mean(axis=0) ** 2).sum()),
            )
        )
    found = noise_scale(steps)
    assert found is not None
    small, large = (
        best_decrease(true + per_sample / math.sqrt(batch) * rng.standard_normal((4000, 100)), true)
        for batch in (16, 256)
    )
    predicted = (1 + found.batch / 16) / (1 + found.batch / 256)
    assert large / small == pytest.approx(predicted, rel=0.05)


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


def test_the_error_of_a_training_is_as_large_as_repetitions_scatter() -> None:
    rng = np.random.default_rng(3)
    found = [
        noise_scale([measured(rng, ranks=4, local_batch=16, noise=50.0) for _ in range(160)])
        for _ in range(100)
    ]
    scales = np.array([entry.batch for entry in found if entry is not None])
    errors = np.array([entry.batch * entry.relative_error for entry in found if entry is not None])
    assert len(scales) == 100
    assert errors.mean() == pytest.approx(scales.std(), rel=0.25)


def test_a_training_without_enough_steps_or_signal_or_noise_has_no_scale() -> None:
    noisy = GradientNorms(ranks=2, local_batch=1, mean_square=1.0, square_of_mean=0.4)
    clean = GradientNorms(ranks=2, local_batch=1, mean_square=1.0, square_of_mean=1.0)
    assert noise_scale([clean] * 50) is None
    assert noise_scale(exact(30, num_steps=7)) is None
    assert noise_scale([noisy] * 50) is None
