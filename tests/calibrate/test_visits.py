"""From the steps of ranks to one number per repetition, by hand."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import pytest

from calibrate.fit.steps import (
    by_setting,
    estimate,
    repetition,
    repetition_errors,
    to_speed,
    trimmed_mean,
    typical_speed,
)
from perfmodel.documents.observation import RankSteps, StepObservation
from perfmodel.layout.run_setting import RunSetting
from tests.played_worker import step_observation

PAIR = RunSetting(workload="light", world_size=2, micro_batch=4, accumulation=2)


def rank_steps(rank: int, steps_s: Sequence[float]) -> RankSteps:
    """Input 1, forward 2, backward 3 and optimizer 4 tenths of each step."""
    tenths = tuple(
        tuple(step_s * share / 10 for step_s in steps_s) for share in (1.0, 2.0, 3.0, 4.0)
    )
    return RankSteps(
        rank=rank,
        step_s=tuple(steps_s),
        input_s=tenths[0],
        forward_s=tenths[1],
        backward_s=tenths[2],
        optimizer_s=tenths[3],
        speed_probe_s=tuple(0.001 * (rank + 1) for _ in steps_s),
    )


@pytest.fixture
def observation() -> StepObservation:
    """Typically rank 0 takes 2 s, rank 1 takes 4 s; each has an outlier at either end."""
    first, second = [1.0, *[2.0] * 4, 90.0], [*[4.0] * 4, 0.5, 5.0]
    return step_observation(PAIR, repetition=7).model_copy(
        update={"ranks": (rank_steps(0, first), rank_steps(1, second))}
    )


def test_a_step_lasts_as_long_as_the_slowest_rank_typically(
    observation: StepObservation,
) -> None:
    summary = repetition(observation)
    assert summary.step_s == pytest.approx(4.0)
    assert summary.rank_steps_s == pytest.approx((2.0, 4.0))
    assert (summary.setting, summary.round) == (PAIR, 7)


def test_phases_are_means_over_ranks_per_micro_step(observation: StepObservation) -> None:
    """2 s and 4 s: 3 s on average; halved by two micro-steps but for the optimizer."""
    assert repetition(observation).phases_s == pytest.approx(
        {"input": 0.15, "forward": 0.3, "backward": 0.45, "optimizer": 1.2}
    )


def test_the_speed_probe_is_a_mean_over_ranks(observation: StepObservation) -> None:
    assert repetition(observation).speed_probe_s == pytest.approx(0.0015)


def test_ratios_relate_every_step_to_its_own_rank(observation: StepObservation) -> None:
    assert repetition(observation).ratios == pytest.approx(
        (0.5, *[1.0] * 4, 45.0, *[1.0] * 4, 0.125, 1.25)
    )


def test_repetitions_gather_by_setting() -> None:
    single = RunSetting(workload="light", world_size=1, micro_batch=4)
    groups = by_setting(
        repetition(step_observation(setting, repetition=index))
        for index, setting in enumerate((PAIR, single, PAIR))
    )
    assert {setting: [entry.round for entry in group] for setting, group in groups.items()} == {
        PAIR: [0, 2],
        single: [1],
    }


@pytest.mark.parametrize("sensitivity", [0.0, 0.5, 1.0])
def test_drift_is_removed(sensitivity: float) -> None:
    """A machine four times slower slows a workload by 4 to the power of its sensitivity."""
    quiet = repetition(step_observation(PAIR, step_s=0.1, speed_probe_s=0.001))
    slow = repetition(step_observation(PAIR, step_s=0.1 * 4**sensitivity, speed_probe_s=0.004))
    for entry in (quiet, slow):
        factor = to_speed(entry, speed_probe_s={2: 0.001}, sensitivity=sensitivity)
        assert entry.step_s * factor == pytest.approx(0.1)


def test_ranks_that_slow_each_other_are_no_drift() -> None:
    """Alone the probe takes 1 ms, in a pair always 3 ms: both are the typical speed."""
    alone = RunSetting(workload="light", world_size=1, micro_batch=4)
    probes_s = {alone: (0.001, 0.0009, 0.002), PAIR: (0.003, 0.005, 0.003)}
    repetitions = [
        repetition(step_observation(setting, speed_probe_s=probe_s))
        for setting, group_s in probes_s.items()
        for probe_s in group_s
    ]
    typical_s = typical_speed(repetitions)
    assert typical_s == {1: pytest.approx(0.001), 2: pytest.approx(0.003)}
    factors = [to_speed(entry, speed_probe_s=typical_s, sensitivity=1.0) for entry in repetitions]
    assert factors == pytest.approx([1, 1 / 0.9, 1 / 2, 1, 3 / 5, 1])


@pytest.mark.parametrize("wild_s", [0.001, 0.9, 30.0])
def test_one_wild_repetition_of_six_is_dropped_at_either_end(wild_s: float) -> None:
    """Of six repetitions the fastest and the slowest are dropped, whichever is the wild one."""
    steady_s = [0.1, 0.1, 0.1, 0.1, 0.1]
    assert estimate([*steady_s, wild_s]).value_s == pytest.approx(0.1)


def test_of_three_repetitions_the_middle_one_counts_of_two_both() -> None:
    assert estimate([40.0, 0.1, 0.2]).value_s == pytest.approx(0.2)
    assert estimate([0.1, 0.4]).value_s == pytest.approx(0.2)


@pytest.mark.parametrize(("num_slow", "share"), [(5, 3 / 8), (6, 4 / 8), (7, 5 / 8)])
def test_of_two_speeds_a_trimmed_mean_follows_the_share(num_slow: int, share: float) -> None:
    """Two of twelve are dropped at either end; a median would jump from 1 to 1.7."""
    steps_s = [1.0] * (12 - num_slow) + [1.7] * num_slow
    assert trimmed_mean(steps_s) == pytest.approx(1.7**share)


def test_fewer_than_six_steps_are_all_kept() -> None:
    assert trimmed_mean([0.1, 0.1, 0.8]) == pytest.approx(0.2)


def test_twelve_repetitions_lose_two_at_either_end() -> None:
    """Of the powers 2^0 ... 2^11 the powers 2^2 ... 2^9 stay; in the middle lies 2^5.5."""
    values_s = [2.0**power for power in range(12)]
    assert estimate(values_s).value_s == pytest.approx(2**5.5)


def test_the_error_of_an_estimate_is_that_of_a_mean() -> None:
    """The standard deviation of the logarithms of all repetitions over the root of their number."""
    values_s = [1.0, 1.2, 1.5, 1.1]
    expected = statistics.stdev(math.log(value) for value in values_s) / math.sqrt(4)
    assert estimate(values_s).relative_error == pytest.approx(expected)


def test_one_repetition_alone_is_trusted_to_a_tenth() -> None:
    assert estimate([0.3]).relative_error == pytest.approx(0.1)


def test_repetitions_that_agree_by_chance_are_not_certain() -> None:
    assert estimate([0.3] * 10).relative_error == pytest.approx(0.01)


def test_how_far_one_repetition_is_off_is_pooled_over_settings_of_as_many_ranks(
    observation: StepObservation,
) -> None:
    """Steps of 1 s and e^0.2 s in one setting, equal ones in another: variances 0.02 and 0."""
    first = repetition(observation)
    slower = dataclasses.replace(first, step_s=first.step_s * math.exp(0.2), round=8)
    other = dataclasses.replace(first, setting=dataclasses.replace(PAIR, micro_batch=8))
    found = repetition_errors(
        [first, slower, other, dataclasses.replace(other, round=8)],
        speed_probe_s={2: first.speed_probe_s},
        sensitivities={"light": 1.0},
    )
    assert found == pytest.approx({2: 0.1})
