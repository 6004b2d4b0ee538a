"""Steps of deep models from shallow ones, against the recording of all layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfmodel.tracing import trace
from perfmodel.tracing.depth import DEPTHS, LEAST_DEPTH, IrregularLayersError, deepened
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.tracing.trace import trace_model
from perfmodel.workload.step import StepMethod
from tests.perfmodel.tracing.configs import CONFIGS, llama_config
from tests.perfmodel.tracing.method import ADAMW_FUSED, SGD, SGD_LOOP
from tests.perfmodel.tracing.test_huggingface import source_of

#: Widths that are quickly traced, under the names of all families.
_SMALL = llama_config(64, 128, LEAST_DEPTH, 4, 200) | {"num_key_value_heads": 2}
_SMALL |= {"n_embd": 64, "n_head": 4, "n_layer": LEAST_DEPTH}


def small(name: str) -> dict[str, Any]:
    config, _ = CONFIGS[name]
    return config | {key: _SMALL[key] for key in config if key in _SMALL and key != "model_type"}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Depths of the steps that were made from shallow ones."""
    found: list[int] = []

    def spy(steps: list[RecordedStep], depth: int) -> RecordedStep:
        found.append(depth)
        return deepened(steps, depth)

    monkeypatch.setattr(trace, "deepened", spy)
    return found


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama-3-8b", replace(ADAMW_FUSED, precision="bf16")),
        ("gpt2", SGD_LOOP),
        ("vit-base-patch16-224", replace(SGD, checkpointing="per-block")),
    ],
)
def test_a_deep_step_is_that_of_all_its_layers(
    tmp_path: Path, used: list[int], name: str, method: StepMethod
) -> None:
    size = {"image_size": 32} if name.startswith("vit") else {"sequence_length": 16}
    source = source_of(tmp_path, small(name), **size)
    deep = trace_model(source, method, micro_batch=2)
    assert used == [LEAST_DEPTH] * 2
    full = trace_model(replace(source, with_depth=None), method, micro_batch=2)
    assert deep.workload == full.workload
    assert deep.step == full.step
    # What an allocator holds beyond is the one thing that does not grow evenly.
    assert replace(deep.memory, reserved_ratio=1) == replace(full.memory, reserved_ratio=1)


def test_a_deep_model_of_torchvision_computes_what_is_published(used: list[int]) -> None:
    """ViT-L/16: 304,326,632 parameters, 61.555 G multiply-adds."""
    workload = trace_model(find_source("torchvision:vit_l_16"), SGD, micro_batch=2).workload
    assert used == [24] * 2
    assert workload.num_parameters == 304_326_632
    assert workload.forward_flop / 2e9 == pytest.approx(61.555, rel=0.01)


def test_layers_that_do_not_repeat_are_recorded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_steps: list[RecordedStep], _depth: int) -> RecordedStep:
        raise IrregularLayersError

    monkeypatch.setattr(trace, "deepened", refuse)
    source = source_of(tmp_path, small("vit-base-patch16-224"), image_size=32)
    step = trace_model(source, SGD_LOOP, micro_batch=2).step
    assert len({p.name.split(".")[1] for p in step.parameters if "layers" in p.name}) == LEAST_DEPTH


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedStep]:
    """Of the depths that are recorded, and of one more."""
    source = source_of(tmp_path_factory.mktemp("gpt2"), small("gpt2"), sequence_length=16)
    assert source.with_depth is not None
    with without_content("cpu"):
        models = [build_model(source.with_depth(n), SGD_LOOP) for n in (*DEPTHS, DEPTHS[-1] + 1)]
        return [record_step(model, 2) for model in models]


@pytest.mark.parametrize("what", ["saved_bytes", "blocks", "ready_after", "calls"])
def test_whatever_does_not_grow_evenly_is_noticed(shallow: list[RecordedStep], what: str) -> None:
    steps = shallow[: len(DEPTHS)]
    change: dict[str, Callable[[Any], Any]] = {
        "saved_bytes": lambda value: value + 1,
        "blocks": lambda value: {path: (a + 1, b) for path, (a, b) in value.items()},
        "ready_after": lambda value: dict(reversed(value.items())),
        "calls": lambda value: (value[1], value[0], *value[2:]),
    }
    changed = change[what](getattr(steps[2], what))
    with pytest.raises(IrregularLayersError):
        deepened([*steps[:2], replace(steps[2], **{what: changed})], LEAST_DEPTH)


def test_depths_in_uneven_steps_predict_nothing(shallow: list[RecordedStep]) -> None:
    with pytest.raises(IrregularLayersError):
        deepened([shallow[0], shallow[2], shallow[3]], LEAST_DEPTH)
