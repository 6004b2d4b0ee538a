"""Answers in notebooks."""

import datetime as dt
import importlib
from pathlib import Path
from typing import Any, Final

import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.errors import UsageError
from tests.perfmodel.cli.test_trace_command import document as workload
from tests.perfmodel.cost.large_samples import document as inferred
from tests.perfmodel.profiles import Machine, profile

DOCS: Final = Path(__file__).parents[3] / "docs"
TODAY: Final = dt.date(2026, 11, 23)
MACHINE = profile(Machine(noise=(0.9, 1.0, 1.1), residual=0.03))


@pytest.fixture
def predicted() -> PredictionDocument:
    return pm.predict(MACHINE, "light", devices=(1, 4), batch=16)


@pytest.fixture
def compared() -> WhatIfDocument:
    return pm.whatif(MACHINE, "light", {"devices": "16"}, devices=4)


def test_an_answer_prints_as_on_the_command_line(predicted: PredictionDocument) -> None:
    assert "light on" in str(predicted)
    assert "[p5-p95]: 90 %" in str(predicted)
    assert len(repr(predicted)) < 80


def test_a_notebook_shows_tables_whose_names_are_text(
    predicted: PredictionDocument, compared: WhatIfDocument
) -> None:
    for found in (predicted, compared):
        shown = found._repr_html_()
        assert shown.count("<table>") == shown.count("</table>") == 1
    evil = predicted.model_copy(update={"workload": "<script>x</script>"})
    assert "<script>" not in evil._repr_html_()


def test_points_are_rows_of_a_frame(
    predicted: PredictionDocument, compared: WhatIfDocument
) -> None:
    frame = predicted.to_frame()
    assert list(frame["world_size"]) == [1, 4]
    assert frame["step_nominal_s"][1] == predicted.points[1].step_s.nominal
    assert list(compared.to_frame()["scenario"]) == ["as it is", "devices=16"]


def test_a_picture_has_two_panels(predicted: PredictionDocument) -> None:
    assert len(predicted.plot().axes) == 2


def test_what_is_not_installed_is_named(
    predicted: PredictionDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return found(name, *rest)

    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match="pip install pandas"):
        predicted.to_frame()


def test_every_answer_has_rows_and_a_picture(compared: WhatIfDocument) -> None:
    """Bars are as many as rows, in the order of the table."""
    diagnosed = pm.diagnose(
        "llama3-8b", device="h200-sxm", precision="bf16", micro_batch=1, strategy="fsdp",
        observed="1 node of 8: 3 s",
    )  # fmt: skip
    searched = pm.search(inferred().machine, "gpt2-xl", devices=8, global_batch=64)
    reported = pm.memory(workload(), capacity_bytes=2**34)
    terms = pm.acceptance_terms(MACHINE, "light")
    cause = pm.FailureCause(name="gpu", mtbf_device_s=1e9)
    job = pm.Job(
        devices=8, work_s=1e6, checkpoint_interval_s=3e3, checkpoint_write_s=9, causes=(cause,)
    )
    for found, column in (
        (compared, "scenario"),
        (diagnosed, "cause"),
        (searched, "layout"),
        (reported, "name"),
        (pm.explain(MACHINE, "light", devices=4), "cause"),
        (pm.compare_profiles(MACHINE, MACHINE), "what"),
        (terms, "name"),
        (pm.judge(terms, MACHINE), "clause_name"),
        (pm.plan_options(DOCS / "plan.example.toml", today=TODAY), "choice"),
        (pm.compare_costs(DOCS / "budget.example.toml", today=TODAY), "cost_name"),
        (pm.goodput(job, replicas=10), "activity"),
    ):
        names = list(found.to_frame()[column])[:24]
        figure = found.plot()
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
        figure.canvas.draw()
        [title] = figure.texts
        assert title.get_window_extent().width <= figure.bbox.width, found
        assert len(repr(found)) < 80
        assert "\n" in str(found)
    assert sum(diagnosed.to_frame()["odds"]) == pytest.approx(1)


def test_workloads_and_machines_have_short_names() -> None:
    assert len(repr(workload())) < 80
    assert "parameters: " in str(workload())
    assert repr(MACHINE) == "<MeasuredMachine: synthetic>"
    assert repr(inferred().machine).startswith("<InferredMachine: ")
    assert len(repr(inferred())) < 80
    named = pm.predict("dgx-h100", "torchvision:resnet50", devices=8)
    assert named.workload == "torchvision:resnet50"
