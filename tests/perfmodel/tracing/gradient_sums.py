"""How often a backward pass adds gradients up, in place and not: traced, and in a real step."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from perfmodel.tracing.source import ModelSource
from perfmodel.tracing.step import build_model, record_step, without_content
from perfmodel.workload import Call, Operator, Phase
from tests.perfmodel.tracing.method import SGD_LOOP

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
