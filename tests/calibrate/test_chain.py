"""Single layers in a row: each reads what was just made, keeps what backward needs, and is timed."""

import math

import pytest
import torch

from calibrate.device import Cpu
from calibrate.layers import Layer
from calibrate.probes import Session, compute, layers
from calibrate.probes.compute import Evictor, measure_optimizer
from calibrate.probes.layers import (
    chain_operators,
    chained,
    grouped,
    layer_operators,
    recorded_layer,
)
from calibrate.replays import linked

CPU = torch.device("cpu")
LAYERS = (
    Layer(kind="convolution", sizes=(2, 8, 9, 16, 3, 1, 1)),
    Layer(kind="relu", sizes=(2, 8, 5)),
    Layer(kind="linear", sizes=(4, 8, 16)),
    Layer(kind="embedding", sizes=(6, 50, 16)),
    Layer(kind="loss", sizes=(6, 16)),
)


def session() -> Session:
    return Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})


def test_a_layer_reads_what_was_just_made_and_backward_what_forward_kept() -> None:
    step = chained([recorded_layer(LAYERS[1], CPU)]).step
    made_by: dict[int, str] = {}
    read: dict[str, list[str]] = {}
    for call in linked(step).calls:
        operator = step.operators[call.operator]
        name = operator.name.split(".")[1]
        read[name] = [made_by.get(tensor, "nobody") for tensor in call.inputs]
        # A view is what it looks at.
        made_by.update(dict.fromkeys(call.outputs, read[name][0] if operator.view else name))
    assert read["relu"] == ["clone"]
    assert sorted(read["threshold_backward"]) == ["ones_like", "relu"]


@pytest.mark.parametrize(("long_s", "num_times"), [(0.0, 3), (math.inf, 6)])
def test_every_operator_is_timed_but_the_copies_that_stand_in_for_a_predecessor(
    monkeypatch: pytest.MonkeyPatch, long_s: float, num_times: int
) -> None:
    """Three times in each pass: one pass of a row that takes long, two of others."""
    monkeypatch.setattr(layers, "LONG_S", long_s)
    measured = chain_operators(session(), LAYERS, Evictor(Cpu()))
    expected = {
        (operator.name, phase)
        for layer in LAYERS
        for operator, phase in layer_operators(layer, CPU)
        if not operator.view
    }
    assert {(entry.operator.name, entry.phase) for entry in measured} == expected
    assert min(len(entry.times_s) for entry in measured) == num_times
    assert all(min(entry.times_s) > 0 for entry in measured)


@pytest.mark.parametrize(("long_s", "num_times"), [(0.0, 1), (math.inf, 4)])
def test_every_implementation_of_an_optimizer_is_timed(
    monkeypatch: pytest.MonkeyPatch, long_s: float, num_times: int
) -> None:
    monkeypatch.setattr(compute, "LONG_S", long_s)
    for implementation in ("loop", "foreach", "fused"):
        layer = Layer(kind=f"adamw {implementation}", sizes=(3, 64))
        point = measure_optimizer(session(), layer, Evictor(Cpu()))
        assert (point.optimizer, point.implementation) == ("adamw", implementation)
        assert (point.num_tensors, point.tensor_bytes) == (3, 256)
        assert len(point.times_s) == num_times


def test_groups_hold_as_many_layers_as_fit() -> None:
    """A relu of 200 values writes 800 B forward, ones, a gradient, and reads as much from before."""
    layer = recorded_layer(LAYERS[1], CPU)
    groups = grouped([layer] * 5, most_bytes=2 * 4 * 2 * 8 * 25 * 4)
    assert [len(group) for group in groups] == [2, 2, 1]
    assert [len(group) for group in grouped([layer] * 2, most_bytes=1)] == [1, 1]
