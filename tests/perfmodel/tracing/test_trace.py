"""Traced steps of small models against hand-made sums, and of deep models against all their layers."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from perfmodel.errors import UntraceableModel
from perfmodel.tracing import trace
from perfmodel.tracing.source import SampleSize
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import (
    RecordedStep,
    build_model,
    record_step,
    without_content,
)
from perfmodel.tracing.trace import (
    DEPTHS,
    LEAST_DEPTH,
    IrregularLayersError,
    TracedModel,
    deepened,
    trace_model,
)
from perfmodel.workload import Phase
from perfmodel.workload.step import DEFAULT, StepMethod
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


@pytest.mark.parametrize("is_imported", [True, False])
def test_code_of_a_user_moves_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_imported: bool
) -> None:
    """Whoever asks for it: also where it raises, in its file or in its factory."""
    misbehave = "    print('words')\n    os.chdir('/')\n    raise KeyError('x')\n"
    called = "build()\n" if is_imported else ""
    (tmp_path / "own.py").write_text(f"import os\ndef build():\n{misbehave}{called}")
    before = Path.cwd()
    with pytest.raises((UntraceableModel, KeyError), match="x"):
        find_source(f"{tmp_path / 'own.py'}:build").build()
    assert (Path.cwd(), *capsys.readouterr()) == (before, "", "words\n")


def test_tensors_of_a_loss_are_where_the_model_trains(tmp_path: Path) -> None:
    """Weights of classes, that a file makes when it is imported: no step of a trace moves them, nor the file's own."""
    (tmp_path / "weighted.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Weighted(nn.CrossEntropyLoss):\n"
        "    def forward(self, outputs, given):\n"
        "        return given['share'] * super().forward(outputs, given['target'])\n"
        "loss = Weighted(weight=torch.ones(3))\n"
        "def build():\n    given = {'share': 0.5, 'target': torch.zeros(2, dtype=torch.int64)}\n"
        "    return nn.Linear(4, 3), (torch.ones(2, 4), given), loss\n"
    )
    source = find_source(f"{tmp_path / 'weighted.py'}:build")
    with without_content("cuda"):
        module, batch = source.build(), source.draw_batch(4)
        assert source.loss(module(*batch.positional), batch.targets).device.type == "cuda"
    with torch.device("meta"):  # as a GPU, but autograd asks no driver
        model = build_model(source, SGD_LOOP)
        steps = [record_step(model, samples) for samples in (2, 4)]
    first, second = ([step.operators[c.operator].name for c in step.calls] for step in steps)
    assert first == second
    assert "aten._to_copy.default" not in first
    module, batch = source.build(), source.draw_batch(4)
    assert source.loss(module(*batch.positional), batch.targets).item() > 0
    # A real GPU's training moves what was built and drawn on the processor.
    module, batch = source.build().to("meta"), source.draw_batch(4)
    inputs, targets = tree_map_only(Tensor, methodcaller("to", "meta"), batch.pair)
    assert source.loss(module(inputs), targets).device.type == "meta"


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


def traced(text: str, *, micro_batch: int = 4, method: StepMethod = SGD) -> TracedModel:
    return trace_model(find_source(text), method, micro_batch=micro_batch)


@pytest.fixture(scope="module")
def lenet() -> TracedModel:
    return traced("lenet")


def test_lenet_computes_what_the_hand_says(lenet: TracedModel) -> None:
    convolutions = 2 * 28 * 28 * 6 * 25 + 2 * 10 * 10 * 16 * 6 * 25
    products = 2 * (400 * 120 + 120 * 84 + 84 * 10)
    step = lenet.step.at(micro_batch=1)
    assert step.flop(Phase.FORWARD) == convolutions + products
    # Two gradients for every layer, but none for the images.
    assert step.flop(Phase.BACKWARD) == 2 * (convolutions + products) - 2 * 28 * 28 * 6 * 25
    assert lenet.workload.forward_flop == convolutions + products
    assert lenet.workload.num_parameters == 61_706


@pytest.mark.parametrize("text", ["lenet", "resnet18", "mlp", "transformer"])
def test_a_step_scaled_to_another_batch_is_the_step_traced_there(text: str) -> None:
    scaled = traced(text, micro_batch=3).step.at(micro_batch=10)
    there = traced(text, micro_batch=10).step.at(micro_batch=10)
    assert scaled.segments == there.segments
    for one, other in zip(scaled.operators, there.operators, strict=True):
        for name in ("name", "inputs", "outputs", "flop", "read_bytes", "written_bytes"):
            assert getattr(one, name) == getattr(other, name)
    assert scaled.saved_bytes == there.saved_bytes


FACTORIES = """
import torch
from torch import nn

def table():
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), torch.randn(4, 16, 8)

def loader():
    model, values = table()
    return model, (values, torch.zeros(4, dtype=torch.long))

def loader_with_loss():
    return *loader(), nn.CrossEntropyLoss()

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, *, ids):
        return self.table(ids).mean()

def named():
    return Named(), {"ids": torch.zeros(4, 5, dtype=torch.int64)}

def tied(rates=(0.0, 0.1)):
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    layers = [nn.Dropout(float(rate)) for rate in rates]
    return nn.Sequential(first, layers[0], second, layers[1], nn.BatchNorm1d(8)), torch.randn(4, 8)

def read_rates():
    return [rate.item() for rate in torch.linspace(0, 0.1, 2, dtype=torch.float64)]

def tied_reads():
    return tied(read_rates())

class Recurrent(nn.Module):
    def __init__(self, rates):
        super().__init__()
        self.cell, self.drop, self.head = nn.GRU(8, 6, batch_first=True), nn.Dropout(rates[1]), nn.Linear(6, 3)

    def forward(self, values):
        return self.head(self.drop(self.cell(values)[0])).mean()

def recurrent():
    return Recurrent((0.0, 0.1)), torch.randn(4, 5, 8)

def recurrent_reads():
    return Recurrent(read_rates()), torch.randn(4, 5, 8)
"""

APART = """
import json
import sys
from perfmodel.models import traced_document
from tests.perfmodel.tracing.method import SGD

assert "torch" not in sys.modules
first = traced_document("lenet", SGD, micro_batch=4)
found = {"compiled": "torch._dynamo.symbolic_convert" in sys.modules}
import torch
found["whole"] = callable(torch._dynamo.optimize) and not torch._dynamo.is_compiling()
again = traced_document("lenet", SGD, micro_batch=4)
parts = ("workload", "trace", "memory")
print(json.dumps(found | {"same": all(getattr(first, p) == getattr(again, p) for p in parts)}))
"""


@pytest.mark.long
def test_a_trace_without_the_compiler_leaves_nothing_of_its_stand_in() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", APART], check=True, capture_output=True, text=True
    ).stdout
    expected = {"compiled": False, "whole": True, "same": True}
    assert json.loads(printed.splitlines()[-1]) == expected


def test_gradients_become_ready_from_the_last_layer_to_the_first(lenet: TracedModel) -> None:
    names = [parameter.name for parameter in lenet.workload.parameters]
    assert {names[0], names[1]} == {"11.weight", "11.bias"}
    assert {names[-1], names[-2]} == {"0.weight", "0.bias"}
    assert lenet.workload.parameters[-1].ready_fraction == 1.0


def test_blocks_computed_again_cost_one_more_forward_pass_and_keep_less() -> None:
    plain = traced("resnet18").step.at(micro_batch=4)
    again = traced("resnet18", method=replace(SGD, checkpointing="per-block")).step.at(
        micro_batch=4
    )
    whole = traced("resnet18", method=replace(SGD, checkpointing="full")).step.at(micro_batch=4)
    assert again.flop(Phase.FORWARD) == plain.flop(Phase.FORWARD) == whole.flop(Phase.FORWARD)
    extra = whole.flop(Phase.BACKWARD) - plain.flop(Phase.BACKWARD)
    assert 0.9 < extra / plain.flop(Phase.FORWARD) <= 1.0  # what no gradient needs is left out
    assert plain.flop(Phase.BACKWARD) < again.flop(Phase.BACKWARD) < whole.flop(Phase.BACKWARD)
    assert whole.saved_bytes < again.saved_bytes < plain.saved_bytes


@pytest.mark.parametrize(
    ("implementation", "name", "calls"),
    [
        # On a processor torch loops unless a training asks for something else.
        *((each, "aten.addcdiv_.default", 54) for each in ("loop", DEFAULT)),
        ("foreach", "aten._foreach_addcdiv_.ScalarList", 1),
        ("fused", "aten._fused_adamw_.default", 1),
    ],
)
def test_optimizers_dispatch_per_parameter_or_for_all_at_once(
    implementation: str, name: str, calls: int
) -> None:
    method = replace(SGD, optimizer="adamw", optimizer_implementation=implementation)
    found = traced("transformer", method=method).step
    asked = "loop" if implementation == DEFAULT else implementation
    assert found.method.optimizer_implementation == asked
    step = found.at(micro_batch=2)
    assert len(step.parameters) == 54
    counted = [step.operators[call.operator].name for call in step.calls()].count(name)
    assert counted == calls


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(FACTORIES, encoding="utf-8")
    return file


def test_a_factory_says_what_its_sample_is(own: Path) -> None:
    found = {name: traced(f"{own}:{name}").step.sample for name in ("table", "named")}
    assert found == {"table": "16x8 float32", "named": "ids: 5 int64"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("table", "loader"),
        ("table", "loader_with_loss"),
        # A constructor may read values of tensors.
        ("tied", "tied_reads"),
        ("recurrent", "recurrent_reads"),
    ],
)
def test_targets_of_a_loader_and_values_read_by_a_constructor_change_nothing(
    own: Path, name: str, other: str
) -> None:
    plain, same = (traced(f"{own}:{each}").step for each in (name, other))
    assert all(p.ready_after is not None for p in same.parameters)
    assert same.at(micro_batch=4) == plain.at(micro_batch=4)


def test_labels_that_a_factory_does_not_give_are_of_two_classes(tmp_path: Path) -> None:
    """Of one class alone the loss would fall to 0, through numbers with which processors are slow."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def scores():\n    return nn.Linear(4, 8), torch.ones(1, 4)\n"
        "def score():\n    return nn.Linear(4, 1), torch.ones(1, 4)\n"
    )
    source = find_source(f"{tmp_path / 'own.py'}:scores")
    source.build()
    labels = source.draw_batch(64).targets
    assert labels is not None
    assert set(labels.tolist()) == {0, 1}
    lonely = find_source(f"{tmp_path / 'own.py'}:score")
    module, batch = lonely.build(), lonely.draw_batch(64)
    assert lonely.loss(module(*batch.positional), batch.targets).item() == 0


def test_googlenet_trains_with_or_without_its_auxiliary_heads() -> None:
    names = ("torchvision:googlenet", "torchvision:googlenet:no-aux")
    found = [find_source(name) for name in names]
    with without_content("cpu"):
        sizes = [sum(p.numel() for p in source.build().parameters()) for source in found]
    assert sizes == [13_004_888, 6_624_904]
    assert [len(source.caveats) for source in found] == [1, 0]


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_timm_models_are_traced_by_name(name: str) -> None:
    pytest.importorskip("timm")
    size = SampleSize(image_size=64)
    found = trace_model(find_source(f"timm:{name}", size), SGD, micro_batch=2)
    assert found.step.sample == "3x64x64 image"
    known = {"resnet18": 11_689_512, "vit_tiny_patch16_224": 5_717_416 - 180 * 192}
    assert sum(p.num_elements for p in found.workload.parameters) == known[name]
