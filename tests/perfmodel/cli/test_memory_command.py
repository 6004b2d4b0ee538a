"""The commands about memory, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

from perfmodel.answer import open_question
from perfmodel.answer.measured import stage_memory
from perfmodel.answer.memory import report_of
from perfmodel.cost.memory import CONTEXT, WORKSPACES
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import UsageError
from perfmodel.layout import Layout
from perfmodel.machine import OVERHEADS
from perfmodel.units import MIB
from perfmodel.workload.step import StepMethod
from tests.examples import ROOT
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.workload.memory_samples import step_memory, step_trace

NET = f"{ROOT / 'docs' / 'cases' / 'net.py'}:model"


def document(*, with_memory: bool = True) -> WorkloadDocument:
    return WorkloadDocument(
        workload=profile(Machine()).workloads[0].workload,
        trace=step_trace(MIB),
        memory=step_memory(MIB) if with_memory else None,
    )


def test_a_virtual_gpu_is_one_device_for_every_command() -> None:
    """Of CUDA, whatever the trace is of; workspaces and groups of libraries take nothing there."""
    machine, known = replace(profile(Machine()), device_kind="virtual"), document()
    report = report_of(known, 1 << 30, machine=machine, micro_batch=8, devices=4)
    question = open_question(machine, known).at(Layout(dp=4, micro_batch=8))
    assert (report.found,) == stage_memory(question)
    assert report.found.parts[CONTEXT] == OVERHEADS["cuda"].context_bytes
    assert report.found.parts.get(WORKSPACES, 0) == 0


def test_a_model_by_name_is_traced_with_other_precisions_and_optimizers_too(
    run: Run, tmp_path: Path
) -> None:
    """Rows of traces with another method; what they need is what the traces by themselves need."""
    step, asked = f"{NET} --micro-batch 2 --optimizer adamw", "--device-memory 4GiB --json"
    found = json.loads(run(f"memory --workload {step} {asked}").stdout)
    rows = {row["name"]: row for row in found["techniques"]}
    assert found["untried"] == []
    for option in ("--precision bf16", "--optimizer-implementation fused"):
        path = tmp_path / "other.json"
        run(f"trace {step} --output {path} {option}")
        other = run(f"memory --workload {path} --micro-batch 2 {asked}")
        assert rows[option]["needed_bytes"] == json.loads(other.stdout)["needed_bytes"]
        assert rows[option]["time_ratio"] is None
    # At least the temporaries of the update, as large as the parameters.
    saved_bytes = rows["--optimizer-implementation fused"]["saved_bytes"]
    assert saved_bytes >= found["parts_bytes"]["parameters"]


def test_a_model_that_refuses_another_precision_has_an_option_untried() -> None:
    """In bf16 already, and highest in backward: nothing else to try."""

    def refused(method: StepMethod) -> WorkloadDocument:
        raise UsageError(f"no kernel in {method.precision}")

    known = document()
    assert report_of(known, 1 << 30, trace_again=refused).untried == ("--precision bf16",)
    halved = replace(known.trace, method=replace(known.trace.method, precision="bf16"))
    assert not report_of(known.model_copy(update={"trace": halved}), 1 << 30).untried
