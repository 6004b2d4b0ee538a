"""Steps of nn.DataParallel from those of one GPU: families and cards left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate.step_fit import THREADS_PRIOR
from calibrate.step_table import Setting
from perfmodel.cost.step_law import ThreadedSteps
from perfmodel.documents.verdicts import CARRIED
from perfmodel.errors import UntraceableModel
from perfmodel.workload.step import Segment, TracedStep
from tests.calibrate.test_step_table import trace_named
from tests.validate.published.judged import opened
from validate.published.threads import Steps, judge_threads, thread_constants

MODULES = {"alpha_10": 20, "beta_10": 200, "gamma_10": 600}


def steps_of(*rows: tuple[float, float, float, float]) -> ThreadedSteps:
    return ThreadedSteps(*np.array(rows, dtype=float).T)


def trace(setting: Setting) -> TracedStep:
    """One operator in every module of a model."""
    name = setting.model.partition(":")[2]
    if name not in MODULES:
        raise UntraceableModel(f"{name} is odd")
    step = trace_named(replace(setting, model=name))
    (call, *_) = step.segments[0].calls
    calls = tuple(replace(call, module=f"layer{i}") for i in range(MODULES[name]))
    return replace(step, segments=(Segment(calls=calls, count=1),))


def rows(device: str, slower: float) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for alone_ms, (model, modules) in zip((20.0, 30.0, 90.0), MODULES.items(), strict=True):
        for gpus in (1, 2, 4):
            step_ms = alone_ms
            if gpus > 1:
                host = np.exp(THREADS_PRIOR) * np.array([slower, slower, 1.0, 1.0])
                one = steps_of((alone_ms / 1e3, gpus, modules, 0.0))
                step_ms = 1e3 * float(one.step_s(host)[0])
            cells: dict[str, object] = {
                "source": "s",
                "device": device,
                "wrapper": "nn.DataParallel" if gpus > 1 else "",
                "library": "torchvision",
                "framework": "PyTorch",
                "precision": "fp32",
                "memory_format": "contiguous",
                "batch_per_gpu": "12",
                "image": "224",
            }
            spread: dict[str, object] = {"p5_ms": step_ms, "p95_ms": 1.1 * step_ms}
            found.append(cells | spread | {"model": model, "gpus": str(gpus), "step_ms": step_ms})
    return found


def test_models_and_cards_left_out_are_predicted_from_one_gpu(tmp_path: Path) -> None:
    table = [*rows("a", 1.0), *rows("b", 1.5)]
    disturbed = table[-1] | {"gpus": "3", "p95_ms": 9e9, "step_ms": 5e3}
    elsewhere = [
        # Timed on one GPU: never, with another batch, without a result.
        table[-1] | {"device": "c"},
        table[-1] | {"batch_per_gpu": "24"},
        *(row | {"precision": "fp16"} for row in (table[-3] | {"step_ms": ""}, table[-1])),
        # Nobody can trace it.
        *(row | {"model": "odd_1"} for row in table[-3:]),
    ]
    opened_table = opened(tmp_path, "data_parallel", [*table, disturbed, *elsewhere])
    verdicts = {one.name.partition(", ")[2]: one for one in judge_threads(opened_table, trace)}
    assert [one.num_predicted for one in verdicts.values()] == [13, 12, 13, 12]
    assert {one.num_fitted for one in verdicts.values()} == {12}
    own = verdicts["2 cards, undisturbed runs; other models known"]
    other = verdicts["2 cards, undisturbed runs; other models on other cards known"]
    errors = {one.method: one.mape for one in own.errors}
    # The host of the other card is half as fast again; own models tell.
    assert errors["perfmodel"] < 0.1 < other.errors[0].mape < 0.4
    assert errors["perfmodel"] < min(errors["one ratio for each number of GPUs"], errors[CARRIED])
    assert opened_table.counted().left_out == {
        "models that cannot be traced": 2,
        "not timed on one GPU": 3,
        "one GPU, or another way to use several": 8,
    }
    [note] = opened_table.skipped
    assert note.endswith("torchvision:odd_1 cannot be traced: odd_1 is odd")


def test_what_ships_is_fitted_to_each_card_and_to_all(tmp_path: Path) -> None:
    """The host of one card is half as fast again, which a fit to both takes half of."""
    names = ("TITAN Xp", "TITAN RTX")
    table = [
        row for name, slower in zip(names, (1.0, 1.5), strict=True) for row in rows(name, slower)
    ]
    found = thread_constants(opened(tmp_path, "data_parallel", table), trace)
    slow, fast, both = (found[name] for name in ("titan-rtx", "titan-xp", "others"))
    assert slow["module_s"] / fast["module_s"] == pytest.approx(1.5, rel=0.1)
    assert fast["module_s"] < both["module_s"] < slow["module_s"]
    assert both["log_error"] > max(slow["log_error"], fast["log_error"])


def test_other_cards_are_as_uncertain_as_the_least_known(tmp_path: Path) -> None:
    """One step of 13 on a host that is three times as slow."""
    table = [*rows("TITAN Xp", 1.0), *rows("TITAN RTX", 1.0), *rows("GeForce RTX 2080 Ti", 3.0)[:2]]
    found = thread_constants(opened(tmp_path, "data_parallel", table), trace)
    assert found["titan-xp"]["log_error"] < 0.1
    assert found["others"]["log_error"] == pytest.approx(found["rtx-2080ti"]["log_error"])
    assert found["others"]["log_error"] > 0.1


def test_a_family_is_left_out_on_every_card() -> None:
    """What it takes on one card says nothing of it on another, nor of its own card."""
    sizes = [(gpus, modules) for modules in MODULES.values() for gpus in (2.0, 4.0)]
    law = steps_of(*((0.05, gpus, modules, 1e7) for gpus, modules in 2 * sizes))
    card, family = np.repeat(["a", "b"], 6), np.tile(np.repeat(list(MODULES), 2), 2)
    times_s = law.step_s(np.exp(THREADS_PRIOR))
    odd_s = np.where((card == "b") & (family == "gamma_10"), 3 * times_s, times_s)
    judged = (card == "a") & (family == "gamma_10")
    was, now = (
        Steps(law, step_s, card, family, np.zeros(12, bool)).left_out_s()
        for step_s in (times_s, odd_s)
    )
    for was_s, now_s in zip(was, now, strict=True):
        assert now_s[judged].tolist() == was_s[judged].tolist()


def test_nothing_on_several_gpus_is_said(tmp_path: Path) -> None:
    table = opened(tmp_path, "data_parallel", rows("a", 1.0)[:1])
    assert list(judge_threads(table, trace)) == []
    assert table.skipped == ["data_parallel: no model on one GPU and on several"]
