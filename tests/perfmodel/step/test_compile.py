"""What a step consists of."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from perfmodel.engine import algebra
from perfmodel.layout import Layout, Synchronisation, parse_layout
from perfmodel.step import Cause, Piece, StageDivision, StepProgram, Stream, undivided
from perfmodel.step.compile import compile_divided, compile_step
from tests.perfmodel.profiles import HEAVY

#: 8 gradients of 1 MiB in 2 buckets of 4 MiB.
TWO = Layout(dp=2, micro_batch=16, bucket_cap_mb=4)
ALONE = Layout(micro_batch=16)


def program(layout: Layout, *, asynchronous: bool = False) -> StepProgram:
    return compile_step(HEAVY, layout, asynchronous=asynchronous)


def test_buffers_are_broadcast_once_before_the_first_forward() -> None:
    step = program(dataclasses.replace(TWO, accumulation=3))
    broadcasts = [i for i, entry in enumerate(step.operations) if entry.cause is Cause.BROADCAST]
    assert broadcasts == [1]
    assert step.operations[1].size_bytes == 4096
    assert step.operations[2].after == (1,)


def test_one_rank_under_ddp_fills_buckets_but_communicates_nothing() -> None:
    step = program(dataclasses.replace(TWO, dp=1, wrapper=Synchronisation.DDP))
    assert step.on_stream(Stream.COMM) == ()
    assert [entry.cause for entry in step.operations].count(Cause.BUCKET) == 2


def test_shards_are_broadcast_two_at_a_time_after_the_slowest_optimizer() -> None:
    """Shards of 3, 1 and 2: half of the work is the largest's; first 3 beside 2, then 1."""
    division = dataclasses.replace(undivided(HEAVY, TWO), parameters_bytes=(3, 1, 2))
    step = compile_divided(TWO, [division], asynchronous=False, num_shards=3)
    (position,) = (i for i, o in enumerate(step.operations) if o.cause is Cause.OPTIMIZER)
    assert step.operations[position].share == 0.5
    last = step.operations[position + 1 :]
    assert [(o.cause, o.size_bytes, o.after) for o in last] == [
        (Cause.BROADCAST, 3, (position,)),
        (Cause.BROADCAST, 1, (position,)),
    ]


@pytest.mark.parametrize("layout", [ALONE, TWO, dataclasses.replace(TWO, zero=1)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_micro_batches_are_few_operations_and_the_same_work(
    layout: Layout, *, asynchronous: bool
) -> None:
    """A thousand take 936 times what the 64th adds, on every stream and to the step."""

    def work(accumulation: int) -> tuple[int, dict[object, float]]:
        found = program(
            dataclasses.replace(layout, accumulation=accumulation), asynchronous=asynchronous
        )
        shares = np.array([entry.share for entry in found.operations])
        done: dict[object, float] = defaultdict(float)
        for entry in found.operations:
            done[entry.stream, entry.cause, entry.issues] += entry.share
        if not asynchronous:
            done["step"] = algebra.trace(found, shares).step_s
        return len(shares), done

    (_, early), (some, middle), (many, late) = work(63), work(64), work(1000)
    assert many == some
    expected = {what: middle[what] + 936 * (middle[what] - early[what]) for what in middle}
    assert late == pytest.approx(expected, rel=1e-9)


# Divided steps.
#: Two units of 100 and 300 bytes; the second one takes longer.
UNITS = StageDivision(
    forward=(Piece(0.25, 0.5, 100, 2.0), Piece(0.75, 0.5, 300, 1.0)),
    backward=(Piece(0.75, 0.5, 300, 1.0), Piece(0.25, 0.5, 100, 2.0)),
    activation_bytes=64,
)


def divided(text: str, *stages: StageDivision, blocking: bool = False) -> StepProgram:
    return compile_divided(parse_layout(text), stages, asynchronous=False, blocking=blocking)


def sizes(program: StepProgram, cause: Cause) -> list[int]:
    return [o.size_bytes for o in program.operations if o.cause is cause and o.size_bytes]


@pytest.mark.parametrize("blocking", [False, True])
def test_fully_sharded_units_are_gathered_twice_and_reduced_once(*, blocking: bool) -> None:
    found = divided("dp=2 zero=3", UNITS, blocking=blocking)
    assert sizes(found, Cause.ALL_GATHER) == [100, 300, 300, 100]
    assert sizes(found, Cause.REDUCE_SCATTER) == [300, 100]
    assert not sizes(found, Cause.ALL_REDUCE)


def test_a_sharded_optimizer_gathers_once_a_step_and_reduces_after_the_last_pass() -> None:
    found = divided("dp=2 zero=1 accumulation=2", UNITS)
    assert sizes(found, Cause.ALL_GATHER) == [100, 300]
    assert sizes(found, Cause.REDUCE_SCATTER) == [300, 100]


def test_tensor_parallel_all_reduces_are_waited_for() -> None:
    found = divided("dp=2 tp=2", UNITS)
    reduced = [o for o in found.operations if o.stream is Stream.TENSOR]
    assert [(o.share, o.size_bytes) for o in reduced] == [(3.0, 64), (1.0, 64), (2.0, 64)]
    after = {i for o in found.operations if o.stream is Stream.COMPUTE for i in o.after}
    assert {found.operations.index(o) for o in reduced} <= after
