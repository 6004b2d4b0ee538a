"""Sums of signed errors by hand; each gate fails when it should."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate.campaign import write_plan
from perfmodel.machine.measured import Repeatability
from tests.perfmodel.profiles import Machine, profile
from tests.validate.samples import errors
from validate.judging import (
    JudgedModel,
    ProfileRequest,
    Tolerances,
    campaign_seed,
    fewest_covered,
    fraction,
    launches,
    passed,
    replay_rounds,
    summarise,
    summarise_any,
)
from validate.published.harness import Part, verdict

GOOD = [0.01, -0.02] * 12
COVERAGE = "coverage of 90 % intervals"


def test_a_summary_keeps_the_sign_in_the_bias_only() -> None:
    summary = summarise([0.1, -0.3, 0.02, -0.02])
    assert summary.num_settings == 4
    assert summary.bias == pytest.approx(-0.05)
    assert summary.mape == pytest.approx(0.11)
    assert summary.median_absolute == pytest.approx(0.06)
    assert summary.worst_absolute == pytest.approx(0.3)


def test_nothing_has_no_summary_and_a_fraction_counts_what_is_true() -> None:
    assert summarise_any([]) is None
    with pytest.raises(ValueError, match="at least one error, got none"):
        summarise([])
    assert fraction([True, False, True, True]) == 0.75


def test_predictors_are_compared_on_the_same_runs_and_ours_alone_is_covered() -> None:
    """2 s predicted for 1 s and 4 s for 4 s: +100 % and 0."""
    part = Part(
        measured=np.array([1.0, 4.0]),
        predicted={"ours": np.array([2.0, 4.0]), "other": np.array([1.0, 2.0])},
        interval=(np.array([2.0, 3.0]), np.array([3.0, 5.0])),
    )
    ours, other = verdict("s", "n", [part], fitted="", predicted="", num_fitted=1).errors
    assert (ours.method, ours.bias, ours.worst_absolute, ours.coverage) == ("ours", 0.5, 1.0, 0.5)
    assert (other.method, other.bias, other.mape, other.coverage) == ("other", -0.25, 0.25, None)


@pytest.mark.parametrize(
    ("steps", "speedups", "coverage", "failed"),
    [
        (GOOD, [], 0.9, []),
        (GOOD, [0.04, -0.04], 0.9, []),
        ([-0.1] * 24, [], 0.9, ["step-time MAPE"]),
        ([-0.3, *GOOD], [], 0.9, ["worst step-time error"]),
        (GOOD, [0.06], 0.9, ["speed-up MAPE"]),
        (GOOD, [], 0.84, [COVERAGE]),
        (GOOD, [], 0.85, []),
        (GOOD, [], 0.97, []),
        (GOOD, [], 0.971, [COVERAGE]),
        # Too few settings to call intervals too wide.
        (GOOD[1:], [], 1.0, []),
    ],
)
def test_gates(
    steps: list[float], speedups: list[float], coverage: float, failed: list[str]
) -> None:
    gates = Tolerances().judge(
        summary=errors(steps), speedups=errors(speedups) if speedups else None, coverage=coverage
    )
    assert [gate.name for gate in gates if not gate.passed] == failed
    assert passed(gates) is (not failed)
    assert len(gates) == (4 if speedups else 3)
    mape, worst, covered, *_ = gates
    assert (mape.at_least, mape.at_most, worst.at_most) == (None, 0.07, 0.20)
    assert (covered.at_least, covered.value) == (0.85, coverage)


def test_gates_of_the_quick_budget_rest_on_the_noise_of_the_machine() -> None:
    """Runs scatter by 10 %, known from 4 and judged by 3: sqrt(2 / pi) x 10 % x sqrt(1 / 4 + 1 / 3)."""
    noisy = Repeatability(run={1: 0.1, 2: 0.1}, round=0.0, occasion=0.0)
    machine = replace(profile(Machine()), repeatability=noisy, num_rounds=4)
    quick = Tolerances.of_quick(machine, num_repetitions=3, num_settings=8)
    assert quick.expected_noise == pytest.approx(0.0609, abs=1e-4)
    assert quick.step_mape - (quick.expected_noise or 0) == pytest.approx(0.0433, abs=1e-4)
    assert quick.coverage_at_least == 6 / 8
    gates = quick.judge(summary=errors([0.1] * 8), coverage=0.75, noise=errors([0.01]))
    assert passed(gates)
    worse = quick.judge(summary=errors([0.11] * 8), coverage=0.625, noise=errors([0.01]))
    assert [gate.name for gate in worse if not gate.passed] == [
        "step-time MAPE",
        COVERAGE,
    ]


@pytest.mark.parametrize(("budget", "starts"), [("quick", 1), ("standard", 2)])
def test_ranks_start_again_for_every_repetition_but_of_the_quick_budget(
    tmp_path: Path, budget: str, starts: int
) -> None:
    request = ProfileRequest(profile=profile(Machine()), folder=tmp_path, budget=budget)
    models = [JudgedModel(f"m{i}", 1, tmp_path / f"{i}.json") for i in range(3)]
    planned = replay_rounds(models, seed=3, num_rounds=2, target_s=0.5)
    started = launches(planned, request)
    assert len(started) == starts
    assert [task for tasks in started for task in tasks] == [*planned[0], *planned[1]]


@pytest.mark.parametrize(("settings", "fewest"), [(8, 6), (1, 0), (100, 85)])
def test_honest_intervals_miss_the_gate_on_coverage_once_in_twenty(
    settings: int, fewest: int
) -> None:
    assert fewest_covered(settings) == fewest


def test_a_campaign_that_was_interrupted_in_its_first_stage_keeps_its_seed(tmp_path: Path) -> None:
    assert campaign_seed(tmp_path, 7) == 7
    assert campaign_seed(tmp_path, None) >= 1000
    in_place = tmp_path / "in-place"
    write_plan(in_place, {"seed": 4711})
    assert campaign_seed(tmp_path, None) == 4711


def test_every_round_replays_every_model_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    models = [JudgedModel(f"m{i}", i + 1, tmp_path / f"{i}.json") for i in range(8)]
    first, second = replay_rounds(models, seed=3, num_rounds=2, target_s=0.5)
    names = [task.workload for task in first]
    assert sorted(names) == sorted(model.name for model in models)
    assert names != [task.workload for task in second]
    assert {task.name for task in second} == {f"1: {model.name} replayed" for model in models}
    again, _ = replay_rounds(models, seed=3, num_rounds=2, target_s=0.5)
    assert again == first
