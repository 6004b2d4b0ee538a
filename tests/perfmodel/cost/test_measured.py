"""Layouts of a traced model on a calibrated machine: laws that hold for any prices."""

from dataclasses import replace

import pytest

from perfmodel.answer.measured import layout_costs
from perfmodel.cost.machine import PIPELINE, ranks_beside
from perfmodel.cost.network import Group, groups
from perfmodel.layout import parse_layout
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.step import Cause
from tests.perfmodel.asking import Asking
from tests.perfmodel.llama import document
from tests.perfmodel.operators import costs_of_the_made_up_machine
from tests.perfmodel.profiles import Machine, profile


@pytest.fixture(scope="module")
def machine() -> MeasuredMachine:
    found = profile(Machine(bucket_s=1e-5, bucket_s_per_byte=1e-11, world_size=4))
    return replace(found, operators=costs_of_the_made_up_machine())


@pytest.mark.parametrize(
    ("text", "shorter"),
    [
        ("dp=4", {Cause.ALL_REDUCE}),
        ("fsdp=4", {Cause.REDUCE_SCATTER}),
        ("fsdp=2 tp=2", {Cause.REDUCE_SCATTER}),
    ],
)
def test_gradients_of_fewer_bytes_shorten_their_sums_alone(
    machine: MeasuredMachine, text: str, shorter: set[Cause]
) -> None:
    """Neither gathers of parameters nor what tensor parallelism sums."""
    asked = Asking(machine)
    found = document()
    workload = asked.workload(found.workload, found.trace, found.memory)
    question = asked.question(workload, parse_layout(f"{text} micro_batch=8"))
    was, now = layout_costs(question), layout_costs(replace(question, gradient_share=0.5))
    took_s = zip(was.program.operations, was.median_s, now.median_s, strict=True)
    assert {o.cause for o, before_s, after_s in took_s if after_s[0] < before_s[0]} == shorter


def test_ranks_of_every_exchange_by_their_order() -> None:
    """Sequences are shared by neighbours, matrices by the nearest of them."""
    found = groups(parse_layout("dp=4 tp=2 cp=3 pp=4 accumulation=4"))
    assert found[Cause.TENSOR] == Group(2, 1)
    assert found[Cause.ALL_REDUCE] == Group(12, 6)
    assert found[Cause.P2P] == Group(2, 24)


def test_who_exchanges_at_the_same_time() -> None:
    """Of 8 ranks in two stages four of each, and two that send."""
    layout = parse_layout("dp=4 pp=2 accumulation=2")
    assert ranks_beside("zero-3", layout) == 4
    assert ranks_beside(PIPELINE, layout) == 2
