"""The layout grammar, and what is impossible."""

from typing import Any

import pytest

from perfmodel.errors import NotFeasible, WrongArgument
from perfmodel.layout import (
    Layout,
    Limits,
    Recompute,
    RunSetting,
    accumulation_for,
    parse_layout,
    require_feasible,
)


def test_text_becomes_a_layout() -> None:
    layout = parse_layout("dp=8 tp=4 pp=2 zero=1 recompute=selective interleave=2")
    assert (layout.world_size, layout.recompute) == (64, Recompute.SELECTIVE)


@pytest.mark.parametrize(
    "text",
    [
        "dp=8 tp=4 pp=2 zero=1 micro_batch=2 recompute=selective interleave=2",
        "dp=16 zero=3 shard=8 precision=fp8",
        "dp=16 ep=8",
        "dp=4 precision=tf32",
        "dp=4 micro_batch=12 one_process=yes",
        "pp=3 accumulation=6 schedule=gpipe",
    ],
)
def test_every_option_survives_its_text(text: str) -> None:
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=3", "must be 8 devices"),
        ("tp=8", "tp must divide the 12 heads"),
        ("pp=16 dp=1", "at most the 12 layers"),
        ("pp=8 interleave=2", "at most the 12 layers"),
        ("dp=4 pp=2 interleave=4", "must divide the 12 layers"),
        ("dp=4 tp=2 ep=2", "without experts"),
        ("dp=2 pp=4 interleave=3 accumulation=3", "multiple of pp"),
    ],
)
def test_layouts_that_the_model_does_not_allow(text: str, said: str) -> None:
    limits = Limits(layers=12, heads=12, devices=8)
    with pytest.raises(NotFeasible, match=said):
        require_feasible(parse_layout(text), limits)


def test_experts_are_divided_evenly() -> None:
    limits = Limits(layers=12, heads=12, devices=8, experts=6)
    require_feasible(parse_layout("dp=8 ep=2"), limits)
    with pytest.raises(NotFeasible, match="ep must divide the 6 experts, got 4"):
        require_feasible(parse_layout("dp=8 ep=4"), limits)


def test_what_an_even_split_leaves_goes_to_the_middle() -> None:
    assert Layout(pp=4).stages(32) == (8, 8, 8, 8)
    assert Layout(pp=4).stages(34) == (8, 9, 9, 8)
    assert Layout(pp=4).stages(35) == (9, 9, 9, 8)
    assert Layout(pp=2).stages(3) == (2, 1)


def test_names_of_wrappers_stand_for_replicas_and_sharding() -> None:
    assert parse_layout("fsdp=8 tp=2") == Layout(dp=8, tp=2, zero=3)
    assert parse_layout("ddp=8") == Layout(dp=8)
    assert str(parse_layout("ddp=1")) == "ddp=1"


def test_a_global_batch_is_split_evenly_or_refused() -> None:
    assert accumulation_for(global_batch=64, dp=4, micro_batch=2) == 8
    assert Layout(dp=4, micro_batch=2, accumulation=8).global_batch == 64
    with pytest.raises(NotFeasible, match="multiple of dp x micro_batch"):
        accumulation_for(global_batch=63, dp=4, micro_batch=2)


@pytest.mark.parametrize("divided", ["", "dp=2 tp=2 micro_batch=4"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("world_size", -3), ("micro_batch", 0), ("accumulation", -1), ("bucket_cap_mb", 0.0)],
)
def test_a_setting_names_what_no_run_can_have(name: str, value: float, divided: str) -> None:
    sizes: dict[str, Any] = {"world_size": 4, "micro_batch": 4, "divided": divided}
    assert RunSetting(workload="any", **sizes).layout.world_size == 4
    with pytest.raises(WrongArgument, match=f"^{name} must be .*, got {value}$"):
        RunSetting(workload="any", **sizes | {name: value})
