"""Held-out settings are new to the profile, and there are enough of them."""

from collections import Counter
from dataclasses import replace

import pytest

from calibrate.experiment import BUCKET_CAPS_MB as CALIBRATED_CAPS_MB
from calibrate.task import StepTask
from perfmodel.layout import Synchronisation
from tests.perfmodel.profiles import MICRO_BATCHES, Machine, profile
from tests.validate.samples import calibrated_step, four_workloads, single
from validate.judging import (
    BUDGETS,
    calibrated_settings,
    holdout_settings,
    repeated_settings,
    rounds,
)

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
