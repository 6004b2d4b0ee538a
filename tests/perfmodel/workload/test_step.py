"""Sizes that grow with the micro-batch, and layers that are stored once."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.workload import Call, Phase
from perfmodel.workload.step import (
    Segment,
    arguments_at,
    compressed,
    merged_arguments,
    through,
    value_at,
)
from tests.perfmodel.traces import traced

small = st.integers(min_value=0, max_value=1000)


@given(constant=small, per_sample=small, batch=st.integers(min_value=1, max_value=64))
def test_two_points_of_a_line_give_the_line(constant: int, per_sample: int, batch: int) -> None:
    first, second = ((at, constant + per_sample * at) for at in (batch, 2 * batch))
    assert value_at(through((first, second)), 17) == constant + per_sample * 17


def test_arguments_keep_what_does_not_change_and_open_what_does() -> None:
    first, second, tenth = (
        [[{"tensor": 0}, [batch, 256], True, fraction], {"dtype": {"dtype": "float32"}}]
        for batch, fraction in ((4, 0.25), (8, 0.125), (10, 0.25))
    )
    merged = merged_arguments(first, second, micro_batches=(4, 8))
    assert json.loads(arguments_at(json.dumps(merged), 10)) == tenth


@pytest.mark.parametrize(
    ("first", "second"), [(True, False), ("sum", "mean"), ([1], [1, 2]), (None, 1)]
)
def test_other_differences_are_refused(first: object, second: object) -> None:
    with pytest.raises(ValueError, match="argument"):
        merged_arguments(first, second, micro_batches=(2, 4))
    with pytest.raises(ValueError, match="whole number per sample"):
        through(((2, 3), (4, 4)))


def call(operator: int, module: str = "", phase: Phase = Phase.FORWARD) -> Call:
    return Call(operator=operator, phase=phase, module=module)


def back(segments: tuple[Segment, ...]) -> list[Call]:
    return [one for segment in segments for one in segment.expanded()]


MODULES = ["", "a", "layers.0", "layers.1", "layers.2.b", "layers.3.b.0"]
calls = st.builds(call, st.integers(0, 2), st.sampled_from(MODULES), st.sampled_from(Phase))


@given(calls=st.lists(calls, max_size=40))
def test_segments_give_the_calls_back_in_order(calls: list[Call]) -> None:
    assert back(compressed(calls)) == calls


@given(layers=st.integers(2, 130), block=st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_layers_are_stored_once_forward_and_backward(layers: int, block: list[int]) -> None:
    forward = [call(op, f"layers.{i}.mlp") for i in range(layers) for op in block]
    backward = [
        call(op, f"layers.{i}.mlp", Phase.BACKWARD) for i in reversed(range(layers)) for op in block
    ]
    whole = [call(100, "embed"), *forward, call(101, "head"), *backward]
    segments = compressed(whole)
    assert back(segments) == whole
    assert sum(len(segment.calls) for segment in segments) <= 2 * len(block) + 2


def test_a_container_is_entered_once_and_not_by_coming_back() -> None:
    forward = ["a", "a.b", "a.b", "a", "a.c.d", "", "e"]
    calls = [call(0, module) for module in forward] + [call(0, "f", Phase.BACKWARD)]
    step = replace(traced().at(micro_batch=2), segments=compressed(calls))
    assert step.modules_entered() == [1, 1, 0, 0, 2, 0, 1]


@pytest.mark.parametrize("position", [-1, 99])
@pytest.mark.parametrize("place", ["operator", "tensor", "mutated"])
def test_what_a_step_does_not_have_is_refused(place: str, position: int) -> None:
    """A position before the first would name the last."""
    step = traced()
    first, *others = step.operators
    call = replace(step.segments[0].calls[0], operator=position)
    changes: dict[str, dict[str, Any]] = {
        "operator": {"segments": (replace(step.segments[0], calls=(call,)),)},
        "tensor": {"operators": (replace(first, inputs=(0, position)), *others)},
        "mutated": {"operators": (replace(first, mutated=(position,)), *others)},
    }
    with pytest.raises(ValueError, match=place):
        replace(step, **changes[place])


def test_a_step_that_repeats_its_calls_for_ever_is_refused() -> None:
    """Each call is placed in its unit: 1e29 of them would take all time."""
    step = traced()
    [first, *others] = step.segments
    far = replace(first, count=10**29)
    for segments, match in (
        ((far, *others), "calls must be <= 500,000, got 3.*; trace a shorter sequence"),
        ((first, replace(far, calls=())), "calls must be <= 500,000, got 1"),
        ((far, replace(first, count=-(10**29))), "count must be >= 1, got -1"),
        ((replace(first, count=0), *others), "count must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(step, segments=segments)
    assert replace(step, segments=(replace(first, count=1000), *others)).call_counts()
