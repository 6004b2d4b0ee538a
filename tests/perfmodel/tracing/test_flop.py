"""Floating point operations against torch's counter, published figures and closed formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model_weights

from perfmodel.tracing.source import SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import trace_model
from perfmodel.workload import Phase, TensorSpec, flop
from tests.perfmodel.tracing.configs import llama_config
from tests.perfmodel.tracing.method import SGD


def counted(name: str) -> tuple[RecordedStep, int, int]:
    """Our step, what torch counts of its forward pass, and of both passes."""
    source = find_source(f"torchvision:{name}", SampleSize(image_size=64))
    with without_content("cpu"):
        model = build_model(source, SGD)
        batch = source.draw_batch(2)
        with FlopCounterMode(display=False) as counter:
            loss = source.loss(model.module(*batch.positional), batch.targets)
            forward = counter.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]
        return record_step(model, 2), forward, counter.get_total_flops()


def _flop(step: RecordedStep, *phases: Phase) -> float:
    return sum(step.operators[call.operator].flop for call in step.calls if call.phase in phases)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_whole_steps_count_as_torch_counts_them(name: str) -> None:
    step, _, theirs = counted(name)
    assert _flop(step, Phase.FORWARD, Phase.BACKWARD) == theirs


def test_grouped_convolutions_count_their_groups_backward_too() -> None:
    step, theirs, far_too_many = counted("mobilenet_v3_small")
    forward = _flop(step, Phase.FORWARD)
    assert forward == theirs
    backward = _flop(step, Phase.BACKWARD, Phase.FORWARD)
    # Two gradients of each product but for the images'; torch's counter forgets groups here.
    assert 2.8 * forward < backward < 3 * forward < far_too_many


@pytest.mark.parametrize(
    "name", ["alexnet", "resnet50", "shufflenet_v2_x1_0", "vit_b_32", "regnet_y_400mf"]
)
def test_forward_passes_compute_what_torchvision_publishes(name: str) -> None:
    weights: Any = next(iter(get_model_weights(name)))
    pixels = weights.transforms().crop_size[0]
    source = find_source(f"torchvision:{name}", SampleSize(image_size=pixels))
    with without_content("cpu"):
        model = build_model(source, SGD)
        step = record_step(model, 1)
    parameters = model.module.parameters()
    assert sum(each.numel() for each in parameters) == weights.meta["num_params"]
    # Published as multiply-adds with three decimals.
    giga_multiply_adds = _flop(step, Phase.FORWARD) / 2e9
    assert giga_multiply_adds == pytest.approx(weights.meta["_ops"], rel=0.01, abs=0.001)


def test_a_transformer_computes_six_per_parameter_and_token_plus_attention(tmp_path: Path) -> None:
    layers, width, inner, tokens, vocabulary = 3, 64, 256, 32, 1000
    config = llama_config(width, inner, layers, 4, vocabulary, tokens)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    traced = trace_model(find_source(str(path), SampleSize()), SGD, micro_batch=2)
    step = traced.step.at(micro_batch=1)
    weights = layers * (4 * width**2 + 3 * width * inner) + vocabulary * width
    scores = layers * 2 * tokens**2 * width  # one of the two products of attention
    assert step.flop(Phase.FORWARD) == 2 * weights * tokens + 2 * scores
    # Backward: every product twice, and attention's scores once more.
    assert step.flop(Phase.BACKWARD) == 4 * weights * tokens + 5 * scores


def test_attention_on_a_processor_counts_though_torch_forgets_it() -> None:
    query = torch.randn(2, 4, 16, 8)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    spec = TensorSpec(shape=(2, 4, 16, 8), dtype="float32")
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ours = flop(name, [spec, spec, spec], [spec], "[[], {}]")
    assert ours == 2 * 2 * (2 * 4 * 16 * 16 * 8)
    assert counter.get_total_flops() in (0, ours)
