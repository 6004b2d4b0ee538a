"""From the steps of ranks to one number per run, and how far runs differ."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from calibrate.summary import Repetition, estimate, farthest, repeatability, repetition
from perfmodel.documents.observation import RankSteps, StepObservation
from perfmodel.layout import RunSetting
from perfmodel.machine.measured import Repeatability
from tests.existing import existing
from tests.played_worker import step_observation

PAIR = RunSetting(workload="light", world_size=2, micro_batch=4, accumulation=2)


def rank_steps(rank: int, steps_s: Sequence[float]) -> RankSteps:
    """Input 1, forward 2, backward 3 and optimizer 4 tenths of each step."""
    phases = ("input_s", "forward_s", "backward_s", "optimizer_s")
    tenths = {name: tuple(s * n / 10 for s in steps_s) for n, name in enumerate(phases, start=1)}
    return RankSteps(rank=rank, step_s=tuple(steps_s), **tenths)


@pytest.fixture
def observation() -> StepObservation:
    """Rank 0 takes 2 s, rank 1 takes 4 s, each with one step above and one below by a factor of two."""
    ranks = (rank_steps(0, [1.0, 2.0, 4.0]), rank_steps(1, [4.0, 8.0, 2.0]))
    return step_observation(PAIR, repetition=7).model_copy(update={"ranks": ranks})


def test_a_run_is_summed_up_by_its_slowest_rank(observation: StepObservation) -> None:
    """Phases are means over ranks per micro-step: 3 s, halved but for the optimizer."""
    found = repetition(observation)
    assert (found.setting, found.round) == (PAIR, 7)
    assert found.step_s == pytest.approx(4.0)
    assert found.rank_steps_s == pytest.approx((2.0, 4.0))
    assert found.phases_s == pytest.approx(
        {"input": 0.15, "forward": 0.3, "backward": 0.45, "optimizer": 1.2}
    )
    assert found.ratios == pytest.approx((0.5, 1, 2, 1, 2, 0.5))


def test_an_estimate_is_a_geometric_mean_and_its_standard_error() -> None:
    values_s = [1.0, 1.2, 1.5, 1.1]
    found = estimate(values_s)
    assert found.value_s == pytest.approx(statistics.geometric_mean(values_s))
    spread = statistics.stdev(math.log(value) for value in values_s)
    assert found.relative_error == pytest.approx(spread / 2)
    # One run is trusted to a tenth; runs that agree by chance are not certain.
    assert estimate([0.3]).relative_error == pytest.approx(0.1)
    assert estimate([0.3] * 2).relative_error == pytest.approx(0.01)
    assert estimate([0.3] * 10).relative_error == pytest.approx(0.002)


def drawn(truth: Repeatability, num_rounds: int, num_settings: int, seed: int) -> list[Repetition]:
    """Runs of settings on one and on two ranks; what is common to a round moves all of them."""
    rng = np.random.default_rng(seed)
    rounds = rng.normal(0, truth.round, num_rounds)
    return [
        repetition(
            step_observation(
                RunSetting(workload="light", world_size=world_size, micro_batch=1 + number),
                repetition=index,
                step_s=(1 + number) * float(np.exp(common + rng.normal(0, truth.run[world_size]))),
            )
        )
        for index, common in enumerate(rounds)
        for world_size in truth.run
        for number in range(num_settings)
    ]


@pytest.mark.parametrize(("run", "common"), [(0.02, 0.1), (0.1, 0.02), (0.15, 0.15)])
def test_how_far_runs_and_rounds_differ_is_recovered(run: float, common: float) -> None:
    """Means over 30 seeds of 6 rounds and 20 settings each; two ranks differ twice as much."""
    truth = Repeatability(run={1: run, 2: 2 * run}, round=common, occasion=0.0)
    found = [repeatability(drawn(truth, 6, 20, seed)) for seed in range(30)]
    for world_size, expected in truth.run.items():
        assert np.mean([f.run[world_size] for f in found]) == pytest.approx(expected, rel=0.1)
    mean_square = np.mean([f.round**2 for f in found])
    assert mean_square**0.5 == pytest.approx(common, rel=0.3)


def test_steps_that_wait_for_their_host_tell_of_the_host_alone() -> None:
    """Of three settings one waits; it varies a hundred times as much."""
    truth = Repeatability(run={1: 0.001}, round=0.0, occasion=0.0)
    logs = np.random.default_rng(0).normal(0, 0.1, 40)
    [setting] = {entry.setting for entry in drawn(truth, 2, 1, seed=1)}
    waiting = [
        replace(entry, setting=replace(setting, workload="heavy"), step_s=math.exp(log), waits=True)
        for log, entry in zip(logs, drawn(truth, 40, 1, seed=1), strict=True)
    ]
    still = drawn(truth, 40, 2, seed=1)
    many = [
        replace(
            entry,
            setting=replace(entry.setting, world_size=2),
            step_s=2 * entry.step_s,
            waits=False,
        )
        for entry in waiting
    ]
    found = repeatability([*still, *waiting, *many])
    assert found.host == pytest.approx(logs.std(ddof=1))
    assert found.host_occasion is None
    assert replace(found, host=0.0) == repeatability(still)


@pytest.mark.parametrize("common", [0.0, 0.1])
def test_a_host_differs_between_occasions_as_between_rounds(common: float) -> None:
    """Means over 30 seeds of 6 rounds of 20 settings whose runs differ by 10 %, beside two that do not wait."""
    truth = Repeatability(run={1: 0.1}, round=common, occasion=0.0)
    still = drawn(Repeatability(run={1: 0.001}, round=0.0, occasion=0.0), 6, 2, seed=1)
    squares = []
    for seed in range(30):
        waiting = [
            replace(entry, setting=replace(entry.setting, workload="heavy"), waits=True)
            for entry in drawn(truth, 6, 20, seed)
        ]
        found = repeatability([*still, *waiting])
        assert found.host_again == math.hypot(found.host, existing(found.host_occasion))
        squares.append(found.host_again**2)
    assert np.mean(squares) == pytest.approx(0.01 + 2 * common**2, rel=0.25)


def test_where_all_steps_wait_for_their_host_the_device_varies_as_much() -> None:
    """A model that keeps the device busy would have no noise at all, since no such step was measured."""
    runs = drawn(Repeatability(run={1: 0.1}, round=0.0, occasion=0.0), 6, 60, seed=1)
    found = repeatability([replace(entry, waits=True) for entry in runs])
    assert found == repeatability(runs)
    assert found.run_of(1) == pytest.approx(0.1, rel=0.1)
    assert found.host == 0.0


def test_two_rounds_do_not_tell_how_much_rounds_differ() -> None:
    truth = Repeatability(run={1: 0.05}, round=0.5, occasion=0.0)
    assert repeatability(drawn(truth, 2, 20, seed=1)).round == 0.03


def test_occasions_differ_by_two_thirds_of_runs_and_on_a_quiet_machine_by_half_a_percent() -> None:
    noisy, quiet = (
        repeatability(drawn(Repeatability(run={1: run}, round=0.0, occasion=0.0), 6, 200, seed=1))
        for run in (0.12, 0.001)
    )
    assert noisy.occasion == pytest.approx(0.12 * 0.43**0.5, rel=0.05)
    assert quiet.occasion == 0.006


def test_new_runs_lie_where_they_should() -> None:
    """Of a mean over one run 90 % lie within 1.645 standard deviations of what is common and own."""
    truth = Repeatability(run={1: 0.1}, round=0.05, occasion=0.04)
    rng = np.random.default_rng(1)
    size = 20_000
    errors = (
        rng.normal(0, truth.occasion, size)
        + rng.normal(0, truth.round, size)
        + rng.normal(0, truth.round / 6**0.5, size)
        + rng.normal(0, truth.run_of(1), size)
    )
    width = math.hypot(truth.common(6), truth.run_of(1))
    assert np.mean(np.abs(errors) < 1.645 * width) == pytest.approx(0.9, abs=0.01)
    assert truth.run_of(8) == truth.run_of(1)
    assert truth.common(6, 100) < truth.common(6)


def test_the_farthest_points_come_first() -> None:
    """On a line from 0 to 9 the other end and then the middle; scales do not matter, nor what never changes."""
    points = np.array([[x, 1e6 * x, 3.0] for x in range(10)], dtype=float)
    assert farthest(points, 3) == [0, 9, 4]
    assert sorted(farthest(points, 20)) == list(range(10))
    assert farthest(points[[0, 0, 9, 9, 4]], 5) == [0, 2, 4]
    assert farthest(points[[3, 3]], 2) == [0]
