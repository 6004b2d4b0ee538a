"""The picture of a step, and its Chrome trace: what HTA and Perfetto look for."""

import json
from typing import Any, Literal

import numpy as np
import pytest

from perfmodel.cost.layout_time import layout_durations
from perfmodel.engine.simulate import simulate
from perfmodel.layout import Layout
from perfmodel.report.timeline import (
    MOST_LANES,
    chrome_trace_text,
    timeline_bytes,
    timeline_figure,
)
from perfmodel.step import Cause, Trace
from perfmodel.step.compile import compile_layout
from tests.perfmodel.report.samples import plain_trace


def step(layout: Layout, *, layers: int = 8) -> Trace:
    """Forward 1 s, backward 2 s, point-to-point sends and all else nothing."""
    times = dict.fromkeys(Cause, np.array(0.0))
    times |= {Cause.FORWARD: np.array(1.0), Cause.BACKWARD: np.array(2.0)}
    program = compile_layout(layout, layers=layers)
    return simulate(program, layout_durations(program, times)[np.newaxis])


def test_every_stage_says_how_idle_it_is() -> None:
    """Two stages, two micro-batches: (2 + 1) x 3 s, of which each works 6 s."""
    figure = timeline_figure(step(Layout(pp=2, accumulation=2)), title="two stages")
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == ["stage 0\nidle 33%", "stage 1\nidle 33%"]
    assert figure.axes[0].get_xlim() == (0, 9)


def test_of_many_stages_both_ends_are_shown() -> None:
    figure = timeline_figure(step(Layout(pp=40, accumulation=2), layers=40), title="many")
    labels = [tick.get_text().split("\n")[0] for tick in figure.axes[0].get_yticklabels()]
    assert len(labels) == MOST_LANES
    assert (labels[0], labels[-1]) == ("stage 0", "stage 39")


@pytest.mark.parametrize(
    ("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")]
)
def test_every_form_of_file(form: Literal["png", "svg", "html"], start: bytes) -> None:
    content = timeline_bytes(step(Layout(pp=2)), title="a <b> & c", form=form)
    assert content.startswith(start)
    if form == "html":
        assert b"<title>a &lt;b&gt; &amp; c</title>" in content
        assert b"<svg" in content


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
    assert by_name["dispatch"]["cat"] == "cpu_op"
    assert by_name["forward"]["cat"] == "kernel"
    bucket = by_name["bucket 0"]
    assert bucket["cat"] == "kernel"
    assert bucket["ts"] == pytest.approx(6000)
    assert bucket["dur"] == pytest.approx(1000)
    assert bucket["args"]["cause"] == "all_reduce"
    assert bucket["args"]["size_bytes"] == 4096
    assert bucket["args"]["Group size"] == 2
