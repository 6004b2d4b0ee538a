"""The judge of memory: sums, gates, and a run that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibrate import peak
from calibrate.device import Cpu
from perfmodel.cost.memory import WORKSPACES, TracedMemory
from perfmodel.errors import PerfModelError
from perfmodel.layout import Layout
from perfmodel.machine import OVERHEADS
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.trace import trace_model
from perfmodel.units import MIB
from tests.calibrate.played import runs
from tests.existing import existing
from tests.perfmodel.tracing.method import SGD_LOOP
from tests.turns import machine_is_held
from validate.judging import passed
from validate.memory import MemoryRun, Setting, measure, summarise_runs, validate_memory, verdict


def run(predicted: int, measured: int) -> MemoryRun:
    return MemoryRun(
        model="a model",
        micro_batch=2,
        optimizer="sgd",
        predicted_bytes=predicted,
        measured_bytes=measured,
        phase="backward",
        operator="aten.add.Tensor",
    )


def test_errors_are_signed_and_small_models_counted_apart() -> None:
    summary = summarise_runs(
        [run(102_000_000, 100_000_000), run(99_000_000, 100_000_000), run(500_000, 1_000_000)]
    )
    assert summary.large is not None
    assert summary.large.num_settings == 2
    assert summary.large.bias == pytest.approx(0.005)
    assert summary.large.mape == pytest.approx(0.015)
    assert summary.large.worst_absolute == pytest.approx(0.02)
    assert summary.worst_of_all == pytest.approx(0.5)


def test_a_worst_error_above_the_gate_fails() -> None:
    good = [run(100_000_000, 100_000_000)] * 9
    assert passed(summarise_runs(good).gates)
    worse = summarise_runs([*good, run(106_000_000, 100_000_000)])
    assert [gate.passed for gate in worse.gates] == [True, False]


def test_only_small_models_pass_no_gate_and_say_so() -> None:
    summary = summarise_runs([run(3, 2)])
    assert summary.gates == ()
    errors, caveat = verdict(summary)
    assert errors == "all 1: worst 50.00%"
    assert "no gate was judged; name larger models or batches" in caveat


def test_nobody_else_measures_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "validate.memory.measure", lambda *_, **__: iter([run(100_000_000, 100_000_000)] * 2)
    )
    held: list[bool] = []
    summary = validate_memory(
        ["lenet"], [2], out=tmp_path / "out.json", on_line=lambda _: held.append(machine_is_held())
    )
    assert held == [True, True]
    assert summary.num_settings == 2
    assert not machine_is_held()


HANGING = """
import os, sys, time
from calibrate import peak

def hang(name):
    print(os.getpid(), flush=True)
    time.sleep(100)

peak.find_source = hang
peak.main(sys.argv[1:])
"""


def test_a_run_ends_with_the_process_that_asked_for_it() -> None:
    command = (sys.executable, "-c", HANGING, "cpu", json.dumps([["lenet", 2, "sgd", "fp32"]]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        pid = int(existing(asking.stdout).readline())
        asking.kill()
    try:
        deadline_s = time.monotonic() + 10
        while runs(pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not runs(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_what_is_judged_is_what_an_answer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose products keep workspaces; blocks larger than asked for are slack in both."""
    monkeypatch.setattr(Cpu, "workspace_bytes", 8 * MIB)
    monkeypatch.setattr(peak, "allocator_peak_bytes", lambda *_: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    judged = peak.peaks("cpu", "transformer", 4, ("sgd", "fp32"), None)
    traced = trace_model(find_source("transformer"), SGD_LOOP, micro_batch=4)
    overhead = replace(OVERHEADS["cpu"], workspace_bytes=8 * MIB)
    memory = TracedMemory(trace=traced.step, memory=traced.memory, overhead=overhead)
    [found] = memory.ranks(Layout(micro_batch=4))
    assert found.parts[WORKSPACES] == 17 * MIB  # two threads, and products with a bias
    assert judged["predicted_bytes"] == found.tensor_bytes


def test_a_virtual_gpu_is_judged_by_its_allocator(tmp_path: Path) -> None:
    """Forward in bf16; the trace knows nothing of the device's allocator."""
    setting = Setting("lenet", 512, "sgd", "bf16")
    [found] = measure(tmp_path, [setting], device_kind="virtual", truth="balanced")
    assert abs(found.relative_error) < 0.01
    assert existing(found.reserved_bytes) >= found.measured_bytes
    assert found.context_bytes == 0
    assert summarise_runs([found]).at_most == (0.01, 0.03)


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    """The first setting has run by then."""
    asked = [Setting("lenet", 2, "sgd"), Setting("no such model", 2, "sgd")]
    runs = measure(tmp_path, asked, device_kind="cpu")
    assert next(runs).model == "lenet"
    with pytest.raises(
        PerfModelError, match=r"^no such model batch 2 sgd: the run failed: .*no such model"
    ):
        next(runs)
