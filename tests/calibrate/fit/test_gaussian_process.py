"""A curve that is recovered from noisy points, and forgets where there are none."""

import numpy as np
import pytest

from calibrate.fit.operators import _negative_log_likelihood, fit_gaussian_process


@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_the_function_that_made_the_data(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(0, 10, (120, 2))
    truth = np.sin(inputs[:, 0] / 2) + 0.1 * inputs[:, 1]
    process = fit_gaussian_process(inputs, truth + rng.normal(0, 0.05, 120))
    at = rng.uniform(1, 9, (50, 2))
    means, _ = process.predict(at)
    expected = np.sin(at[:, 0] / 2) + 0.1 * at[:, 1]
    assert np.sqrt(np.mean((means - expected) ** 2)) < 0.06
    assert 0.025 < process.noise < 0.1


def test_uncertainty_grows_away_from_the_data() -> None:
    inputs = np.linspace(0, 5, 20)[:, None]
    process = fit_gaussian_process(inputs, np.sin(inputs[:, 0]))
    _, errors = process.predict(np.array([[2.5], [7.0], [12.0], [40.0]]))
    assert (np.diff(errors) > 0).all()
    assert errors[-1] <= process.spread + 1e-9


def test_far_away_it_returns_to_the_mean_of_the_data() -> None:
    inputs = np.linspace(0, 1, 5)[:, None]
    process = fit_gaussian_process(inputs, np.full(5, 3.0))
    means, _ = process.predict(np.array([[500.0]]))
    assert means[0] == pytest.approx(3.0)


def test_the_gradient_is_that_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.uniform(0, 5, (12, 2)), rng.normal(size=12)
    logs = np.log([1.5, 2.0, 0.7, 0.3])
    _, gradient = _negative_log_likelihood(inputs, targets, np.exp(logs))
    for index in range(4):
        step = np.zeros(4)
        step[index] = 1e-5
        above, _ = _negative_log_likelihood(inputs, targets, np.exp(logs + step))
        below, _ = _negative_log_likelihood(inputs, targets, np.exp(logs - step))
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-5)
