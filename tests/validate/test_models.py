"""Models drawn at random: the same for the same seed, traceable, and judged without silence."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.campaign import OBSERVATIONS, Campaign, Progress
from calibrate.launch import TorchrunLauncher
from calibrate.random_models import FAMILIES, draw
from perfmodel.documents.observation import FailedObservation
from perfmodel.documents.verdicts import ModelsValidationDocument
from perfmodel.errors import Interrupted
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile
from tests.played_worker import REPLAY, append, loop_observation
from validate.judging import ProfileRequest
from validate.models import (
    BUDGETS,
    MODES,
    DrawnModel,
    ModelsBudget,
    Predicted,
    PredictedRun,
    _blocks,
    judge_models,
    validate_models,
)

PREDICTED = PredictedRun(
    step_s=Interval(p5=0.1, nominal=0.12, p95=0.15), evidence=Evidence.MEASURED, untimed=()
)


@functools.cache
def drawn_models() -> list[DrawnModel]:
    models = (model for at in range(len(FAMILIES)) if not (model := draw(3, at)).sketch.published)
    reasons = (None, None, "cannot be traced: operator aten.odd")
    return [
        DrawnModel(model=model, document=Path("none"), reason=reason)
        for reason, model in zip(reasons, models, strict=False)
    ]


@pytest.mark.parametrize(
    ("name", "device_kind", "is_short"),
    [
        ("quick", "cpu", False),
        ("quick", "cuda", True),
        ("standard", "cuda", False),
        ("quick", "virtual", True),
        ("standard", "virtual", True),
    ],
)
def test_a_standard_budget_is_whole_on_a_gpu(
    name: str, device_kind: str, *, is_short: bool
) -> None:
    found = ModelsBudget.of(name, device_kind)
    assert (found != BUDGETS[name]) == is_short
    assert ((found.num_repetitions, found.replay_rounds) == (2, 2)) == is_short


def test_a_borrowed_gpu_trains_all_models_before_any_again(tmp_path: Path) -> None:
    request = ProfileRequest(profile=profile(Machine()), folder=tmp_path, budget="quick")
    here: Any = SimpleNamespace(device_kind="cuda", topology=SimpleNamespace(world_size=1))
    [block] = _blocks(request, drawn_models(), ModelsBudget.of("quick", "cuda"), here)
    ([*first, third, fourth],) = block.trainings
    assert [task.round for task in (*first, third, fourth)] == [0, 0, 1, 1]
    assert {task.workload for task in first} == {third.workload, fourth.workload}
    assert len({task.workload for task in first}) == 2


def test_failures_are_counted_and_named(tmp_path: Path) -> None:
    drawn = drawn_models()
    good, diverged, _ = drawn
    path = tmp_path / "observations.jsonl"
    runs = [
        *(
            loop_observation(good.setting(1), step_s, repetition=at)
            for at, step_s in enumerate((0.09, 0.1, 0.111))
        ),
        FailedObservation(
            task=f"0: {diverged.setting(1).label}",
            round=0,
            setting=diverged.setting(1),
            reason="ArithmeticError: the loss is nan after 9 steps",
        ),
    ]
    append(path, *runs)
    settings = {entry.setting(1): PREDICTED for entry in (good, diverged)}
    document = judge_models(
        ProfileRequest(profile=profile(Machine()), folder=tmp_path),
        "measured",
        drawn,
        {"measured": settings, "curves": settings},
        path,
        path,
    )
    (row,) = document.models
    assert row.signed_error == pytest.approx(0.2, abs=0.01)
    assert (document.num_drawn, len(document.failed)) == (3, 2)
    assert {entry.reason for entry in document.failed} == {
        "ArithmeticError: the loss is nan after 9 steps",
        "cannot be traced: operator aten.odd",
    }
    assert not document.passed


def judge_played(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    models: list[DrawnModel],
    measure: Callable[..., Path],
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[ModelsValidationDocument, ...]:
    """Verdicts on models that nobody traces, whose runs are played; each replay that is known widens a prediction."""

    def predict(
        _: object, settings: Mapping[RunSetting, object], replays: Sequence[object]
    ) -> Predicted:
        step_s = replace(PREDICTED.step_s, p95=0.15 + 0.01 * len(replays))
        return {mode: dict.fromkeys(settings, replace(PREDICTED, step_s=step_s)) for mode in MODES}

    here = SimpleNamespace(device_kind="cpu", topology=SimpleNamespace(world_size=1))
    for name, value in {
        "placement_of": lambda _: here,
        "trace_models": lambda *_: models,
        "predict": predict,
        "measure": measure,
    }.items():
        monkeypatch.setattr(f"validate.models.{name}", value)
    machine = replace(profile(Machine()), operators=costs_of_the_made_up_machine())
    request = ProfileRequest(profile=machine, folder=folder, seed=3, soon=True, resume=resume)
    launcher = TorchrunLauncher()
    return validate_models(request, launcher, launcher, on_progress=on_progress)


def test_what_has_run_is_judged_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A borrowed device may not come back: one of two models ran, and the verdict says so of both."""
    first, second = (replace(entry, reason=None) for entry in drawn_models()[:2])

    def measure(campaign: Campaign, *_: object, **__: object) -> Path:
        path = campaign.folder / OBSERVATIONS
        path.parent.mkdir(exist_ok=True)
        is_judge = campaign.folder == tmp_path
        ran = [loop_observation(first.setting(1), 0.1, repetition=at) for at in range(2)]
        append(path, *(ran if is_judge else ()))
        if is_judge:
            raise Interrupted("stopped")
        return path

    with pytest.raises(Interrupted):
        judge_played(monkeypatch, tmp_path, [first, second], measure)
    document = ModelsValidationDocument.read(tmp_path / "models-measured.json")
    assert [row.setting for row in document.models] == [first.setting(1)]
    assert [(lost.name, lost.reason) for lost in document.failed] == [
        (second.model.name, "has not run; continue with --resume")
    ]


def test_loops_follow_the_training_of_their_block_and_two_more_come_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("validate.models._MODELS_PER_BLOCK", 3)
    models = [DrawnModel(model=draw(3, at), document=Path("none")) for at in range(9)]
    stages: list[tuple[str, set[str], set[int]]] = []
    plans: list[Any] = []

    told: list[Progress] = []

    def measure(
        campaign: Campaign, _: object, *, resume: bool, on_progress: Callable[[Progress], None]
    ) -> Path:
        assert resume == any(name == campaign.folder.name for name, *_ in stages)
        plans.append(campaign.plan)
        tasks: list[Any] = [task for tasks in campaign.rounds for task in tasks]
        is_judge = campaign.folder == tmp_path
        names = {task.setting.workload if is_judge else task.workload for task in tasks}
        stages.append((campaign.folder.name, names, {task.round for task in tasks}))
        for done in (0, len(tasks)):
            on_progress(Progress(done=done, total=len(tasks), task=""))
        path = campaign.folder / OBSERVATIONS
        path.parent.mkdir(exist_ok=True)
        if not is_judge:
            append(path, *(REPLAY.model_copy(update={"workload": name}) for name in names))
        else:
            assert len(list(tmp_path.glob("predicted-*.json"))) == min(len(stages) // 2, 3)
            # Loops at the end take twice as long as those before.
            append(
                path,
                *(
                    loop_observation(
                        task.setting, 0.24 if task.round >= 4 else 0.12, repetition=task.round
                    )
                    for task in tasks
                ),
            )
        return path

    measured, _ = judge_played(monkeypatch, tmp_path, models, measure, on_progress=told.append)
    # Eight rounds in place and six loops of nine models, told as one.
    assert {here.total for here in told} == {told[-1].done} == {9 * (8 + 6)}
    assert [here.done for here in told] == sorted(here.done for here in told)
    *blocks, (_, at_the_end, repetitions) = stages
    assert (len(blocks), at_the_end) == (6, {entry.model.name for entry in models})
    assert repetitions == {4, 5}
    for (where, trained, _), (_, ran, soon) in zip(blocks[::2], blocks[1::2], strict=True):
        assert (where, trained, soon) == ("in-place", ran, {0, 1, 2, 3})
    assert measured.failed == ()
    gates = plans[-1]["gates"]
    assert (gates["measured"]["coverage_at_least"], gates["several ranks"]) == (0.85, 0.07)
    assert measured.summary_later is not None
    assert measured.summary_later.bias == pytest.approx(-0.5)

    def measured_before(campaign: Campaign, *_: object, **__: object) -> Path:
        return campaign.folder / OBSERVATIONS

    again, _ = judge_played(monkeypatch, tmp_path, models, measured_before, resume=True)
    assert again.models == measured.models


def test_several_ranks_run_under_ddp() -> None:
    (model, *_) = drawn_models()
    assert model.setting(1).synchronisation is Synchronisation.NONE
    assert model.setting(2).synchronisation is Synchronisation.DDP
