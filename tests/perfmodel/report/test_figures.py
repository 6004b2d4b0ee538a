"""Figures show every point of the documents, the same bytes twice; the Chrome trace that HTA looks for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import perfmodel as pm
from perfmodel.report.chrome_trace import chrome_trace_text
from perfmodel.report.figures import (
    breakdown_figure,
    figure_bytes,
    front_figure,
    judged_pictures,
    predicted_pictures,
    speedup_figure,
)
from tests.perfmodel.plan.plans import TODAY, written
from tests.perfmodel.report.samples import plain_prediction, plain_trace, plain_validation


def pictures() -> dict[str, Figure]:
    predictions = [plain_prediction(), plain_prediction(workload="lenet")]
    found = [*predicted_pictures(predictions), *judged_pictures(plain_validation())]
    return {picture.name: picture.figure for picture in found}


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    found = next(entry for entry in axes.get_lines() if entry.get_label() == label)
    x, y = np.asarray(found.get_xdata()), np.asarray(found.get_ydata())
    return list(zip(x.tolist(), y.tolist(), strict=True))


def test_axes_are_labelled_with_units() -> None:
    found = pictures()
    assert {"speedup", "breakdown-lenet", "parity"} <= {*found}
    for figure in found.values():
        for axes in figure.axes:
            assert "[" in axes.get_xlabel()
            assert "[" in axes.get_ylabel() or axes.get_ylabel() == "Setting"
            assert axes.get_title()


def test_the_same_document_gives_the_same_file() -> None:
    for name in ("speedup", "parity"):
        first, second = (figure_bytes(pictures()[name], format="svg") for _ in range(2))
        assert first == second
        assert b"dc:date" not in first


def test_speedup_shows_every_prediction_and_every_real_run() -> None:
    prediction = plain_prediction()
    speedup, efficiency = speedup_figure([prediction, plain_prediction(workload="lenet")]).axes
    expected = [(p.setting.world_size, p.speedup.nominal) for p in prediction.points if p.speedup]
    assert line(speedup, "resnet18, weak scaling") == expected
    assert line(speedup, "lenet, weak scaling") == expected
    assert line(speedup, "resnet18, measured") == [(1, 1.0), (2, 1.91)]
    assert line(speedup, "ideal") == [(n, n) for n in (1, 2, 4, 8, 64)]
    assert line(efficiency, "resnet18, measured") == [(1, 100.0), (2, 95.5)]
    assert len(speedup.collections) == 2
    assert speedup.get_xscale() == "log"


def test_dollars_and_underscores_in_a_name_are_shown() -> None:
    figure = speedup_figure([plain_prediction(workload="_$net_{$")])
    assert b"_$net_{$, weak scaling" in figure_bytes(figure, format="svg")


def test_nothing_is_said_to_be_nothing() -> None:
    assert b"nothing measured" in figure_bytes(speedup_figure([]), format="svg")
    empty = breakdown_figure(plain_prediction(world_sizes=()))
    assert b"nothing measured" in figure_bytes(empty, format="svg")


def test_a_plot_names_its_subject_and_shades_what_was_extrapolated() -> None:
    """Two devices were measured, four were not: the shade begins between them."""
    figure = speedup_figure([plain_prediction()])
    assert figure.get_suptitle() == "resnet18 on AMD EPYC 9654, batch 32 of each device"
    [shade] = [
        patch for axes in figure.axes[:1] for patch in axes.patches if isinstance(patch, Rectangle)
    ]
    assert shade.get_label() == "extrapolated"
    assert shade.get_x() == pytest.approx(8**0.5)
    assert shade.get_x() + shade.get_width() > 64


@pytest.mark.parametrize(("budget", "is_drawn"), [(1.5, True), (10.0, False)])
def test_a_budget_far_above_all_costs_does_not_press_them_together(
    tmp_path: Path, *, budget: float, is_drawn: bool
) -> None:
    document = pm.plan_options(written(tmp_path), today=TODAY)
    rows = (*document.ranked, *document.front, *(entry.row for entry in document.options))
    highest = max(row.cost.nominal for row in rows)
    limits = document.plan.limits.model_copy(update={"budget": budget * highest})
    plan = document.plan.model_copy(update={"limits": limits})
    figure = front_figure(document.model_copy(update={"plan": plan}))
    [axes] = figure.axes
    assert (axes.get_ylim()[1] > budget * highest) == is_drawn
    assert any("budget" in str(line.get_label()) for line in axes.lines)


def events(ph: str) -> list[dict[str, Any]]:
    document = json.loads(chrome_trace_text(plain_trace(), name="resnet18"))
    return [event for event in document["traceEvents"] if event["ph"] == ph]


def test_times_are_microseconds_and_add_up() -> None:
    trace = plain_trace()
    spans = [event for event in events("X") if event["cat"] != "user_annotation"]
    assert len(spans) == 2 * 4
    total_us = float((trace.end_s - trace.start_s).sum()) * 1e6
    assert sum(event["dur"] for event in spans) == pytest.approx(total_us)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(trace.step_s * 1e6)


def test_each_rank_is_a_process_and_each_stream_a_named_thread() -> None:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events("M") if e["name"] == "thread_name"
    }
    for event in events("X"):
        assert (event["pid"], event["tid"]) in names
    assert set(names.values()) == {"host", "compute", "comm", "step"}
    processes = [e["args"]["name"] for e in events("M") if e["name"] == "process_name"]
    assert processes == ["rank 0: resnet18 (simulated)", "rank 1: resnet18 (simulated)"]


def test_operations_carry_category_cause_and_size() -> None:
    by_name = {event["name"]: event for event in events("X") if event["pid"] == 1}
    assert [by_name[name]["cat"] for name in ("dispatch", "forward")] == ["cpu_op", "kernel"]
    bucket = by_name["bucket 0"]
    assert (bucket["cat"], bucket["ts"], bucket["dur"]) == (
        "kernel",
        *map(pytest.approx, (6e3, 1e3)),
    )
    known = {"cause": "all_reduce", "size_bytes": 4096, "Group size": 2}
    assert known.items() <= bucket["args"].items()
