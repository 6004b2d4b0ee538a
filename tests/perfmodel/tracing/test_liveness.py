"""The sweep over live storages and the real allocator, on a model that can be added up by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from calibrate.peak import allocator_peak_bytes
from perfmodel.cost.memory import TracedMemory
from perfmodel.layout import Layout, Recompute
from perfmodel.machine import OVERHEADS
from perfmodel.tracing.liveness import LiveStorages, blocked_bytes
from perfmodel.tracing.source import Batch, ModelSource
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import joined_memory, trace_model
from perfmodel.units import MIB
from perfmodel.workload import Phase
from perfmodel.workload.memory import Part
from perfmodel.workload.step import StepMethod
from tests.perfmodel.tracing.method import ADAMW_LOOP, SGD_LOOP

WIDTH = 1000
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def source_of(name: str, build: Callable[[], nn.Module]) -> ModelSource:
    """A model of 1000 numbers with the sum as loss."""
    return ModelSource(
        name=name,
        sample="1000 numbers",
        build=build,
        draw_batch=lambda samples: Batch(positional=(torch.ones(samples, WIDTH),), keyword={}),
        loss=lambda outputs, _targets: outputs.sum(),
    )


def square() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


TWO_LAYERS = source_of("two layers", lambda: nn.Sequential(square(), nn.ReLU(), square()))


def recorded(source: ModelSource, how: StepMethod, micro_batch: int) -> RecordedStep:
    with without_content("cpu"):
        return record_step(build_model(source, how), micro_batch)


def column(step: RecordedStep, part: Part, phase: Phase) -> int:
    calls = [index for index, call in enumerate(step.calls) if call.phase is phase]
    return int(step.in_use[calls, list(Part).index(part)].max())


def test_every_part_of_two_layers_by_hand() -> None:
    """Weights 2 x 4 MB; SGD with momentum as much again; gradients too; 4 kB per sample and layer.

    Kept for backward: the first layer's result and its ReLU (and the second's result and the loss, which
    the step holds).
    """
    step = recorded(TWO_LAYERS, SGD_LOOP, 10)
    assert column(step, Part.PARAMETERS, Phase.FORWARD) == 2 * WEIGHT_BYTES
    assert column(step, Part.OPTIMIZER, Phase.FORWARD) == 2 * WEIGHT_BYTES
    assert column(step, Part.GRADIENTS, Phase.FORWARD) == 0
    assert column(step, Part.GRADIENTS, Phase.OPTIMIZER) == 2 * WEIGHT_BYTES
    assert column(step, Part.INPUTS, Phase.FORWARD) == 10 * 4 * WIDTH
    # The first layer's own result dies with the ReLU, which keeps its result instead.
    assert column(step, Part.ACTIVATIONS, Phase.BACKWARD) == 2 * 10 * 4 * WIDTH + 4


@pytest.mark.parametrize("method", [SGD_LOOP, ADAMW_LOOP], ids=lambda method: method.optimizer)
def test_the_allocator_agrees_to_a_thousandth(method: StepMethod) -> None:
    measured = allocator_peak_bytes(TWO_LAYERS, method, 10)
    assert recorded(TWO_LAYERS, method, 10).peak_bytes == pytest.approx(measured, rel=1e-3)
    if method is SGD_LOOP:
        # At the end of backward: weights, gradients, momentum, and less than 0.5 MB of batch.
        assert 6 * WEIGHT_BYTES < measured < 6 * WEIGHT_BYTES + 500_000


def test_views_and_in_place_operators_add_nothing() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = square()

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.layer(inputs)
            return hidden.relu_().view(-1).view(-1, WIDTH)

    step = recorded(source_of("in place", InPlace), SGD_LOOP, 10)
    # One result of 40 kB, and the scalar loss.
    assert column(step, Part.ACTIVATIONS, Phase.FORWARD) == 10 * 4 * WIDTH + 4


def test_two_batches_say_what_a_third_needs() -> None:
    with without_content("cpu"):
        model = build_model(find_source("resnet18"), ADAMW_LOOP)
        first, second, third = (record_step(model, batch) for batch in (4, 8, 32))
    memory = joined_memory(model.module, first, second)
    assert memory.peak_bytes(4) == first.peak_bytes
    assert memory.peak_bytes(8) == second.peak_bytes
    assert memory.peak_bytes(32) == pytest.approx(third.peak_bytes, rel=1e-3)
    assert memory.reserved_ratio >= 1


def test_blocks_and_checkpointing_agree_with_a_checkpointed_trace() -> None:
    source = find_source("transformer")
    plain = trace_model(source, SGD_LOOP, micro_batch=16)
    again = recorded(source, replace(SGD_LOOP, checkpointing="per-block"), 32)
    assert len(plain.memory.blocks) == 4
    traced = TracedMemory(trace=plain.step, memory=plain.memory, overhead=OVERHEADS["cpu"])
    [found] = traced.ranks(Layout(micro_batch=32, recompute=Recompute.FULL))
    assert found.tensor_bytes == pytest.approx(again.peak_bytes, rel=0.1)


def test_an_allocator_serves_two_steps() -> None:
    """States are made where the first has left memory: its largest result finds none there in the second.

    A library keeps 32 MiB from the first call on.
    """
    live = LiveStorages()
    owned = torch.empty(3 * MIB), torch.empty(6 * MIB)
    live.follow(owned[0], Part.PARAMETERS)
    live.follow(owned[1], Part.OPTIMIZER)
    live.begin(0)
    result = torch.empty(10 * MIB)
    live.follow(result)
    del result
    live.begin(5 * MIB)
    allocator = live.replayed([(0, 32 * MIB)])
    assert live.by_part().sum(axis=1).max() == (12 + 24 + 40) * MIB
    # The states take 24 of the 40 MiB that the result had.
    assert allocator.reserved_bytes == (12 + 32 + 40 + 40) * MIB
    assert allocator.peak_bytes == (12 + 24 + 32 + 40) * MIB


def test_blocked_layouts_cost_copies() -> None:
    """Inputs 10, weight 3, outputs 20, all copied: forward 10 + 3 + 20 before the result, 40 with it."""
    sizes = {"inputs": 10, "weight": 3, "outputs": 20, "blocked_inputs": 10, "blocked_outputs": 20}
    assert blocked_bytes(**sizes, for_inputs=None) == 20
    # Second half: the gradient of the inputs (10) beside copies of 20, 10 and 3; results are 10 + 3.
    assert blocked_bytes(**sizes, for_inputs=True) == 43 - 13
    # Images that need no gradient: copies of 20, 10 and 3; the result is 3.
    assert blocked_bytes(**sizes, for_inputs=False) == 30
