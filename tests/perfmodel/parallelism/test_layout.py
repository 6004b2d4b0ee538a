"""The layout grammar, and what is impossible."""

import pytest

from perfmodel.errors import NotFeasible, UsageError
from perfmodel.parallelism.layout import (
    Layout,
    Recompute,
    accumulation_for,
    parse_layout,
    require_feasible,
)


def test_text_becomes_a_layout_and_text_again() -> None:
    text = "dp=8 tp=4 pp=2 zero=1 micro_batch=2 recompute=selective interleave=2"
    layout = parse_layout(text)
    assert layout.world_size == 64
    assert layout.recompute is Recompute.SELECTIVE
    assert str(layout) == text
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=8 speed=3", "KEY=VALUE"),
        ("dp=8 dp=4", "given once"),
        ("dp=0", "dp must be >= 1"),
        ("dp=two", "whole number"),
        ("zero=4", "zero must be"),
        ("pp=2 zero=3", "in a pipeline"),
        ("interleave=2", "without a pipeline"),
    ],
)
def test_nonsense_is_refused_with_its_rule(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=3", "must be 8 devices"),
        ("tp=8", "tp must divide the 12 heads"),
        ("pp=8", "must divide the 12 layers"),
        ("dp=2 tp=4 ep=2", "without experts"),
        ("dp=2 pp=4 interleave=3 accumulation=3", "multiple of pp"),
    ],
)
def test_layouts_that_the_model_does_not_allow(text: str, said: str) -> None:
    with pytest.raises(NotFeasible, match=said):
        require_feasible(parse_layout(text), layers=12, heads=12, world_size=8)


def test_a_global_batch_is_split_evenly_or_refused() -> None:
    assert accumulation_for(global_batch=64, dp=4, micro_batch=2) == 8
    assert Layout(dp=4, micro_batch=2, accumulation=8).global_batch == 64
    with pytest.raises(NotFeasible, match="multiple of dp x micro_batch"):
        accumulation_for(global_batch=63, dp=4, micro_batch=2)
