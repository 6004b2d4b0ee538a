"""Constants come back from steps that were made with them."""

import numpy as np
import pytest

from calibrate.step_fit import THREADS_PRIOR, fit_threads
from perfmodel.cost.step_law import ThreadedSteps


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_constants_of_a_host_come_back_beside_a_few_odd_steps(factor: float) -> None:
    rng = np.random.default_rng(0)
    ends = ((0.02, 0.6), (2.0, 4.0), (20.0, 600.0), (1e6, 5e8))
    steps = ThreadedSteps(*(rng.uniform(low, high, 60) for low, high in ends))
    truth = THREADS_PRIOR + np.log([factor, factor, factor, 3.0])
    times_s = steps.step_s(np.exp(truth)) * np.exp(0.005 * rng.standard_normal(60))
    times_s[::20] = 9.0
    assert np.exp(fit_threads(steps, times_s) - truth) == pytest.approx(np.ones(4), rel=0.1)
