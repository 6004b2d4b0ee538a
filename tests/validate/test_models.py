"""Models drawn at random: the same for the same seed, traceable, and judged without silence."""

import functools
from pathlib import Path

import pytest

from calibrate.random_models import FAMILIES, draw
from perfmodel.documents.observation import FailedObservation, LoopObservation
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval
from tests.perfmodel.profiles import Machine, profile
from validate.models import DrawnModel, ModelsRequest, PredictedRun, judge_models


@functools.cache
def drawn_models() -> list[DrawnModel]:
    models = (model for at in range(len(FAMILIES)) if not (model := draw(3, at)).sketch.torchvision)
    reasons = (None, None, "cannot be traced: operator aten.odd")
    return [
        DrawnModel(model=model, document=Path("none"), reason=reason)
        for reason, model in zip(reasons, models, strict=False)
    ]


def loop(setting: RunSetting, step_s: float, repetition: int) -> LoopObservation:
    return LoopObservation(
        task=f"{repetition}: {setting.label}",
        round=repetition,
        started_utc=0.0,
        setting=setting,
        step_s=step_s,
        num_steps=9,
    )


def test_failures_are_counted_and_named(tmp_path: Path) -> None:
    drawn = drawn_models()
    good, diverged, _ = drawn
    path = tmp_path / "observations.jsonl"
    runs = [
        *(loop(good.setting(1), step_s, at) for at, step_s in enumerate((0.09, 0.1, 0.111))),
        FailedObservation(
            task=f"0: {diverged.setting(1).label}",
            round=0,
            setting=diverged.setting(1),
            reason="ArithmeticError: the loss is nan after 9 steps",
        ),
    ]
    path.write_text("".join(f"{run.model_dump_json()}\n" for run in runs))
    run = PredictedRun(
        step_s=Interval(p5=0.1, nominal=0.12, p95=0.15), evidence=Evidence.MEASURED, untimed=()
    )
    settings = {entry.setting(1): run for entry in (good, diverged)}
    document = judge_models(
        ModelsRequest(profile=profile(Machine()), folder=tmp_path),
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


def test_several_ranks_run_under_ddp() -> None:
    (model, *_) = drawn_models()
    assert model.setting(1).synchronisation is Synchronisation.NONE
    assert model.setting(2).synchronisation is Synchronisation.DDP
