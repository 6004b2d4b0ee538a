"""Models that no fit has seen: which are run, and what is said about their predictions."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.experiment import REFERENCE_MODELS
from calibrate.task import ReplayTask, StepTask
from perfmodel.documents.observation import (
    ReplayObservation,
    StepObservation,
    TimedOperator,
)
from perfmodel.errors import MeasurementFailed
from perfmodel.layout.layout import Synchronisation
from perfmodel.layout.run_setting import RunSetting
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.workload.step import parameters_signature, signature
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced
from tests.played_worker import NUM_STEPS, step_observation
from validate.held_out_models import HELD_OUT, held_out_settings
from validate.models import BUDGETS, ModelsRequest, judge_models, rounds

FOLDER = Path("runs")
SETTING = RunSetting(
    workload=WORKLOAD.name, world_size=1, micro_batch=8, synchronisation=Synchronisation.NONE
)


@pytest.fixture(scope="module")
def machine() -> MeasuredMachine:
    return replace(profile(Machine()), operators=costs_of_the_made_up_machine())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "observations.jsonl"
    found.touch()
    return found


def run_of(step_s: float) -> StepObservation:
    return step_observation(SETTING, task="run", repetition=0, step_s=step_s)


def replay_of(time_s: float) -> ReplayObservation:
    """Every operator took so long, the optimizer as well."""
    step = traced().at(micro_batch=8)
    counts = step.call_counts()
    return ReplayObservation(
        task="run replayed",
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
        failed=(),
        traced=traced(),
        model=WORKLOAD,
    )


def test_the_sum_of_measured_operators_is_compared_with_the_run(
    machine: MeasuredMachine, path: Path
) -> None:
    request = ModelsRequest(profile=machine, folder=path.parent)
    document = judge_models(request, [run_of(0.5), replay_of(0.1)], path)
    (row,) = document.models
    # One call forward, two backward, the optimizer: 0.4 s of 0.5 s.
    assert row.signed_error == pytest.approx(0.4 / 0.5 - 1)
    assert document.summary.bias == pytest.approx(-0.2)
    assert not document.passed


def test_curves_alone_do_not_look_at_the_replay(machine: MeasuredMachine, path: Path) -> None:
    request = ModelsRequest(profile=machine, folder=path.parent, mode="curves")
    slow, fast = (
        judge_models(request, [run_of(0.5), replay_of(time_s)], path).models[0].predicted_s.nominal
        for time_s in (0.1, 0.001)
    )
    assert slow == fast


def test_runs_without_a_trace_cannot_be_judged(machine: MeasuredMachine, path: Path) -> None:
    request = ModelsRequest(profile=machine, folder=path.parent)
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


def test_runs_on_one_rank_are_replayed_too() -> None:
    settings = held_out_settings(2, FOLDER)
    alone = Counter(r.setting.workload for r in settings if r.setting.world_size == 1)
    for tasks in rounds(settings, BUDGETS["quick"], seed=1):
        assert Counter(t.workload for t in tasks if isinstance(t, ReplayTask)) == alone


def test_runs_on_several_ranks_are_measured_more_often_under_names_of_their_own() -> None:
    settings = held_out_settings(2, FOLDER)
    for tasks in rounds(settings, BUDGETS["quick"], seed=1):
        names = [task.name for task in tasks]
        assert len(set(names)) == len(names)
        repetitions = Counter(task.setting for task in tasks if isinstance(task, StepTask))
        for run in settings:
            assert repetitions[run.setting] == (2 if run.setting.world_size > 1 else 1)
