"""Layers that repeat are stored once, and nothing is lost."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.workload.operator import Call, Phase
from perfmodel.workload.step import Segment, compressed


def call(operator: int, module: str = "", phase: Phase = Phase.FORWARD) -> Call:
    return Call(operator=operator, phase=phase, module=module)


def back(segments: tuple[Segment, ...]) -> list[Call]:
    return [one for segment in segments for one in segment.expanded()]


calls = st.lists(
    st.builds(
        call,
        st.integers(min_value=0, max_value=2),
        st.sampled_from(["", "a", "layers.0", "layers.1", "layers.2.b", "layers.3.b.0"]),
        st.sampled_from(Phase),
    ),
    max_size=40,
)


@given(calls=calls)
def test_segments_give_the_calls_back_in_order(calls: list[Call]) -> None:
    assert back(compressed(calls)) == calls


@given(
    layers=st.integers(min_value=2, max_value=130),
    block=st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=12),
)
def test_layers_are_stored_once_forward_and_backward(layers: int, block: list[int]) -> None:
    forward = [call(op, f"layers.{i}.mlp") for i in range(layers) for op in block]
    backward = [
        call(op, f"layers.{i}.mlp", Phase.BACKWARD) for i in reversed(range(layers)) for op in block
    ]
    whole = [call(100, "embed"), *forward, call(101, "head"), *backward]
    segments = compressed(whole)
    assert back(segments) == whole
    assert sum(len(segment.calls) for segment in segments) <= 2 * len(block) + 2


def test_the_backward_pass_counts_its_layers_down() -> None:
    down = [call(op, f"layers.{i}") for i in (2, 1, 0) for op in (7, 8)]
    (segment,) = compressed(down)
    assert (segment.count, segment.prefix, segment.step) == (3, "layers.", -1)
