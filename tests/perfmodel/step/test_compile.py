"""What a step consists of."""

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest

from perfmodel.engine import algebra
from perfmodel.layout.layout import Layout, Synchronisation
from perfmodel.step.compile import compile_divided, compile_step
from perfmodel.step.program import Cause, StepProgram, Stream
from perfmodel.step.stages import gradient_buckets, undivided
from perfmodel.units import MIB
from tests.perfmodel.profiles import HEAVY, LIGHT

#: 8 gradients of 1 MiB in 2 buckets of 4 MiB.
TWO = Layout(dp=2, micro_batch=16, bucket_cap_mb=4)
ALONE = Layout(micro_batch=16)


def program(layout: Layout, *, asynchronous: bool = False) -> StepProgram:
    return compile_step(HEAVY, layout, asynchronous=asynchronous)


def names(layout: Layout, *, asynchronous: bool = False) -> list[str]:
    return [entry.name for entry in program(layout, asynchronous=asynchronous).operations]


def share_of(step: StepProgram, cause: Cause, stream: Stream = Stream.COMPUTE) -> float:
    return sum(
        entry.share
        for entry in step.operations
        if stream is entry.stream and cause in {entry.cause, entry.issues}
    )


def test_buckets_follow_the_cap_and_are_ready_with_their_last_gradient() -> None:
    """4 of 8 gradients are ready after half of backward, all at its end."""
    buckets = gradient_buckets(HEAVY, TWO)
    assert [bucket.size_bytes for bucket in buckets] == [4 * MIB, 4 * MIB]
    assert [bucket.share for bucket in buckets] == [0.5, 0.5]


def test_the_default_cap_closes_the_first_bucket_at_one_mebibyte() -> None:
    """1 MiB, then the other 7 below 25 MiB."""
    buckets = gradient_buckets(HEAVY, dataclasses.replace(TWO, bucket_cap_mb=None))
    assert [bucket.size_bytes for bucket in buckets] == [MIB, 7 * MIB]


def test_a_single_device_computes_and_nothing_else() -> None:
    assert names(ALONE) == ["load batch", "input 0", "forward 0", "backward 0", "optimizer"]


def test_a_synchronised_step_overlaps_reduction_with_backward() -> None:
    assert names(TWO) == [
        "load batch",
        "broadcast buffers",
        "input 0",
        "forward 0",
        "backward 0.0",
        "bucket 0",
        "all-reduce 0",
        "backward 0.1",
        "bucket 1",
        "all-reduce 1",
        "optimizer",
    ]
    step = program(TWO)
    assert step.operations[6].after == (5,)
    assert step.operations[7].after == ()
    assert step.operations[10].after == (6, 9)


def test_the_backward_pass_is_shared_out_completely() -> None:
    cap_two = dataclasses.replace(TWO, bucket_cap_mb=2)
    assert share_of(program(TWO), Cause.BACKWARD) == pytest.approx(1.0)
    assert share_of(program(cap_two), Cause.BACKWARD) == pytest.approx(1.0)


def test_backward_after_the_last_gradient_comes_before_the_last_bucket() -> None:
    """Gradients that are all ready early do not shorten the pass."""
    early = dataclasses.replace(
        HEAVY,
        parameters=tuple(
            dataclasses.replace(parameter, ready_fraction=0.25) for parameter in HEAVY.parameters
        ),
    )
    step = compile_step(early, TWO, asynchronous=False)
    shares = [entry.share for entry in step.operations if entry.cause is Cause.BACKWARD]
    assert shares == [0.25, 0.75]


def test_only_the_last_micro_step_reduces() -> None:
    step = program(dataclasses.replace(TWO, accumulation=3))
    counts = Counter(entry.cause for entry in step.operations)
    assert counts[Cause.ALL_REDUCE] == counts[Cause.BUCKET] == 2
    assert counts[Cause.FORWARD] == 3
    assert share_of(step, Cause.BACKWARD) == pytest.approx(3.0)
    first = next(i for i, e in enumerate(step.operations) if e.cause is Cause.ALL_REDUCE)
    assert [entry.name for entry in step.operations[first - 6 : first]] == [
        "forward 1",
        "backward 1",
        "input 2",
        "forward 2",
        "backward 2.0",
        "bucket 0",
    ]


def test_buffers_are_broadcast_once_before_the_first_forward() -> None:
    step = program(dataclasses.replace(TWO, accumulation=3))
    broadcasts = [i for i, entry in enumerate(step.operations) if entry.cause is Cause.BROADCAST]
    assert broadcasts == [1]
    assert step.operations[1].size_bytes == 4096
    assert step.operations[2].after == (1,)


def test_without_buffers_nothing_is_broadcast() -> None:
    light = compile_step(LIGHT, TWO, asynchronous=False)
    assert Cause.BROADCAST not in {entry.cause for entry in light.operations}


def test_one_rank_under_ddp_fills_buckets_but_communicates_nothing() -> None:
    step = program(dataclasses.replace(TWO, dp=1, wrapper=Synchronisation.DDP))
    counts = Counter(entry.cause for entry in step.operations)
    assert step.on_stream(Stream.COMM) == ()
    assert counts[Cause.BUCKET] == 2


def test_without_synchronisation_gradients_stay_where_they_are() -> None:
    step = program(dataclasses.replace(TWO, wrapper=Synchronisation.NO_SYNC))
    assert step.on_stream(Stream.COMM) == ()
    assert Cause.BUCKET not in {entry.cause for entry in step.operations}


def test_asynchronous_compute_is_issued_by_the_host_first() -> None:
    step = program(TWO, asynchronous=True)
    for cause in (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER):
        assert share_of(step, cause, Stream.HOST) == pytest.approx(share_of(step, cause))
    issued = step.on_stream(Stream.HOST)
    assert [step.operations[i].name for i in issued] == [
        "issue forward 0",
        "issue backward 0.0",
        "issue backward 0.1",
        "issue optimizer",
    ]
    for i in issued:
        waiting = [entry for entry in step.operations if i in entry.after]
        assert [entry.name for entry in waiting] == [step.operations[i].name.removeprefix("issue ")]


def test_synchronous_devices_have_no_host_of_their_own() -> None:
    assert program(TWO).on_stream(Stream.HOST) == ()


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
