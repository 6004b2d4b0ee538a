"""Techniques, by hand."""

import dataclasses

import pytest

from perfmodel.answer.memory import PlainStep, StepTimes, Technique, techniques
from perfmodel.layout import Layout, Recompute
from perfmodel.machine import Evidence, Overhead
from perfmodel.workload.memory import Block, StepMemory
from perfmodel.workload.step import AffineBytes
from tests.perfmodel.workload.memory_samples import step_memory, traced_memory

BARE = Overhead(
    context_bytes=0, context_spread_bytes=1, reserved_ratio=1.0, log_spread=0.0, evidence="a test"
)
TIMES = StepTimes(forward_s=4.0, backward_s=8.0, optimizer_s=1.0, evidence=Evidence.MEASURED)
SHARES = {"layers.0": 0.25, "layers.1": 0.25}


def rows(
    micro_batch: int = 8,
    devices: int = 1,
    *,
    memory: StepMemory | None = None,
    capacity_bytes: int = 1000,
) -> dict[str, Technique]:
    plain = PlainStep(
        traced=traced_memory(BARE, memory=memory),
        layout=Layout(dp=devices, micro_batch=micro_batch),
        times=TIMES,
        shares=SHARES,
    )
    return {row.name: row for row in techniques(plain, capacity_bytes)}


def test_checkpointing_keeps_inputs_and_one_block() -> None:
    """8 samples: 160 in all, 128 in blocks; 32 stay, 16 inputs, 64 of the block at work."""
    [found] = traced_memory(BARE).ranks(Layout(micro_batch=8, recompute=Recompute.FULL))
    assert found.parts["activations"] == 32 + 16 + 64


def three_blocks() -> StepMemory:
    """All take as long; the second saves most (8 x 9 less 8 x 1 of input), the first less than its input."""
    blocks = tuple(
        Block(
            path=path,
            parameter_bytes=10,
            input=AffineBytes(constant_bytes=0, per_sample_bytes=entering),
            saved=AffineBytes(constant_bytes=0, per_sample_bytes=saved),
        )
        for path, saved, entering in (("a", 3, 8), ("b", 9, 1), ("c", 4, 1))
    )
    return dataclasses.replace(step_memory(), blocks=blocks)


def test_selective_checkpointing_takes_as_few_blocks_as_fit() -> None:
    """200 as it is: 40 and 160 of activations.

    The first block found leaves its input instead of what it saves, and is computed again at once: no
    gain by itself. Two blocks: 4 x 8 outside, 3 x 8 of the third, 16 of inputs, 72 at work: 144.
    """
    named = rows(memory=three_blocks(), capacity_bytes=190)
    row = named["activation checkpointing of 2 of 3 blocks"]
    assert row.memory.tensor_bytes == 40 + 32 + 24 + 16 + 72
    assert "activation checkpointing of 1 of 3 blocks" in rows(memory=three_blocks())


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
    assert rows(devices=devices)[name].memory.tensor_bytes == tensor_bytes


def test_checkpointing_computes_its_blocks_again() -> None:
    assert rows()["activation checkpointing per block"].step_s == pytest.approx(13 + 0.5 * 4)


def test_every_row_of_one_device_by_hand() -> None:
    """40 of states and 160 of activations; 4 s forward, 8 s backward, 1 s of updates."""
    named = rows()
    whole = named["activation checkpointing of the whole model"]
    assert whole.memory.tensor_bytes == 200
    assert whole.step_s == pytest.approx(13 + 4)
    assert named["gradient accumulation 2"].step_s == pytest.approx(13)
    # Half of the activations, and of 20 of weights a copy of half the size.
    mixed = named["mixed precision bf16 (autocast)"]
    assert mixed.memory.tensor_bytes == 40 + 80 + 10
    assert mixed.step_s is None
    # 40 of 100 bytes of the update are temporaries.
    fused = rows(micro_batch=1)["fused optimizer"]
    assert (fused.memory.tensor_bytes, fused.step_s) == (60, None)


def test_a_micro_batch_of_one_is_not_divided_and_autocast_is_not_offered_twice() -> None:
    assert "gradient accumulation 2" not in rows(micro_batch=1)
    traced = traced_memory(BARE)
    method = dataclasses.replace(traced.trace.method, precision="bf16")
    traced = dataclasses.replace(traced, trace=dataclasses.replace(traced.trace, method=method))
    plain = PlainStep(traced=traced, layout=Layout(micro_batch=8), times=TIMES, shares=SHARES)
    names = [row.name for row in techniques(plain, 1000)]
    assert not any("mixed precision" in name for name in names)
    assert names[0] == "as it is"
