"""Techniques, by hand."""

from dataclasses import replace

import pytest

from perfmodel.answer.memory import Technique, techniques
from perfmodel.layout import Layout
from perfmodel.machine import Overhead
from perfmodel.workload import Call, Parameter, Phase, Workload
from perfmodel.workload.step import Segment, SymbolicOperator, SymbolicTensor
from tests.perfmodel.workload.memory_samples import traced_memory

BARE = Overhead(
    context_bytes=0, context_spread_bytes=1, reserved_ratio=1.0, log_spread=0.0, evidence="a test"
)
WORKLOAD = Workload(
    name="two layers",
    sample="a number",
    parameters=(Parameter(name="w", num_elements=1),),
    forward_flop=1.0,
    backward_flop=2.0,
    num_operators=1,
)


def rows(devices: int) -> dict[str, Technique]:
    found = techniques(traced_memory(BARE), Layout(dp=devices, micro_batch=8), WORKLOAD)
    return {row.name: row for row in found}


@pytest.mark.parametrize(
    ("name", "devices", "tensor_bytes"),
    [
        # 4 samples at a time: 40 + 80, and 20 of gradients from the first half.
        ("gradient accumulation 2", 1, 140),
        # 40 and what checkpointing keeps.
        ("activation checkpointing per block", 1, 152),
        # 8 samples: 200 + 20 of buckets; 20 of states become 5.
        ("as it is", 4, 220),
        ("optimizer states sharded over 4 (ZeRO-1)", 4, 205),
        # 160; 20 of parameters become 5 and two blocks, 20 of states 5; one block's gradient is reduced.
        ("everything sharded over 4 (ZeRO-3, FSDP)", 4, 160 + 5 + 20 + 5 + 10),
    ],
)
def test_techniques_keep_what_the_hand_says(name: str, devices: int, tensor_bytes: int) -> None:
    assert rows(devices)[name].memory.tensor_bytes == tensor_bytes


def test_time_is_told_by_flop_and_not_where_communication_decides() -> None:
    """1 FLOP forward for 2 backward, two thirds of them in blocks; halves are not offered of one sample."""
    traced = traced_memory(BARE)
    product = SymbolicOperator(
        name="aten.mm.default", inputs=(0, 0), outputs=(0,), arguments="[[],{}]"
    )
    calls = tuple(
        Call(operator=0, phase=Phase.FORWARD, module=path)
        for path in ("layers.0", "layers.1.attention", "head")
    )
    trace = replace(
        traced.trace,
        tensors=(SymbolicTensor(shape=(1, 1), dtype="float32"),),
        operators=(product,),
        segments=(Segment(count=1, calls=calls),),
    )
    workload = replace(WORKLOAD, forward_flop=5.0, backward_flop=10.0)
    found = techniques(replace(traced, trace=trace), Layout(dp=4, micro_batch=1), workload)
    ratios = {row.name: row.time_ratio for row in found}
    assert ratios == {
        "as it is": 1,
        "activation checkpointing per block": pytest.approx(1 + 2 / 3 / 3),
        "optimizer states sharded over 4 (ZeRO-1)": None,
        "everything sharded over 4 (ZeRO-3, FSDP)": None,
    }
