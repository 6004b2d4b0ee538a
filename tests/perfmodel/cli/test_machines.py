"""Machines that nobody here measured, by name, on pages and in searches; what decisions print and write."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import socket
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.documents.budget import BatchDocument
from perfmodel.documents.plan import PlanDocument
from perfmodel.documents.prediction import PredictedPoint, PredictionDocument
from perfmodel.errors import EXIT_OK
from perfmodel.machine import Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.page import PageQuestion, read_machines, server, unmeasured_machines
from perfmodel.page.answers import Answers
from perfmodel.page.server import start
from perfmodel.step import Cause
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.plan.plans import PLAN, TODAY

CLUSTER = ROOT / "docs" / "clusters" / "pcie-box.toml"


def plan_of(machine: str) -> str:
    """The plan of the other tests for LeNet on one device of a machine."""
    head, option, *_ = PLAN.replace('"heavy"', '"lenet"').split("[[option]]")
    option = option.replace("{ first = 1, last = 16 }", "[1]").replace("[4, 16]", "[16]")
    return f"{head}[[option]]{option.replace('slow.json', machine)}"


def test_a_plan_names_machines_that_ship_and_a_model(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of("titan-rtx"), encoding="utf-8")
    asked = f"plan options {plan} --today {TODAY}"
    told = PlanDocument.of_text(run(f"{asked} --json").stdout)
    assert [(each.profile, each.basis) for each in told.machines] == [("titan-rtx", "inferred")]
    traced_lenet = pm.trace("lenet", precision="fp16", device_kind="as-cuda")
    [row] = (each.row for each in told.options)
    [point] = pm.predict("titan-rtx", traced_lenet, devices=1, batch=row.micro_batch).points
    assert row.step_s.nominal == pytest.approx(point.step_s.nominal, rel=1e-6)

    plan.write_text(plan_of("titan-rtz"), encoding="utf-8")
    refused = complaint(run(asked), 2)
    assert "option.profile: must be a file or a name of perfmodel machines" in refused
    assert "titan-rtx?" in refused


def test_serve_starts_before_anything_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pm.trace("lenet", device_kind="as-cuda").write(tmp_path / "lenet.json")
    served: list[Answers] = []

    def serve(answers: Answers, on: socket) -> None:
        served.append(answers)
        on.close()

    monkeypatch.setattr(server, "serve", serve)
    told = run("serve", "--workload", "lenet.json", "--port", "0")
    assert told.exit_code == 0, told
    assert "machines inferred from steps of others" in told.stderr
    [answers] = served
    question = start(answers.catalogue)
    assert (question.profile, question.layout) == ("dgx-a100", "dp=8")
    assert answers.answer(question)["evidence"]["compute"] == "inferred"


def test_a_model_is_traced_once_for_machines_of_one_precision() -> None:
    files = unmeasured_machines()
    machines = read_machines(files, ["lenet"], validation=None, clusters=[CLUSTER])
    offered = [each for each in machines.values() if each.kind == "calibrated"]
    traces = {id(each.workloads["lenet"].document) for each in offered}
    costs = [
        each.machine.device_costs for each in offered if isinstance(each.machine, MeasuredMachine)
    ]
    precisions = {each.usual_precision for each in costs if each is not None}
    assert len(traces) == len(precisions)
    answers = Answers(machines)
    asked = PageQuestion(
        profile="titan-rtx", workload="lenet", layout="dp=8", batch=32, cluster="pcie-box"
    )
    here, there = (
        answers.answer(asked.model_copy(update={"profile": name}))
        for name in ("titan-rtx", "rtx-3090")
    )
    assert here["step_s"] != there["step_s"]
    assert "--profile titan-rtx --workload lenet" in here["command"]


def test_layouts_of_a_traced_model_on_a_machine_by_name(run: Run) -> None:
    """Sharding divides the update among eight, two stages halve the passes."""
    asked = ("predict", "--machine", "dgx-a100", "--workload", "torchvision:resnet50", "--json")

    def predicted(layout: str) -> PredictedPoint:
        printed = run(*asked, "--layout", f"{layout} micro_batch=64").stdout
        [point] = PredictionDocument.of_text(printed).points
        return point

    ddp, sharded, staged = map(predicted, ("dp=8", "fsdp=8", "dp=4 pp=2"))
    spent_s = ddp.breakdown_s[Cause.OPTIMIZER]
    # Launches, at least one of every unit, are not divided.
    assert spent_s / 8 < sharded.breakdown_s[Cause.OPTIMIZER] < spent_s / 3
    for passes in (Cause.FORWARD, Cause.BACKWARD):
        assert sharded.breakdown_s[passes] == pytest.approx(ddp.breakdown_s[passes], rel=0.02)
    assert staged.step_s.nominal < ddp.step_s.nominal
    assert staged.samples_per_s.nominal < 0.6 * ddp.samples_per_s.nominal
    assert sharded.evidence["work of the layout's library"] is Evidence.ASSUMED


def test_a_config_is_a_model_and_half_a_node_is_a_node(run: Run, tmp_path: Path) -> None:
    """Links between nodes of four are those that gradients wait for."""
    config, sizes = tmp_path / "config.json", {"n_embd": 64, "n_layer": 2, "n_head": 2}
    sizes |= {"n_positions": 32, "vocab_size": 99}
    config.write_text(json.dumps({"model_type": "gpt2"} | sizes))
    asked = f"predict --machine dgx-a100 --workload {config} --json --layout dp=8 --cluster"
    near, far = (
        PredictionDocument.of_text(run(f"{asked} '4 nvlink3, 2 {link}'").stdout).points[0]
        for link in ("ib-ndr", "eth-25")
    )
    assert near.exposed_comm_s.nominal < far.exposed_comm_s.nominal


LARGE = ("plan", "options", ROOT / "docs" / "plan.7b.toml", "--today", "2026-11-21")


def test_what_was_chosen_is_a_task_for_skypilot(run: Run, tmp_path: Path) -> None:
    """64 devices in nodes of 8; the file says that its prices are invented, and so does every answer."""
    result = run(*LARGE, "--export", tmp_path / "task.yaml")
    assert result.exit_code == EXIT_OK
    assert "warning: PRICES ARE INVENTED (2 of 2)" in result.stdout
    assert re.search(
        r"a little more money: reserved, ZeRO-3 \(128 x H100\) costs 1\.4 % more", result.stdout
    )
    assert "llama2-7b: 1,000,000,000,000 tokens from" in result.stdout
    assert result.stdout.count("caveat: ") == 3
    run(*LARGE, "--report", tmp_path / "decision.html")
    assert "<dt>Layout</dt>" in (tmp_path / "decision.html").read_text(encoding="utf-8")
    task = (tmp_path / "task.yaml").read_text(encoding="utf-8")
    assert 'num_nodes: 8\nresources:\n  accelerators: "H100:8"\nrun: |\n' in task
    assert "torchrun --nnodes" in task


def test_a_program_tells_skypilot_the_predicted_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky: Any = ModuleType("sky")
    made: list[Any] = []
    sky.Resources = lambda accelerators: accelerators
    monkeypatch.setitem(sys.modules, "sky", sky)
    answer = run(*LARGE, "--export", tmp_path / "task.py", "--json")
    ranked = PlanDocument.of_text(answer.stdout).ranked
    as_many = [row.elapsed_s.nominal for row in ranked if row.devices == ranked[0].devices]
    names: dict[str, Any] = {"__name__": "task"}
    exec((tmp_path / "task.py").read_text(encoding="utf-8"), names)  # noqa: S102
    resources = SimpleNamespace(accelerators={"H100": 8})
    assert names["time_estimator"](resources) == round(min(as_many))
    sky.Task = lambda **given: SimpleNamespace(
        **given, set_resources=made.append, set_time_estimator=made.append
    )
    names["task"]()
    assert made == [{"H100:8"}, names["time_estimator"]]
    # sky.optimize would hand YAML to a server, which knows no estimator.
    sky.Dag = lambda: nullcontext("dag")
    sky.Optimizer = SimpleNamespace(optimize=made.append)
    exec((tmp_path / "task.py").read_text(encoding="utf-8"), names | {"__name__": "__main__"})  # noqa: S102
    assert made[-1] == "dag"


def test_devices_are_priced_by_the_profile(run: Run, stored: Path) -> None:
    """Samples per second are those of predict; the speed-up that counts is smaller."""
    devices = f"--workload light --profile {stored} --devices 2,8 --micro-batch 16"
    result = run(f"batch {devices} --points 32=1000,128=1700 --json")
    document = BatchDocument.of_text(result.stdout)
    assert [entry.batch for entry in document.outlooks] == [32, 128]
    last = document.outlooks[-1]
    assert existing(last.throughput_speedup) > 1.5 * existing(last.target_speedup).nominal
    assert last.time_to_target_s is not None
