"""Predicted beside measured, and sums of signed errors, by hand; each gate fails when it should."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate.campaign import write_plan
from calibrate.experiment import BUCKET_CAPS_MB as CALIBRATED_CAPS_MB
from calibrate.task import ReplayTask, StepTask
from calibrate.workloads import in_starts
from perfmodel.documents.verdicts import ComparedSetting
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine.measured import Repeatability
from perfmodel.statistics import Interval
from tests.perfmodel.profiles import MICRO_BATCHES, Machine, profile
from tests.validate.samples import calibrated_step, exactly, four_workloads, single
from validate.judging import (
    BUDGETS,
    ProfileRequest,
    Tolerances,
    calibrated_settings,
    campaign_seed,
    compared,
    fraction,
    holdout_settings,
    launches,
    passed,
    repeated_settings,
    rounds,
    summarise,
    summarise_any,
)
from validate.published.harness import Part, verdict
from validate.validate import compare_speedup, is_extrapolated

GOOD = [0.01, -0.02] * 12
PREDICTED = Interval(p5=0.009, nominal=0.010, p95=0.013)
COVERAGE = "coverage of single runs"


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


def rows_of(coverage: float) -> list[ComparedSetting]:
    """One setting of 1,000 runs, a share of them inside the interval; their mean never is."""
    num_inside = round(1000 * coverage)
    runs_s = [0.010] * num_inside + [1e9] * (1000 - num_inside)
    return [ComparedSetting(**compared(single(), PREDICTED, runs_s), is_extrapolated=False)]


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
        summary=summarise(steps), speedups=summarise_any(speedups), rows=rows_of(coverage)
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
    noise = summarise([0.01])
    gates = quick.judge(summary=summarise([0.1] * 8), rows=rows_of(0.75), noise=noise)
    assert passed(gates)
    worse = quick.judge(summary=summarise([0.11] * 8), rows=rows_of(0.625), noise=noise)
    assert [gate.name for gate in worse if not gate.passed] == ["step-time MAPE", COVERAGE]


def replays(count: int) -> list[ReplayTask]:
    """One of each model."""
    return [
        ReplayTask(name=f"m{i} replayed", round=0, workload=f"m{i}", micro_batch=1, target_s=0.5)
        for i in range(count)
    ]


@pytest.mark.parametrize(("budget", "starts"), [("quick", 1), ("standard", 2)])
def test_ranks_start_again_for_every_repetition_but_of_the_quick_budget(
    tmp_path: Path, budget: str, starts: int
) -> None:
    request = ProfileRequest(profile=profile(Machine()), folder=tmp_path, budget=budget)
    planned = in_starts(replays(3), num_rounds=4)
    started = launches(planned, request)
    assert len(started) == starts
    assert [task for tasks in started for task in tasks] == [*planned[0], *planned[1]]


def test_a_campaign_that_was_interrupted_in_its_first_stage_keeps_its_seed(tmp_path: Path) -> None:
    assert campaign_seed(tmp_path, 7) == 7
    assert campaign_seed(tmp_path, None) >= 1000
    in_place = tmp_path / "in-place"
    write_plan(in_place, {"seed": 4711})
    assert campaign_seed(tmp_path, None) == 4711


@pytest.mark.parametrize(
    ("measured_s", "error", "is_covered"),
    [
        (0.0089, 0.1236, False),
        (0.009, 1 / 9, True),
        (0.010, 0.0, True),
        (0.013, -3 / 13, True),
        (0.0131, -0.2366, False),
    ],
)
def test_a_prediction_that_is_too_long_has_a_positive_error(
    measured_s: float, error: float, *, is_covered: bool
) -> None:
    """Predicted are 10 ms, between 9 and 13."""
    row = compared(single(), PREDICTED, [measured_s * 0.99, measured_s, measured_s / 0.99])
    assert row["signed_error"] == pytest.approx(error, abs=1e-4)
    assert row["measured_s"] == pytest.approx(measured_s)
    assert row["num_repetitions"] == 3
    assert row["is_covered"] is is_covered


def test_intervals_tell_of_single_runs_and_not_of_their_mean() -> None:
    """8, 10 and 14 ms lie around a mean within 9 to 13 ms; one of three runs does, and one of one."""
    rows = [
        ComparedSetting(**compared(single(), PREDICTED, runs_s), is_extrapolated=False)
        for runs_s in ([0.008, 0.010, 0.014], [0.010])
    ]
    assert [row.is_covered for row in rows] == [True, True]
    assert [row.num_inside for row in rows] == [1, 1]
    _, _, covered = Tolerances().judge(summary=summarise([0.0] * 2), rows=rows)
    assert (covered.name, covered.value, covered.passed) == (COVERAGE, 0.5, False)


@pytest.mark.parametrize(
    ("micro_batch", "is_beyond"), [(3, True), (4, False), (17, False), (64, False), (65, True)]
)
def test_accuracy_is_promised_between_the_calibrated_micro_batches(
    micro_batch: int, *, is_beyond: bool
) -> None:
    """They are 4, 16 and 64."""
    assert is_extrapolated(single(micro_batch), profile(Machine())) is is_beyond


@pytest.mark.parametrize(
    ("accumulation", "step_s", "speedup"),
    # Samples per second over those of one device, which takes 8 samples per 10 ms:
    # 2 x 8 samples per 16 ms, and 2 x 3 x 8 samples per 40 ms.
    [(1, 0.016, 1.25), (3, 0.040, 1.5)],
)
def test_a_speedup_compares_throughput(accumulation: int, step_s: float, speedup: float) -> None:
    setting = RunSetting(workload="light", world_size=2, micro_batch=8, accumulation=accumulation)
    runs = {setting: dict.fromkeys(range(2), step_s), single(): dict.fromkeys(range(2), 0.010)}
    row = compare_speedup(setting, exactly(speedup * 0.9), runs)
    assert row.measured == pytest.approx(speedup)
    assert row.signed_error == pytest.approx(-0.1)
    assert (row.workload, row.world_size, row.accumulation) == ("light", 2, accumulation)
    assert (row.num_inside, row.num_repetitions) == (0, 2)


@pytest.mark.parametrize(("failed", "pairs"), [((0,), 2), ((0, 1, 2), None)])
def test_speedups_are_of_runs_of_one_round(failed: tuple[int, ...], pairs: int | None) -> None:
    """Each round is slower than that before, and of each 1.25 times as fast as one device; one lost its first run."""
    setting = RunSetting(workload="light", world_size=2, micro_batch=8)
    step_s = {index: 0.010 * 2**index for index in range(4)}
    together = {index: 1.6 * step_s[index] for index in range(4) if index not in failed}
    alone = {index: step_s[index] for index in range(3)}
    row = compare_speedup(setting, exactly(1.25), {setting: together, single(): alone})
    assert (row.num_inside, row.num_repetitions) == (pairs or 0, pairs)


# Held-out settings are new to the profile, and there are enough of them.
STANDARD = BUDGETS["standard"]


@pytest.mark.parametrize("num_batches", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_no_held_out_setting_was_calibrated(num_batches: int, num_ranks: int) -> None:
    machine = four_workloads(Machine(world_size=num_ranks))
    settings = set(holdout_settings(machine, num_batches=num_batches, goes_beyond=True))
    assert settings
    assert not settings & calibrated_settings(machine)


def test_the_standard_budget_judges_every_kind_of_setting_of_each_workload() -> None:
    settings = holdout_settings(four_workloads(), num_batches=STANDARD.num_batches)
    assert len(settings) == len(set(settings)) >= 24
    for name in ("light", "heavy", "third", "fourth"):
        mine = [setting for setting in settings if setting.workload == name]
        assert {setting.world_size for setting in mine} == {1, 2}
        # Calibration never accumulates, and has other caps and batches.
        assert {setting.accumulation for setting in mine} == {1, 2, 3}
        assert {setting.bucket_cap_mb for setting in mine} == {None, 2.0, 10.0}
        assert not {2.0, 10.0} & set(CALIBRATED_CAPS_MB)
        assert not {setting.micro_batch for setting in mine} & set(MICRO_BATCHES)


def test_one_micro_batch_lies_above_the_calibrated_range() -> None:
    """1.25 x 64 = 80, on one device and on all ranks."""
    settings = holdout_settings(profile(Machine()), num_batches=1, goes_beyond=True)
    beyond = [setting for setting in settings if setting.micro_batch > 64]
    assert {(s.micro_batch, s.world_size, s.accumulation) for s in beyond} == {
        (80, 1, 1),
        (80, 2, 1),
    }


@pytest.mark.parametrize(("num_ranks", "between"), [(2, None), (3, None), (4, 3), (8, 6)])
def test_a_number_of_ranks_between_the_calibrated_ones_is_held_out(
    num_ranks: int, between: int | None
) -> None:
    settings = holdout_settings(four_workloads(Machine(world_size=num_ranks)), num_batches=1)
    expected = {1, num_ranks} if between is None else {1, between, num_ranks}
    assert {setting.world_size for setting in settings} == expected


def test_a_profile_without_gaps_is_judged_above_its_range() -> None:
    machine = profile(Machine())
    curve = machine.workloads[0].phases[0].forward[:1]
    phases = replace(machine.workloads[0].phases[0], forward=curve)
    single_batch = replace(machine.workloads[0], phases=(phases,))
    spoilt = replace(machine, workloads=(single_batch,))
    assert {s.micro_batch for s in holdout_settings(spoilt, num_batches=2)} == {5}


def test_one_rank_is_judged_on_single_devices_only() -> None:
    settings = holdout_settings(profile(Machine(world_size=1)), num_batches=2)
    assert {setting.world_size for setting in settings} == {1}
    assert {setting.synchronisation for setting in settings} == {Synchronisation.NONE}
    assert {setting.bucket_cap_mb for setting in settings} == {None}
    assert {setting.accumulation for setting in settings} == {1, 2, 3}


def test_a_held_out_setting_that_was_calibrated_is_a_mistake() -> None:
    """The curves say 4, 16, 64, but a step at the held-out 8 went into the profile as well."""
    spoilt = replace(profile(Machine()), steps=(calibrated_step("light", 1, 8),))
    with pytest.raises(ValueError, match=r"light n=1 micro_batch=8 .* must not be part"):
        holdout_settings(spoilt, num_batches=1)


def test_repeats_are_calibrated_settings_in_the_middle_of_the_range() -> None:
    machine = four_workloads()
    repeats = repeated_settings(machine)
    assert set(repeats) <= calibrated_settings(machine)
    assert {setting.micro_batch for setting in repeats} == {16}
    assert Counter(setting.world_size for setting in repeats) == {1: 4, 2: 4}
    # What was not calibrated is left out.
    assert repeated_settings(profile(Machine())) == (single(16, workload="heavy"),)


@pytest.mark.parametrize("name", BUDGETS)
def test_every_setting_and_repeat_runs_once_in_every_repetition(name: str) -> None:
    machine = four_workloads()
    settings, repeated = holdout_settings(machine, num_batches=1), repeated_settings(machine)
    planned = rounds(settings, repeated=repeated, budget=BUDGETS[name], seed=1)
    assert len(planned) == BUDGETS[name].num_repetitions
    for tasks in planned:
        own = Counter(task.setting for task in tasks if isinstance(task, StepTask))
        assert own == dict.fromkeys((*settings, *repeated), 1)
    names = Counter(task.name for tasks in planned for task in tasks)
    assert set(names.values()) == {1}
