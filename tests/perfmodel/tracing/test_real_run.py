"""A step on tensors without content runs the operators of a real one."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.tracing.source import SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import trace_model
from perfmodel.workload.step import StepMethod
from tests.perfmodel.tracing.method import ADAMW_FUSED, ADAMW_LOOP, SGD

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


@pytest.mark.parametrize("text", ["lenet", "resnet18", "transformer"])
def test_watching_a_step_adds_no_operators(text: str) -> None:
    source = find_source(text)
    workload = trace_model(source, SGD, micro_batch=2).workload
    module, batch = source.build(), source.draw_batch(2)
    with Counter() as counter:
        source.loss(module(*batch.positional), batch.targets).backward()  # type: ignore[no-untyped-call]
    assert workload.num_operators == counter.calls
