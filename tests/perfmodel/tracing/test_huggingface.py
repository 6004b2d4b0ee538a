"""Published sizes of models from configurations, and FLOP against torch, publications and closed formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model_weights

from perfmodel.tracing.source import ModelSource, SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.workload import Phase, TensorSpec, flop
from tests.perfmodel.tracing.configs import CONFIGS, llama_config
from tests.perfmodel.tracing.method import SGD

TINY = llama_config(32, 64, 2, 4, 100, 16) | {"num_key_value_heads": 2}


def source_of(folder: Path, config: Any, **size: int) -> ModelSource:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return find_source(str(path), SampleSize(**size))


def traced(folder: Path, config: Any, **size: int) -> TracedModel:
    return trace_model(source_of(folder, config, **size), SGD, micro_batch=2)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_have_the_parameters_that_were_published(tmp_path: Path, name: str) -> None:
    config, published = CONFIGS[name]
    source = source_of(tmp_path, config)
    with without_content("cpu"):
        module = source.build()
    assert sum(parameter.numel() for parameter in module.parameters()) == published


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "qwen3-8b"])
def test_every_family_can_be_traced_small(tmp_path: Path, name: str) -> None:
    config, _ = CONFIGS[name]
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    found = traced(tmp_path, config | {layers: 2}, sequence_length=16)
    assert found.step.at(micro_batch=1).unused_parameters == ()
    assert found.workload.backward_flop > 2 * found.workload.forward_flop * 0.99


def test_keys_of_both_versions_mean_the_same(tmp_path: Path) -> None:
    old = TINY | {"rope_theta": 1e4, "torch_dtype": "float16"}
    new = TINY | {"rope_parameters": {"rope_theta": 1e4}, "dtype": "float16"}
    assert traced(tmp_path, old).step == traced(tmp_path, new).step


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    tied = traced(tmp_path, TINY | {"tie_word_embeddings": True})
    apart = traced(tmp_path, TINY)
    assert apart.workload.num_parameters - tied.workload.num_parameters == 100 * 32
    # The embedding gets its share last, so its gradient is complete at the end.
    assert tied.workload.parameters[-1].name == "embed_tokens.weight"


def test_experts_share_the_tokens_evenly_and_say_so(tmp_path: Path) -> None:
    experts = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    mixed, dense = traced(tmp_path, experts), traced(tmp_path, TINY)
    assert any("experts" in caveat for caveat in mixed.step.caveats)
    tokens, mlp, router = 16, 3 * 32 * 64, 32 * 4
    extra = 2 * tokens * 2 * (mlp + router)  # two layers, twice the experts per token
    difference = mixed.workload.forward_flop - dense.workload.forward_flop
    assert difference == 2 * tokens * 2 * mlp + 2 * tokens * 2 * router == extra
    step = mixed.step.at(micro_batch=1)
    assert step.flop(Phase.BACKWARD) > step.flop(Phase.FORWARD)


@pytest.mark.parametrize(
    "unused",
    [
        {"sliding_window": 0},
        {"image_size": [224, 224], "patch_size": "14"},
        {"type_vocab_size": 0, "num_labels": 1.0, "architecture": 1, "qkv_bias": "yes"},
    ],
)
def test_what_a_family_does_not_use_may_be_anything(tmp_path: Path, unused: dict[str, Any]) -> None:
    plain = TINY | {"model_type": "mistral"}
    assert traced(tmp_path, plain) == traced(tmp_path, plain | unused)


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
