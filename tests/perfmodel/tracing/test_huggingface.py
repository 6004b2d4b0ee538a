"""Models built from configurations: their published sizes, and whatever a file gets wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.tracing.source import ModelSource, SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import without_content
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.workload import Phase
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
