"""The Chrome trace of a step: what HTA and Perfetto look for."""

import json
from typing import Any

import pytest

from perfmodel.report.chrome_trace import chrome_trace_text
from tests.perfmodel.report.samples import plain_trace


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
