"""The commands about memory, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

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


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    document().write(path)
    return path


def test_a_step_that_fits(run: Run, traced: Path) -> None:
    """8 samples: 200 MiB of tensors, 2 % slack, 300 MiB of context."""
    result = run(f"memory --workload {traced} --device-memory 1GiB --micro-batch 8 --json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["schema_version"] == 2
    assert found["needed_bytes"] == 504 * MIB
    assert found["verdict"] == "fits"
    assert found["largest_micro_batch"] > 8
    assert found["peak"]["phase"] == "backward"


def test_a_virtual_gpu_is_one_device_for_every_command() -> None:
    """Of CUDA, whatever the trace is of; workspaces and groups of libraries take nothing there."""
    machine, known = replace(profile(Machine()), device_kind="virtual"), document()
    report = report_of(known, 1 << 30, machine=machine, micro_batch=8, devices=4)
    question = open_question(machine, known).at(Layout(dp=4, micro_batch=8))
    assert (report.found,) == stage_memory(question)
    assert report.found.parts[CONTEXT] == OVERHEADS["cuda"].context_bytes
    assert report.found.parts.get(WORKSPACES, 0) == 0


def test_a_machine_by_name_has_the_memory_of_its_data_sheet(run: Run) -> None:
    result = run("memory", "--workload", "lenet", "--machine", "dgx-a100", "--json")
    assert json.loads(result.stdout)["capacity_bytes"] == 80 * 1024 * MIB


def test_the_table_says_verdict_and_remedies(run: Run, traced: Path) -> None:
    result = run("memory", "--workload", traced, "--device-memory", "500MiB", "--micro-batch", 8)
    assert result.exit_code == 0
    assert "too close to call: 504 MiB" in result.stdout
    assert "What to change first" in result.stdout
    assert "not tried, may need less: perfmodel trace --precision bf16" in result.stdout


def test_another_batch_and_kernels_than_those_of_the_trace_are_caveats(
    run: Run, traced: Path
) -> None:
    asked = f"memory --workload {traced} --device-memory 80GiB --micro-batch 999"
    told = run(f"{asked} --device-kind cuda").stdout
    assert "caveat: micro-batch 999 is far from the traced 4 and 8" in told
    assert "caveat: traced with the kernels of cpu" in told
    assert "was checked on an H100 and an H200 only" in told


def test_a_model_is_traced_for_the_question(run: Run) -> None:
    """A convolution, a normalisation, a linear layer: 4.1 M parameters in fp32, with AdamW twice as much again."""
    asked = f"memory --workload {NET} --device a100-sxm4-80 --optimizer adamw --micro-batch 4"
    result = run(f"{asked} --json")
    assert result.exit_code == 0, result
    assert "traced with adamw in fp32 at micro-batch 4" in result.stderr
    parts = json.loads(result.stdout)["parts_bytes"]
    parameters = 4 * (64 * 27 + 64 + 128 + 4096 * 1000 + 1000)
    assert parts["parameters"] == pytest.approx(parameters, rel=0.01)
    assert parts["optimizer states"] == pytest.approx(2 * parameters, rel=0.01)


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
