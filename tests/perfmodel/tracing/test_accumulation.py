"""A trace adds gradients up as a real step does: in place where nobody else holds the sum so far."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.source import ModelSource
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import build_model, record_step, without_content
from perfmodel.workload import Call, Operator, Phase
from tests.perfmodel.tracing.method import SGD_LOOP

HELD: list[Tensor] = []


def three_readers(x: Tensor) -> Tensor:
    return x.sin() + x.cos() + x.exp()


def residual(x: Tensor) -> Tensor:
    """Both summands are given the same gradient: while one holds it, it stays as it is."""
    return x + x.sin() + x


def concatenated(x: Tensor) -> Tensor:
    """The first gradient is a part of a larger one."""
    return torch.cat((x, x.sin()), dim=1).cos() * torch.cat((x, x.exp()), dim=1)


def kept(x: Tensor) -> Tensor:
    """A script that holds on to a gradient."""
    a = x * 2
    a.retain_grad()
    HELD.append(a)
    return a.sin() + a.cos()


def transposed(x: Tensor) -> Tensor:
    return x.t().sin() + x.t().cos() + x.exp().t()


def in_parts(x: Tensor) -> Tensor:
    """Gradients of parts have gaps."""
    return x[:, ::2].sin() + x[:, ::2].cos()


class Doubled(torch.autograd.Function):
    """A gradient that a script adds up itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = gradients[0] + x
        return found


def added_by_a_script(x: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(x)
    return doubled.sin() + doubled.cos()


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Read the input twice."""
        return x.sin() + x


def checkpointed(x: Tensor) -> Tensor:
    """What is computed again adds as a forward pass does."""
    found: Tensor = checkpoint(Block(), x * 2, use_reentrant=False)
    return found


CASES = (
    *(three_readers, residual, concatenated, kept, transposed, in_parts),
    *(added_by_a_script, checkpointed),
)


def loss(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.ones(4, 6, requires_grad=True) * 1
    return function(x).sum()


def traced(function: Callable[[Tensor], Tensor]) -> Recorder:
    with without_content("cpu"), Recorder(ModulePaths(nn.Identity())) as recorder:
        start = loss(function)
        recorder.begin(Phase.BACKWARD)
        start.backward()  # type: ignore[no-untyped-call]
    found: Recorder = recorder
    return found


_SUMS = ("aten::add", "aten::add_")
_MICRO_BATCH = 2


def sums_of_calls(calls: Sequence[Call], operators: Sequence[Operator]) -> Counter[str]:
    """In the backward pass of a trace."""
    names = (operators[call.operator].name for call in calls if call.phase is Phase.BACKWARD)
    short = (f"aten::{name.split('.')[1]}" for name in names)
    return Counter(name for name in short if name in _SUMS)


def sums_of_backward(start: Tensor) -> Counter[str]:
    """In a real backward pass from here."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start.backward()  # type: ignore[no-untyped-call]
    names = (event.name for event in profiled.events() or ())
    return Counter(name for name in names if name in _SUMS)


def traced_and_real(source: ModelSource) -> tuple[Counter[str], Counter[str]]:
    """Of a model's step."""
    with without_content("cpu"):
        step = record_step(build_model(source, SGD_LOOP), _MICRO_BATCH)
    model = build_model(source, SGD_LOOP)
    model.optimizer.zero_grad()
    batch = source.draw_batch(_MICRO_BATCH)
    outputs = model.module(*batch.positional, **batch.keyword)
    return (
        sums_of_calls(step.calls, step.operators),
        sums_of_backward(source.loss(outputs, batch.targets)),
    )


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_sums_of_a_traced_backward_pass_are_those_of_a_real_one(
    function: Callable[[Tensor], Tensor],
) -> None:
    recorder = traced(function)
    found = sums_of_calls(recorder.calls, recorder.operators)
    assert found == sums_of_backward(loss(function))
    assert found.total() > 0


DENSE = """
import torch
from torchvision.models import DenseNet


def model():
    return DenseNet(8, (3, 4), 16, num_classes=10), torch.randn(2, 3, 32, 32)
"""


def test_sums_of_a_model_whose_layers_read_all_before_them_are_those_of_a_real_step(
    tmp_path: Path,
) -> None:
    file = tmp_path / "dense.py"
    file.write_text(DENSE)
    found, real = traced_and_real(find_source(f"{file}:model"))
    assert found == real
    assert found["aten::add_"] > found["aten::add"] > 0


def test_a_sum_in_place_makes_no_tensor() -> None:
    sums = [o for o in traced(three_readers).operators if o.name == "aten.add_.Tensor"]
    assert {(operator.mutated, operator.outputs) for operator in sums} == {((0,), ())}
