"""Traced steps of small models, against hand-made sums and real runs."""

import pytest

from perfmodel.tracing.sources import SampleSize, find_source
from perfmodel.tracing.trace import TracedModel, trace_model
from perfmodel.workload.operator import Phase
from perfmodel.workload.step import StepMethod

SGD = StepMethod(
    optimizer="sgd",
    optimizer_implementation="foreach",
    precision="fp32",
    checkpointing="none",
    device_kind="cpu",
)


def traced(text: str, *, micro_batch: int = 4, method: StepMethod = SGD) -> TracedModel:
    return trace_model(find_source(text, SampleSize()), method, micro_batch=micro_batch)


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
        assert (one.name, one.inputs, one.outputs) == (other.name, other.inputs, other.outputs)
        assert (one.flop, one.read_bytes, one.written_bytes) == (
            other.flop,
            other.read_bytes,
            other.written_bytes,
        )
    assert scaled.saved_bytes == there.saved_bytes


def test_gradients_become_ready_from_the_last_layer_to_the_first(lenet: TracedModel) -> None:
    names = [parameter.name for parameter in lenet.workload.parameters]
    assert {names[0], names[1]} == {"11.weight", "11.bias"}
    assert {names[-1], names[-2]} == {"0.weight", "0.bias"}
    assert lenet.workload.parameters[-1].ready_fraction == 1.0
