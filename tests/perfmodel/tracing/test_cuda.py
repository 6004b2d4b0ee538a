"""Recurrent layers as cuDNN runs them, traced without such a device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence

from perfmodel.tracing.cuda import AsCudnn, AsOnCuda, flatten_weights
from perfmodel.tracing.recorder import ModulePaths, Recorder
from perfmodel.tracing.sources import find_source
from perfmodel.tracing.step import RecordedStep, build_model, record_step, without_content
from perfmodel.workload import Operator
from perfmodel.workload.memory import Part
from tests.perfmodel.tracing.method import SGD

INSTANTS, FEATURES, HIDDEN = 5, 8, 6
FACTORY = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.{cell}(8, 6, {options}), nn.Linear({width}, 3)

    def forward(self, values):
        return self.head(self.cell(values)[0]).mean()

def tagger():
    return Tagger(), torch.randn({shape})
"""


def tagger(folder: Path, cell: str, options: str) -> str:
    path = folder / "tagger.py"
    width = HIDDEN * (2 if "bidirectional" in options else 1)
    shape = "4, 5, 8" if "batch_first" in options else "5, 4, 8"
    path.write_text(FACTORY.format(cell=cell, options=options, width=width, shape=shape))
    return f"{path}:tagger"


def recorded(source: str, precision: str) -> RecordedStep:
    method = replace(SGD, precision=precision)
    with without_content("cpu"):
        model = build_model(find_source(source), method, casts=AsOnCuda(precision))
        return record_step(model, 4)


def only(step: RecordedStep, name: str) -> Operator:
    [found] = [operator for operator in step.operators if operator.name == name]
    return found


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        "batch_first=True",
        "num_layers=2, dropout=0.5, bidirectional=True, bias=False, batch_first=True",
    ],
)
def test_all_layers_and_instants_are_one_operator_of_each_pass(
    tmp_path: Path, cell: str, precision: str, options: str
) -> None:
    """Shapes are those that a processor's layer returns, and gradients those of its weights."""
    step = recorded(tagger(tmp_path, cell, options), precision)
    forward, backward = (only(step, f"aten._cudnn_rnn{of}.default") for of in ("", "_backward"))
    layer = getattr(nn, cell)(FEATURES, HIDDEN, **eval(f"dict({options})"))  # noqa: S307 - our own
    output, states = layer(torch.randn(4, INSTANTS, FEATURES))
    states = states if isinstance(states, tuple) else (states,)
    dtype = "float16" if precision == "bf16" else "float32"
    assert {spec.dtype for spec in forward.outputs if spec.dtype != "uint8"} == {dtype}
    assert [spec.shape for spec in forward.outputs[: 1 + len(states)]] == [
        tuple(one.shape) for one in (output, *states)
    ]
    assert [spec.shape for spec in backward.outputs[-len(list(layer.parameters())) :]] == [
        tuple(one.shape) for one in layer.parameters()
    ]
    flop = 2 * 4 * INSTANTS * sum(w.numel() for w in layer.parameters() if w.dim() > 1)
    assert (forward.flop, backward.flop) == (flop, 2 * flop)


def test_weights_in_one_buffer_count_once(tmp_path: Path) -> None:
    """Parameters and gradients of the layer and of what follows it; SGD keeps a momentum of each."""
    step = recorded(tagger(tmp_path, "GRU", "batch_first=True"), "fp32")
    weights = 3 * HIDDEN * (FEATURES + HIDDEN + 2) + 3 * (HIDDEN + 1)
    held = dict(zip(Part, step.in_use[-1].tolist(), strict=True))
    assert held[Part.PARAMETERS] == held[Part.GRADIENTS] == held[Part.OPTIMIZER] == 4 * weights


def test_weights_are_laid_out_where_they_are_one_s_own() -> None:
    """As cuDNN wants them, one after another; layers that share a weight keep theirs."""
    with FakeTensorMode():
        own, shared = nn.LSTM(4, 4, 2), nn.LSTM(4, 4, 2)
        shared.weight_ih_l1 = shared.weight_ih_l0
        flatten_weights(nn.ModuleList([own, shared]))
        offsets = [weight.storage_offset() for weight in own.parameters()]
        assert offsets == [0, 64, 128, 144, 160, 224, 288, 304]
        assert {weight.storage_offset() for weight in shared.parameters()} == {0}


@pytest.mark.parametrize(
    ("cell", "options", "precision", "reserve_bytes"),
    [
        ("LSTM", "", "fp32", 4_915_456),
        ("LSTM", "", "bf16", 2_457_856),
        ("GRU", "", "bf16", 2_949_376),
        ("RNN", "", "fp32", 983_296),
        ("LSTM", "num_layers=3, dropout=0.3, bidirectional=True", "fp32", 33_669_376),
        ("GRU", "num_layers=3, dropout=0.3, bidirectional=True", "bf16", 19_906_816),
        ("RNN", "num_layers=3, dropout=0.3, bidirectional=True", "fp32", 10_076_416),
    ],
)
def test_what_is_kept_for_the_backward_pass_is_what_an_h100_kept(
    cell: str, options: str, precision: str, reserve_bytes: int
) -> None:
    """24 instants of 64 samples of 96 features, hidden size 160; PyTorch 2.11, cuDNN 9.19."""
    with FakeTensorMode():
        layer = getattr(nn, cell)(96, 160, **eval(f"dict({options})"))  # noqa: S307 - our own
        seen = ModulePaths(layer)
        with Recorder(seen, on_cuda=True) as recorder, AsCudnn(is_half=precision == "bf16"):
            layer(torch.randn(24, 64, 96))
    [forward] = [each for each in recorder.operators if each.name == "aten._cudnn_rnn.default"]
    [kept] = [spec for spec in forward.outputs if spec.dtype == "uint8"]
    assert kept.shape == (reserve_bytes,)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_stay_what_they_are(cell: str) -> None:
    layer = getattr(nn, cell)(FEATURES, HIDDEN, num_layers=2)
    packed = PackedSequence(torch.randn(9, FEATURES), torch.tensor([4, 3, 2]))
    with AsCudnn(is_half=False):
        output, _ = layer(packed)
    assert torch.equal(output.data, layer(packed)[0].data)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_layer_for_which_autocast_is_off_keeps_its_type(kind: str) -> None:
    with FakeTensorMode(), AsOnCuda("bf16"), AsCudnn(is_half=True):
        layer, inputs = nn.LSTM(FEATURES, HIDDEN), torch.randn(INSTANTS, 4, FEATURES)
        before = layer(inputs)[0]
        with torch.autocast(kind, enabled=False):
            within = layer(inputs)[0]
        after = layer(inputs)[0]
    types = [output.dtype for output in (before, within, after)]
    assert types == [torch.float16, torch.float32, torch.float16]
