"""The sweep over live storages and the real allocator, on a model that can be added up by hand."""

import pytest
import torch
from torch import Tensor, nn

from perfmodel.trace.allocator import allocator_peak_bytes
from perfmodel.trace.liveness import Sweep, joined_memory
from perfmodel.trace.recorder import (
    ConvolutionSizes,
    backward_workspace_bytes,
    forward_workspace_bytes,
)
from perfmodel.trace.sources import Batch, ModelSource, SampleSize, find_source
from perfmodel.trace.step import build_model_spec, record_step, without_content
from perfmodel.workload.memory import Part
from perfmodel.workload.operator import Phase
from perfmodel.workload.step import StepMethod

WIDTH = 1000
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def method(optimizer: str = "sgd", checkpointing: str = "none") -> StepMethod:
    return StepMethod(
        optimizer=optimizer,
        optimizer_implementation="loop",
        precision="fp32",
        checkpointing=checkpointing,
        device_kind="cpu",
    )


def two_layers() -> ModelSource:
    """Two square layers without bias, the sum as loss."""
    return ModelSource(
        name="two layers",
        sample="1000 numbers",
        build=lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)
        ),
        draw_batch=lambda samples: Batch(positional=(torch.ones(samples, WIDTH),), keyword={}),
        loss=lambda outputs, _targets: outputs.sum(),
    )


def swept(source: ModelSource, how: StepMethod, micro_batch: int) -> Sweep:
    with without_content("cpu"):
        return record_step(build_model_spec(source, how), micro_batch).sweep


def column(sweep: Sweep, part: Part, phase: Phase) -> int:
    calls = [i for i, place in enumerate(sweep.places) if place.phase is phase]
    return int(sweep.parts[calls, list(Part).index(part)].max())


def test_every_part_of_two_layers_by_hand() -> None:
    """Weights 2 x 4 MB; SGD with momentum as much again; gradients too; 4 kB per sample and layer.

    Kept for backward: the first layer's result and its ReLU (and the second's result and the loss, which
    the step holds).
    """
    sweep = swept(two_layers(), method(), 10)
    assert column(sweep, Part.PARAMETERS, Phase.FORWARD) == 2 * WEIGHT_BYTES
    assert column(sweep, Part.OPTIMIZER, Phase.FORWARD) == 2 * WEIGHT_BYTES
    assert column(sweep, Part.GRADIENTS, Phase.FORWARD) == 0
    assert column(sweep, Part.GRADIENTS, Phase.OPTIMIZER) == 2 * WEIGHT_BYTES
    assert column(sweep, Part.INPUTS, Phase.FORWARD) == 10 * 4 * WIDTH
    # The first layer's own result dies with the ReLU, which keeps its result instead.
    assert column(sweep, Part.ACTIVATIONS, Phase.BACKWARD) == 2 * 10 * 4 * WIDTH + 4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_allocator_agrees_to_a_thousandth(optimizer: str) -> None:
    measured = allocator_peak_bytes(two_layers(), method(optimizer), 10)
    predicted = swept(two_layers(), method(optimizer), 10).peak_bytes
    assert predicted == pytest.approx(measured, rel=1e-3)


def test_the_allocator_is_read_right() -> None:
    """At the end of backward: 3 x 8 MB of weights, gradients, momentum, and less than 0.5 MB of batch."""
    measured = allocator_peak_bytes(two_layers(), method(), 10)
    assert 6 * WEIGHT_BYTES < measured < 6 * WEIGHT_BYTES + 500_000


def test_views_and_in_place_operators_add_nothing() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.layer(inputs)
            return hidden.relu_().view(-1).view(-1, WIDTH)

    source = ModelSource(
        name="in place",
        sample="1000 numbers",
        build=InPlace,
        draw_batch=lambda samples: Batch(positional=(torch.ones(samples, WIDTH),), keyword={}),
        loss=lambda outputs, _targets: outputs.sum(),
    )
    sweep = swept(source, method(), 10)
    # One result of 40 kB, and the scalar loss.
    assert column(sweep, Part.ACTIVATIONS, Phase.FORWARD) == 10 * 4 * WIDTH + 4


def test_two_batches_say_what_a_third_needs() -> None:
    source = find_source("resnet18", SampleSize())
    with without_content("cpu"):
        model_spec = build_model_spec(source, method("adamw"))
        first, second, third = (record_step(model_spec, batch).sweep for batch in (4, 8, 32))
    memory = joined_memory(first, second)
    assert memory.peak_bytes(4) == first.peak_bytes
    assert memory.peak_bytes(8) == second.peak_bytes
    assert memory.peak_bytes(32) == pytest.approx(third.peak_bytes, rel=1e-3)
    assert memory.reserved_ratio >= 1


def test_blocks_and_checkpointing_agree_with_a_checkpointed_trace() -> None:
    from perfmodel.cost.techniques import kept_by_checkpointing  # noqa: PLC0415

    source = find_source("transformer", SampleSize())
    with without_content("cpu"):
        model_spec = build_model_spec(source, method())
        sweeps = [record_step(model_spec, batch).sweep for batch in (16, 32)]
    plain = joined_memory(*sweeps)
    again = swept(source, method(checkpointing="per-block"), 32)
    assert len(plain.blocks) == 4
    activations = max(moment.at(32)[Part.ACTIVATIONS] for moment in plain.moments)
    saved = activations - kept_by_checkpointing(plain.blocks, activations, 32, chosen=plain.blocks)
    assert plain.peak_bytes(32) - saved == pytest.approx(again.peak_bytes, rel=0.1)


def test_blocked_layouts_cost_copies() -> None:
    """Inputs 10, weight 3, outputs 20, all copied: forward 10 + 3 + 20 before the result, 40 with it."""
    sizes = ConvolutionSizes(
        inputs=10, weight=3, outputs=20, blocked_inputs=10, blocked_weight=3, blocked_outputs=20
    )
    assert forward_workspace_bytes(sizes) == 20
    # Second half: the gradient of the inputs (10) beside copies of 20, 10 and 3; results are 10 + 3.
    assert backward_workspace_bytes(sizes, inputs_need_gradient=True) == 43 - 13
    # Images that need no gradient: copies of 20, 10 and 3; the result is 3.
    assert backward_workspace_bytes(sizes, inputs_need_gradient=False) == 30
