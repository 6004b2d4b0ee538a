"""What ranks of one run differ by, whichever of them is slow in it."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.fit.steps import rank_spread
from calibrate.summary import Repetition
from perfmodel.layout import RunSetting, Synchronisation

NO_SYNC = RunSetting(
    workload="light", world_size=2, micro_batch=8, synchronisation=Synchronisation.NO_SYNC
)
NUM_STEPS = 8


def runs(spread: float, noise: float, *, setting: RunSetting = NO_SYNC) -> list[Repetition]:
    """Four hundred runs, in each of which every rank has a pace of its own."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(400):
        pace = np.exp(rng.normal(0.0, spread, (2, 1)))
        steps_s = 0.1 * pace * np.exp(rng.normal(0.0, noise, (2, NUM_STEPS)))
        typical_s = np.exp(np.log(steps_s).mean(axis=1))
        found.append(
            Repetition(
                setting=setting,
                round=index,
                step_s=float(typical_s.max()),
                phases_s={},
                rank_steps_s=tuple(typical_s.tolist()),
                ratios=tuple((steps_s / typical_s[:, None]).ravel().tolist()),
                device_s=0.0,
            )
        )
    return found


def test_a_rank_that_is_slow_in_one_run_counts_though_it_is_fast_in_the_next() -> None:
    assert rank_spread(runs(0.08, 0.05)) == pytest.approx(0.08, rel=0.1)


def test_noise_of_steps_is_no_difference_of_ranks() -> None:
    assert rank_spread(runs(0.0, 0.05)) < 0.01


def test_ranks_that_wait_for_each_other_tell_nothing() -> None:
    together = replace(NO_SYNC, synchronisation=Synchronisation.DDP)
    assert rank_spread(runs(0.08, 0.05, setting=together)) == 0.0
    assert rank_spread([]) == 0.0
