"""Models that no fit has seen: which are run, and what is said about their predictions."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from calibrate.experiment import REFERENCE_MODELS
from calibrate.task import StepTask, replay_name
from perfmodel.documents.observation import (
    Observation,
    ReplayObservation,
    StepObservation,
    TimedOperator,
)
from perfmodel.errors import MeasurementFailed
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.workload.step import parameters_signature, signature
from tests.perfmodel.operators import prices_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced
from tests.played_worker import NUM_STEPS, step_observation
from validate.held_out_models import HELD_OUT, held_out_settings
from validate.models import BUDGETS, Mode, ModelsRequest, judge_models, rounds

FOLDER = Path("runs")
SETTING = RunSetting(
    workload=WORKLOAD.name, world_size=1, micro_batch=8, synchronisation=Synchronisation.NONE
)


@pytest.fixture(scope="module")
def machine() -> MeasuredMachine:
    return replace(profile(Machine()), operators=prices_of_the_made_up_machine())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "observations.jsonl"
    found.touch()
    return found


def run_of(step_s: float, *, speed_probe_s: float = 1e-3) -> StepObservation:
    return step_observation(
        SETTING, task="run", repetition=0, step_s=step_s, speed_probe_s=speed_probe_s
    )


def replay_of(time_s: float) -> ReplayObservation:
    """Every operator took so long, the optimizer as well."""
    step = traced().at(micro_batch=8)
    counts = step.call_counts()
    return ReplayObservation(
        task=replay_name("run"),
        round=0,
        workload=WORKLOAD.name,
        micro_batch=8,
        parameters=parameters_signature(step),
        num_trained=1,
        operators=tuple(
            TimedOperator(
                signature=signature(step.operators[at]),
                phase=phase,
                num_calls=count,
                times_s=(time_s,),
            )
            for (at, phase), count in counts.items()
        ),
        forward_s=(time_s,) * NUM_STEPS,
        backward_s=(2 * time_s,) * NUM_STEPS,
        optimizer_s=(time_s,) * NUM_STEPS,
        speed_probe_s=(1e-3,) * NUM_STEPS,
        failed=(),
        traced=traced(),
        model=WORKLOAD,
    )


def at_this_speed(machine: MeasuredMachine) -> MeasuredMachine:
    return replace(machine, speed_probe_s={1: 1e-3, 2: 1e-3})


def test_the_sum_of_measured_operators_is_compared_with_the_run(
    machine: MeasuredMachine, path: Path
) -> None:
    request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent)
    document = judge_models(request, [run_of(0.5), replay_of(0.1)], path)
    (row,) = document.models
    # One call forward, two backward, the optimizer: 0.4 s of 0.5 s.
    assert row.signed_error == pytest.approx(0.4 / 0.5 - 1)
    assert document.summary.bias == pytest.approx(-0.2)
    assert not document.passed


def test_curves_alone_do_not_look_at_the_replay(machine: MeasuredMachine, path: Path) -> None:
    request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent, mode="curves")
    slow, fast = (
        judge_models(request, [run_of(0.5), replay_of(time_s)], path).models[0].predicted_s.nominal
        for time_s in (0.1, 0.001)
    )
    assert slow == fast


@pytest.mark.parametrize(
    ("mode", "replay", "widened"),
    [
        ("measured", replay_name("run"), 1.0),
        ("measured", "replay of another hour", 1.3),
        ("curves", replay_name("run"), 1.3),
    ],
)
def test_what_moves_a_machine_over_hours_is_no_uncertainty_of_steps_in_turn_with_their_replays(
    machine: MeasuredMachine, path: Path, mode: Mode, replay: str, widened: float
) -> None:
    quiet = at_this_speed(machine)
    assert quiet.operators is not None
    restless = replace(
        quiet, round_error=0.1, operators=replace(quiet.operators, repetition_errors={1: 0.2})
    )
    runs: list[Observation] = [run_of(0.5), replay_of(0.1).model_copy(update={"task": replay})]
    sharp, wide = (
        judge_models(ModelsRequest(profile=of, folder=path.parent, mode=mode), runs, path)
        .models[0]
        .predicted_s.p95
        for of in (quiet, restless)
    )
    assert wide / sharp == pytest.approx(widened, abs=0.15 * (widened > 1))


def test_curves_are_compared_with_repetitions_at_the_speed_of_their_own_probe(
    machine: MeasuredMachine, path: Path
) -> None:
    """1 s while the probe took twice as long is 0.5 s; replays in turn have the speed of their own."""
    repetitions: list[Observation] = [run_of(0.5), run_of(1.0, speed_probe_s=2e-3), replay_of(0.1)]
    found: dict[Mode, float] = {}
    for mode in get_args(Mode):
        request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent, mode=mode)
        found[mode] = judge_models(request, repetitions, path).models[0].measured_s
    assert found["curves"] == pytest.approx(0.5)
    assert found["measured"] == pytest.approx((0.5 * 1.0) ** 0.5)


def test_a_processor_that_changes_its_speed_within_a_repetition_is_out_of_the_comparison(
    machine: MeasuredMachine, path: Path
) -> None:
    """Medians apart would stand for other speeds, 1.35 beside 1.7; of twelve turns one met both."""
    steps_slow, replays_slow = (1.0,) * 6 + (1.7,) * 6, (1.0,) * 5 + (1.7,) * 7
    run, replay = run_of(0.4), replay_of(0.1)
    (rank,) = run.ranks
    one = rank.model_copy(update={"step_s": tuple(0.4 * slow for slow in steps_slow)})
    changed = replay.model_copy(
        update={
            f"{phase}_s": tuple(s * slow for s, slow in zip(times_s, replays_slow, strict=True))
            for phase in ("forward", "backward", "optimizer")
            for times_s in [getattr(replay, f"{phase}_s")]
        }
    )
    request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent)
    runs: list[Observation] = [run.model_copy(update={"ranks": (one,)}), changed]
    (row,) = judge_models(request, runs, path).models
    assert row.signed_error == pytest.approx(0.0)


def test_runs_whose_processor_time_nobody_counted_have_no_error_against_it(
    machine: MeasuredMachine, path: Path
) -> None:
    run = run_of(0.5)
    ranks = tuple(rank.model_copy(update={"cpu_s": ()}) for rank in run.ranks)
    runs: list[Observation] = [run.model_copy(update={"ranks": ranks}), replay_of(0.1)]
    request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent)
    (row,) = judge_models(request, runs, path).models
    assert (row.processor_s, row.signed_error_processor) == (0.0, 0.0)


def test_runs_without_a_trace_cannot_be_judged(machine: MeasuredMachine, path: Path) -> None:
    request = ModelsRequest(profile=at_this_speed(machine), folder=path.parent)
    with pytest.raises(MeasurementFailed, match="with their traces, got none"):
        judge_models(request, [run_of(0.5)], path)


def test_no_held_out_model_is_a_reference_model() -> None:
    names = {model.model.rpartition(":")[2] for model in HELD_OUT}
    assert len(names) >= 12
    assert names.isdisjoint(REFERENCE_MODELS)


def test_held_out_runs_differ_in_their_names() -> None:
    labels = [run.setting.label for run in held_out_settings(2, FOLDER)]
    assert len(set(labels)) == len(labels)
    assert {run.setting.world_size for run in held_out_settings(2, FOLDER)} == {1, 2}
    assert {run.setting.world_size for run in held_out_settings(1, FOLDER)} == {1}


def test_runs_on_one_rank_are_replayed_in_turn() -> None:
    for tasks in rounds(held_out_settings(2, FOLDER), BUDGETS["quick"], seed=1):
        for task in tasks:
            assert isinstance(task, StepTask)
            assert task.is_replayed == (task.setting.world_size == 1)


def test_runs_on_several_ranks_are_measured_more_often_under_names_of_their_own() -> None:
    settings = held_out_settings(2, FOLDER)
    for tasks in rounds(settings, BUDGETS["quick"], seed=1):
        names = [task.name for task in tasks]
        assert len(set(names)) == len(names)
        repetitions = Counter(task.setting for task in tasks if isinstance(task, StepTask))
        for run in settings:
            assert repetitions[run.setting] == (2 if run.setting.world_size > 1 else 1)
