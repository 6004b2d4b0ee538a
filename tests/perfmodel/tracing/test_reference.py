"""Recipes of the reference models, and steps on tensors without content against real ones."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from calibrate.device import Cpu
from calibrate.probes import Session, training
from perfmodel.layout import RunSetting
from perfmodel.models import is_traceable
from perfmodel.tracing.reference import MODELS, REFERENCES
from perfmodel.tracing.source import SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import trace_model
from perfmodel.workload.step import StepMethod
from tests.existing import existing
from tests.perfmodel.tracing.method import ADAMW_FUSED, ADAMW_LOOP, SGD


@pytest.fixture
def _group() -> Iterator[None]:
    """Of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_recipe_wraps_its_model_with_the_switches_of_ddp() -> None:
    """Steps with and without synchronisation take turns; a static graph is learned in one with it."""
    for name, is_on in (("resnet50", False), ("resnet50-tuned", True)):
        module = REFERENCES[name].wrapped(nn.Linear(2, 2))
        assert (module.gradient_as_bucket_view, module.static_graph) == (is_on, is_on)
        for is_local in (False, True, False, True, True):
            with module.no_sync() if is_local else nullcontext():
                module(torch.ones(1, 2)).sum().backward()
            assert existing(module.module.weight.grad).tolist() == [[1.0, 1.0]] * 2
            module.zero_grad()


@pytest.mark.usefixtures("_group")
def test_a_static_graph_is_learned_in_a_synchronised_pass_of_an_accumulating_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first setting of a model may accumulate: its own step would begin without synchronisation."""
    small = replace(
        REFERENCES["lenet"], name="small", ddp_options=REFERENCES["resnet50-tuned"].ddp_options
    )
    monkeypatch.setitem(REFERENCES, "small", small)
    setting = RunSetting(workload="small", world_size=1, micro_batch=1, accumulation=2)
    session = Session.open(Cpu(), group_sizes=())
    trainer = training._trainer(session, setting)
    before = [p.detach().clone() for p in trainer.module.parameters()]
    trainer.step(1, setting=setting, clock=session.measured.host_clock())
    after = list(trainer.module.parameters())
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_gpu_holds_one_model_at_a_time(
    monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool
) -> None:
    """The peak of a step is its own; a rank that has kept a model builds it again with rank 0, which has not."""
    monkeypatch.setattr(training, "_build", lambda *_, **__: object())
    session = Session(rank=1, world_size=2, measured=Cpu(), control={}, data={})
    monkeypatch.setattr(Cpu, "asynchronous", asynchronous)
    kept_by_rank_0 = iter((False, True, False, False))
    monkeypatch.setattr(Session, "agree", lambda *_, **__: next(kept_by_rank_0))
    small, large = (
        RunSetting(workload="resnet50", world_size=2, micro_batch=size) for size in (1, 2)
    )
    first = training._trainer(session, small)
    assert training._trainer(session, small) is first
    again = training._trainer(session, small)
    assert (again is first) is not asynchronous
    training._trainer(session, large)
    assert len(session.models) == 1


def test_cudnn_chooses_its_algorithms_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(training, "_build", lambda *_, **__: None)
    session: Any = SimpleNamespace(
        models={}, asynchronous=True, agree=lambda value, **_: value, clear=lambda **_: None
    )
    for name, is_on in (("resnet50-tuned", True), ("resnet50", False)):
        training._trainer(session, RunSetting(workload=name, world_size=2, micro_batch=1))
        assert torch.backends.cudnn.benchmark is is_on


SMALL = SampleSize(image_size=64)
CASES = [
    ("lenet", SampleSize(), SGD),
    ("resnet18", SampleSize(), replace(ADAMW_LOOP, precision="bf16")),
    ("transformer", SampleSize(), ADAMW_FUSED),
    ("transformer", SampleSize(), replace(SGD, precision="bf16", checkpointing="per-block")),
    ("torchvision:mobilenet_v3_small", SMALL, SGD),
]


@pytest.mark.parametrize(("text", "size", "method"), CASES)
def test_operators_modules_and_order_are_those_of_a_real_step(
    text: str, size: SampleSize, method: StepMethod
) -> None:
    steps: list[RecordedStep] = []
    for context in (without_content("cpu"), nullcontext()):
        with context:
            model = build_model(find_source(text, size), method)
            steps.append(record_step(model, 2))
    fake, real = steps
    assert fake.operators == real.operators
    assert fake.calls == real.calls
    assert list(fake.ready_after.items()) == list(real.ready_after.items())
    assert fake.saved_bytes == real.saved_bytes


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts and does nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_name_alone_is_torchvisions_unless_a_reference_model_has_it() -> None:
    theirs = set(models.list_models(module=models))
    found = {name for name in (*theirs, *REFERENCES, "resnet5o") if is_traceable(name)}
    assert found == theirs - MODELS.keys()


@pytest.mark.parametrize("text", ["lenet", "resnet18", "transformer"])
def test_watching_a_step_adds_no_operators(text: str) -> None:
    source = find_source(text)
    workload = trace_model(source, SGD, micro_batch=2).workload
    module, batch = source.build(), source.draw_batch(2)
    with Counter() as counter:
        source.loss(module(*batch.positional), batch.targets).backward()  # type: ignore[no-untyped-call]
    assert workload.num_operators == counter.calls
