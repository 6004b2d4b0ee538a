"""``perfmodel trace`` and ``perfmodel memory`` as a user sees them, and what they refuse."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perfmodel.answer import open_question, stage_memory
from perfmodel.answer.memory import report_of
from perfmodel.cost.memory import CONTEXT, WORKSPACES
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import EXIT_OK, UsageError
from perfmodel.layout import Layout
from perfmodel.machine import OVERHEADS
from perfmodel.tracing import recorder
from perfmodel.units import MIB
from perfmodel.workload import Phase
from perfmodel.workload.step import StepMethod
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.workload.memory_samples import step_memory, step_trace

FACTORIES = """
import torch
from torch import nn

class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        x = self.inner(x)
        return x * 2 if x.sum() > 0 else x

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.used(x)

class Fickle(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.shape[0] < 16 else super().forward(x).relu()

def good(): return nn.Linear(4, 3), torch.zeros(1, 4)
def with_loss(): return nn.Linear(4, 3), {"input": torch.zeros(1, 4)}, lambda out: out.square().mean()
def choosy(): return Choosy(), torch.zeros(1, 4)
def peeking(): return Peeking(), torch.zeros(1, 4)
def fickle(): return Fickle(4, 3), torch.zeros(1, 4)
def narrow(): return nn.Sequential(nn.Linear(5, 3)), torch.zeros(1, 4)
def raising(): raise RuntimeError("no licence")
def asking(size): return nn.Linear(size, 3), torch.zeros(1, size)
def short():
    targets = torch.zeros(4, dtype=torch.long)
    return nn.Linear(4, 3), torch.zeros(4, 4), lambda scores: nn.functional.cross_entropy(scores, targets)
def bare(): return nn.Linear(4, 3)
def vector(): return *good(), lambda scores: scores
class Attending(nn.Linear):
    def forward(self, batch, mask):
        return super().forward(mask @ batch["text"]["rows"]).mean(1)
def nested():
    batch = {"text": {"rows": torch.zeros(32, 6, 4)}, "ages": torch.zeros(32)}
    return Attending(4, 3), (batch, torch.zeros(6, 6), torch.zeros(32, dtype=torch.long))
def number(): return 7
def nothing(): return ()
class Unprintable(Exception):
    def __str__(self): raise self
class Failing(nn.Linear):
    def forward(self, x): raise Unprintable
def unprintable(): return Failing(4, 3), torch.zeros(1, 4)
def sparse(): return nn.Linear(4, 3), torch.zeros(1, 4).to_sparse()
def without_gradients():
    torch.set_grad_enabled(False)
    return good()
def moving():
    import os
    os.chdir("/")
    return good()
def empty(): return nn.ReLU(), torch.zeros(1, 4)
def compiled(): return torch.compile(nn.Linear(4, 3)), torch.zeros(1, 4)
@torch.library.custom_op("perfmodel_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2
opaque.register_autograd(lambda ctx, gradient: gradient * 2)

@torch.library.custom_op("perfmodel_tests::strange", mutates_args=())
def strange(x: torch.Tensor) -> torch.Tensor:
    return x * 2
strange.register_fake(lambda x: torch.empty_like(x))
strange.register_autograd(lambda ctx, gradient: gradient * 2)

class Custom(nn.Linear):
    def __init__(self, operator):
        super().__init__(4, 4)
        self.operator = operator
    def forward(self, x):
        return self.operator(super().forward(x))

class Selecting(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return scores[scores > 0].sum()

class Decorated(nn.Linear):
    @torch.compile
    def forward(self, x):
        return super().forward(x)

def own_compile():
    module = nn.Linear(4, 3)
    module.compile()
    return module, torch.zeros(1, 4)

def without_rule(): return nn.Sequential(Custom(opaque)), torch.zeros(1, 4)
def with_rule(): return nn.Sequential(Custom(strange)), torch.zeros(1, 4)
def selecting(): return nn.Sequential(Selecting(4, 4)), torch.zeros(1, 4)
def copied():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return encoder, torch.zeros(1, 5, 8), lambda out: out.square().mean()
def decorated(): return Decorated(4, 3), torch.zeros(1, 4)
def wide(): return nn.Linear(4, 3), torch.zeros(1, 2, 4)
def fixed():
    targets = torch.zeros(8, dtype=torch.long)
    return nn.Linear(4, 3), torch.zeros(8, 4), lambda scores: nn.functional.cross_entropy(scores, targets)
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FACTORIES, encoding="utf-8")
    return path


def test_a_model_becomes_a_file_that_serves_every_batch(
    run: Run, factories: Path, tmp_path: Path
) -> None:
    """``nn.TransformerEncoder`` copies its layer, and warns of nothing."""
    path = tmp_path / "out.json"
    result = run(f"trace {factories}:copied --micro-batch 4 --output {path}")
    assert result.exit_code == EXIT_OK, result
    assert f"workload: {path}" in result.stdout
    assert "UserWarning" not in result.stderr
    document = WorkloadDocument.read(path)
    one, many = (existing(document.trace).at(micro_batch=n) for n in (1, 300))
    assert many.flop(Phase.FORWARD) == 300 * one.flop(Phase.FORWARD)
    assert document.workload.forward_flop == one.flop(Phase.FORWARD)


def test_a_traced_file_does_not_tell_where_it_was_traced(
    run: Run, factories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in every other document: paths below the working folder are relative to it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "out.json"
    run("trace", f"{factories}:good", "--output", path)
    found = existing(WorkloadDocument.read(path).provenance)
    assert found.command_line == ("perfmodel", "trace", "mine.py:good", "--output", "out.json")


def test_autocast_computes_in_its_type(run: Run, factories: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        result = run(f"trace {factories}:without_gradients --precision {precision} --output {path}")
        step = WorkloadDocument.read(path).trace.at(micro_batch=8)
        assert {spec.dtype for o in step.operators if o.flop for spec in o.inputs} == {dtype}
        assert {parameter.dtype for parameter in step.parameters} == {"float32"}
        assert ("gradient scaler" in result.stdout) == (precision == "fp16")


def test_what_a_factory_does_to_the_folder_moves_no_answer(
    run: Run, factories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"trace {factories}:moving --output here.json").exit_code == EXIT_OK
    assert (tmp_path / "here.json").exists()


_CHANGING = """
import sys
import torch
sys.path{change}
def make():
    from own_layers import layer
    {later}
    return layer, torch.zeros(1, 4)
"""


@pytest.mark.parametrize("later", ["pass", "sys.path.clear()"])
@pytest.mark.parametrize("change", [".insert(0, {!r})", "[:] = [{!r}]"])
def test_a_file_may_change_where_modules_are_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, later: str
) -> None:
    """What it puts there serves its factory, too; what it takes away comes back."""
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_layers.py").write_text("import torch\nlayer = torch.nn.Linear(4, 3)\n")
    path = tmp_path / "changing.py"
    path.write_text(_CHANGING.format(change=change.format(str(own)), later=later))
    assert run("trace", f"{path}:make", "--output", tmp_path / "o.json").exit_code == EXIT_OK
    assert str(tmp_path) not in sys.path
    assert set(before) < set(sys.path)


@pytest.mark.parametrize("mode", ["autograd.set_detect_anomaly(True)", "set_grad_enabled(False)"])
def test_a_file_may_set_how_gradients_are_taken(run: Run, tmp_path: Path, mode: str) -> None:
    """A trace has a backward pass, and no values in which NaN could stand."""
    path = tmp_path / "setting.py"
    path.write_text(
        f"import torch\ntorch.{mode}\ndef make(): return torch.nn.Linear(4, 3), torch.zeros(1, 4)\n"
    )
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        assert run("trace", f"{path}:make", "--output", tmp_path / "o.json").exit_code == EXIT_OK
        assert torch.is_anomaly_enabled() == ("anomaly" in mode)


@pytest.mark.parametrize(("usual", "shapes"), [("_USUAL_CALLS", 1), ("_USUAL_CALLS_OF_FEW", 500)])
def test_a_pass_without_an_end_is_refused(
    run: Run, factories: Path, monkeypatch: pytest.MonkeyPatch, usual: str, shapes: int
) -> None:
    """With many operators of many shapes, or with far more of few."""
    monkeypatch.setattr(recorder, "_MOST_PASS_S", 0.0)
    monkeypatch.setattr(recorder, "_FEW_SHAPES", shapes)
    assert run(f"trace {factories}:choosy").exit_code == 0
    monkeypatch.setattr(recorder, usual, 1)
    result = run(f"trace {factories}:choosy")
    assert result.exit_code == 2
    assert "Trace a shorter sequence" in result.stderr


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
