"""The guess which tensor flows where, on steps small enough to follow by hand."""

from calibrate.replays import linked
from perfmodel.workload import Call, Operator, Phase
from perfmodel.workload.step import Segment, TracedParameter, TracedStep
from tests.perfmodel.operators import operator, spec
from tests.perfmodel.tracing.method import SGD_LOOP

IMAGE, HIDDEN, WEIGHT = spec(2, 3), spec(2, 5), spec(3, 5)
PRODUCT = operator("aten.mm.default", (IMAGE, WEIGHT), (HIDDEN,))
RELU = operator("aten.relu.default", (HIDDEN,), (HIDDEN,))
THRESHOLD = operator("aten.threshold_backward.default", (HIDDEN, HIDDEN), (HIDDEN,), 0)
GRADIENT = operator("aten.mm.default", (spec(3, 2), HIDDEN), (WEIGHT,))


def step(*calls: tuple[Operator, Phase]) -> TracedStep:
    operators = tuple(dict.fromkeys(called for called, _ in calls))
    return TracedStep(
        micro_batch=2,
        sample="3 numbers",
        method=SGD_LOOP,
        operators=operators,
        segments=(
            Segment(
                count=1,
                calls=tuple(
                    Call(operator=operators.index(called), phase=phase, module="")
                    for called, phase in calls
                ),
            ),
        ),
        parameters=(TracedParameter(name="w", shape=(3, 5), dtype="float32", ready_after=2),),
        saved_bytes=0,
        buffer_bytes=0,
        frozen_bytes=0,
    )


def test_backward_takes_the_latest_results_back_and_leaves_the_gradient() -> None:
    flow = linked(
        step(
            (PRODUCT, Phase.FORWARD),
            (RELU, Phase.FORWARD),
            (THRESHOLD, Phase.BACKWARD),
            (GRADIENT, Phase.BACKWARD),
        )
    )
    product, relu, threshold, gradient = flow.calls
    assert set(threshold.inputs) == {relu.outputs[0], product.outputs[0]}
    assert gradient.inputs[1] == threshold.outputs[0]
    assert flow.gradients == gradient.outputs


def test_a_tensor_is_released_after_its_last_reader_and_never_used_again() -> None:
    flow = linked(
        step((PRODUCT, Phase.FORWARD), (RELU, Phase.FORWARD), (THRESHOLD, Phase.BACKWARD))
    )
    gone: set[int] = set()
    for call, released in zip(flow.calls, flow.released, strict=True):
        assert gone.isdisjoint(call.inputs)
        gone.update(released)
    assert gone == {*flow.calls[0].outputs, *flow.calls[1].outputs}


def test_a_gradient_that_is_summed_up_in_place_is_left() -> None:
    """Of a weight that two layers share."""
    add = operator("aten.add_.Tensor", (WEIGHT, WEIGHT), (), mutated=(0,))
    flow = linked(
        step((GRADIENT, Phase.BACKWARD), (GRADIENT, Phase.BACKWARD), (add, Phase.BACKWARD))
    )
    assert flow.gradients == flow.calls[-1].inputs[:1]
    assert flow.gradients[0] not in {tensor for each in flow.released for tensor in each}
