"""The guess which tensor flows where, on steps small enough to follow by hand."""

import itertools
from collections.abc import Sequence

from calibrate.replays import Dataflow, linked
from perfmodel.workload import Call, Operator, Phase, TensorSpec
from perfmodel.workload.step import Segment, TracedParameter, TracedStep
from tests.perfmodel.operators import operator, spec
from tests.perfmodel.tracing.method import SGD_LOOP

IMAGE, HIDDEN, WEIGHT = spec(2, 3), spec(2, 5), spec(3, 5)
PRODUCT = operator("aten.mm.default", (IMAGE, WEIGHT), (HIDDEN,))
RELU = operator("aten.relu.default", (HIDDEN,), (HIDDEN,))
THRESHOLD = operator("aten.threshold_backward.default", (HIDDEN, HIDDEN), (HIDDEN,), 0)
GRADIENT = operator("aten.mm.default", (spec(3, 2), HIDDEN), (WEIGHT,))


def integers(count: int) -> TensorSpec:
    return TensorSpec(shape=(count,), dtype="int64")


def flow_of(forward: Sequence[Operator], backward: Sequence[Operator]) -> Dataflow:
    """Of a step that calls these operators, pass by pass."""
    called = (
        *((each, Phase.FORWARD) for each in forward),
        *((e, Phase.BACKWARD) for e in backward),
    )
    operators = tuple(dict.fromkeys((*forward, *backward)))
    calls = tuple(Call(operator=operators.index(o), phase=phase, module="") for o, phase in called)
    return linked(
        TracedStep(
            micro_batch=2,
            sample="3 numbers",
            method=SGD_LOOP,
            operators=operators,
            segments=(Segment(count=1, calls=calls),),
            parameters=(TracedParameter(name="w", shape=(3, 5), dtype="float32", ready_after=2),),
            saved_bytes=0,
            buffer_bytes=0,
            frozen_bytes=0,
        )
    )


def test_backward_takes_the_latest_results_back_and_leaves_the_gradient() -> None:
    flow = flow_of((PRODUCT, RELU), (THRESHOLD, GRADIENT))
    product, relu, threshold, gradient = flow.calls
    assert set(threshold.inputs) == {relu.outputs[0], product.outputs[0]}
    assert gradient.inputs[1] == threshold.outputs[0]
    assert {*gradient.outputs}.isdisjoint(itertools.chain(*flow.released))


def test_a_tensor_is_released_after_its_last_reader_and_never_used_again() -> None:
    flow = flow_of((PRODUCT, RELU), (THRESHOLD,))
    gone: set[int] = set()
    for call, released in zip(flow.calls, flow.released, strict=True):
        assert gone.isdisjoint(call.inputs)
        gone.update(released)
    assert gone == {*flow.calls[0].outputs, *flow.calls[1].outputs}


def test_a_gradient_that_is_summed_up_in_place_is_left() -> None:
    """Of a weight that two layers share."""
    add = operator("aten.add_.Tensor", (WEIGHT, WEIGHT), (), mutated=(0,))
    flow = flow_of((), (GRADIENT, GRADIENT, add))
    left, added = flow.calls[-1].inputs
    assert {left, added} & {*itertools.chain(*flow.released)} == {added}


def test_the_gradient_of_a_bag_has_the_integers_of_its_lookup() -> None:
    """Targets, bags and their sizes are as many as samples, indices as many as positions: none stands for another."""
    table, bags, many, few = spec(9, 3), spec(2, 3), integers(6), integers(2)
    begin = operator("aten.arange.start_step", (), (few,))
    lookup = operator("aten._embedding_bag.default", (table, many, few), (bags, many, few, few))
    loss = operator("aten.nll_loss_forward.default", (bags, few), (spec(),))
    gradient = operator(
        "aten._embedding_bag_backward.default", (bags, many, few, many, few, few), (table,)
    )
    dense = operator(
        "aten._embedding_bag_dense_backward.default", (bags, many, many, few, few), (table,)
    )
    flow = flow_of((begin, lookup, lookup, loss), (gradient, dense))
    begun, first, second, judged, last, other = flow.calls
    assert first.inputs[2] == begun.outputs[0]
    assert judged.inputs[1] in flow.sources
    assert judged.inputs[1] not in {*first.inputs, *second.inputs}
    assert last.inputs[1:] == (*second.inputs[1:], *second.outputs[1:])
    assert other.inputs[1:] == (first.inputs[1], *first.outputs[1:])


def test_both_gradients_of_a_weighted_bag_have_the_integers_of_their_own_lookup() -> None:
    """Weights are results as others: what made them has them back."""
    table, bags, many, few = spec(9, 3), spec(2, 3), integers(6), integers(2)
    weights = spec(6)
    softmax = operator("aten._softmax.default", (weights,), (weights,))
    lookup = operator(
        "aten._embedding_bag.default", (table, many, few, weights), (bags, many, few, few)
    )
    of_weights = operator(
        "aten._embedding_bag_per_sample_weights_backward.default",
        (bags, table, many, few, many),
        (weights,),
    )
    of_table = operator(
        "aten._embedding_bag_dense_backward.default",
        (bags, many, many, few, few, weights),
        (table,),
    )
    back = operator("aten._softmax_backward_data.default", (weights, weights), (weights,))
    flow = flow_of(2 * (softmax, lookup), 2 * (of_weights, of_table, back))
    made, looked_up = flow.calls[:4:2], flow.calls[1:4:2]
    for at, bag in ((4, looked_up[1]), (7, looked_up[0])):
        assert flow.calls[at].inputs[2:] == (*bag.inputs[1:3], bag.outputs[1])
        assert flow.calls[at + 1].inputs[1:5] == (bag.inputs[1], *bag.outputs[1:4])
    assert made[1].outputs[0] in flow.calls[6].inputs


def test_a_gradient_reads_the_workspace_of_its_own_layer() -> None:
    """In a trace it is empty, as is what batch norm makes and nobody reads."""
    workspace = TensorSpec(shape=(0,), dtype="uint8")
    layer = operator("aten.native_dropout.default", (IMAGE,), (HIDDEN, workspace))
    spare = operator("aten.empty.memory_format", (), (workspace,))
    gradient = operator("aten.native_dropout_backward.default", (HIDDEN, workspace), (IMAGE,))
    flow = flow_of((layer, spare), (gradient,))
    assert flow.calls[-1].inputs == flow.calls[0].outputs


def test_what_was_transposed_in_place_is_no_longer_what_it_was() -> None:
    turn = operator("aten.transpose_.default", (HIDDEN,), ())
    flow = flow_of((PRODUCT, turn, RELU), ())
    product, turned, relu = flow.calls
    assert turned.inputs == product.outputs
    assert relu.inputs[0] in flow.sources
