"""What a step consists of."""

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest

from perfmodel.engine import algebra
from perfmodel.layout import Layout, Synchronisation
from perfmodel.step import Cause, StepProgram, Stream
from perfmodel.step.compile import compile_divided, compile_step
from perfmodel.step.stages import undivided
from tests.perfmodel.profiles import HEAVY

#: 8 gradients of 1 MiB in 2 buckets of 4 MiB.
TWO = Layout(dp=2, micro_batch=16, bucket_cap_mb=4)
ALONE = Layout(micro_batch=16)


def program(layout: Layout, *, asynchronous: bool = False) -> StepProgram:
    return compile_step(HEAVY, layout, asynchronous=asynchronous)


def names(layout: Layout, *, asynchronous: bool = False) -> list[str]:
    return [entry.name for entry in program(layout, asynchronous=asynchronous).operations]


def test_buffers_are_broadcast_once_before_the_first_forward() -> None:
    step = program(dataclasses.replace(TWO, accumulation=3))
    broadcasts = [i for i, entry in enumerate(step.operations) if entry.cause is Cause.BROADCAST]
    assert broadcasts == [1]
    assert step.operations[1].size_bytes == 4096
    assert step.operations[2].after == (1,)


def test_one_rank_under_ddp_fills_buckets_but_communicates_nothing() -> None:
    step = program(dataclasses.replace(TWO, dp=1, wrapper=Synchronisation.DDP))
    counts = Counter(entry.cause for entry in step.operations)
    assert step.on_stream(Stream.COMM) == ()
    assert counts[Cause.BUCKET] == 2


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
