"""The picture of a step: what is drawn where, and how idle a stage is."""

from typing import Literal

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from perfmodel.cost.layout_time import layout_durations
from perfmodel.engine.simulate import simulate
from perfmodel.layout.layout import Layout
from perfmodel.report.timeline import MOST_LANES, timeline_bytes, timeline_figure
from perfmodel.step.compile import compile_layout
from perfmodel.step.program import Cause, Trace


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


def test_forward_passes_are_drawn_where_they_ran() -> None:
    trace = step(Layout(pp=2, accumulation=2))
    drawn = [c for c in timeline_figure(trace, title="x").axes[0].collections if _has_area(c)]
    # Per stage: idle, forward, backward, then what takes no time.
    forward = drawn[1]
    edges = [np.asarray(path.vertices)[:, 0] for path in forward.get_paths()]
    assert sorted(float(edge.min()) for edge in edges) == pytest.approx([0, 1])
    assert [float(np.ptp(edge)) for edge in edges] == pytest.approx([1, 1])


def _has_area(collection: object) -> bool:
    assert isinstance(collection, PolyCollection)
    return any(np.ptp(np.asarray(path.vertices)[:, 0]) > 0 for path in collection.get_paths())


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
