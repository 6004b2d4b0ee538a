"""Compute and an all-reduce alone and at the same time."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from calibrate.probes.session import Session, repeats_within
from perfmodel.units import Bytes, Seconds

#: Matrix products short enough to count them while an all-reduce runs.
_WIDTH = {"cpu": 256, "cuda": 2048}
#: On a GPU so many times the length of the all-reduce is queued, to outlast it even if it slows down.
_OUTLAST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """One all-reduce beside matrix products that never pause."""

    comm_s: Seconds
    """Length of the all-reduce."""
    compute_s: Seconds
    """Length of one matrix product while it ran."""


def measure_overlap(
    session: Session, *, size_bytes: Bytes, world_size: int, target_s: Seconds
) -> dict[str, list[Seconds]]:
    """Time an all-reduce and matrix products: each alone, and both at once.

    Returns
    -------
    dict
        Samples of ``compute_alone_s`` and ``compute_together_s`` (of one matrix product) and of
        ``comm_alone_s`` and ``comm_together_s`` (of one all-reduce), all of the same length. [s]
    """
    group = session.data[world_size]
    buffer = torch.zeros(size_bytes // 4, device=session.device)
    matrix = torch.randn((_WIDTH[session.device.type],) * 2, device=session.device)

    def compute() -> None:
        torch.mm(matrix, matrix)

    def communicate() -> None:
        dist.all_reduce(buffer, group=group)

    comm_s = min(_timed(session, communicate) for _ in range(3))
    compute_s = min(session.time_repeats(compute, repeats=5, is_joint=True))
    num_alone = session.agree(max(1, round(comm_s / compute_s)), world_size=world_size)
    repeats = session.agree(
        repeats_within(target_s, [3 * comm_s], minimum=3, maximum=30), world_size=world_size
    )
    samples: dict[str, list[Seconds]] = {
        name: []
        for name in ("compute_alone_s", "comm_alone_s", "compute_together_s", "comm_together_s")
    }
    for _ in range(repeats):
        session.barrier(world_size)
        alone_s = session.time_repeats(compute, repeats=num_alone, is_joint=True)
        samples["compute_alone_s"].append(sum(alone_s) / len(alone_s))
        session.barrier(world_size)
        samples["comm_alone_s"].append(_timed(session, communicate))
        session.barrier(world_size)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        together = (
            _queued_together(work, compute, num_queued=_OUTLAST * num_alone)
            if session.asynchronous
            else _counted_together(work, compute)
        )
        samples["compute_together_s"].append(together.compute_s)
        samples["comm_together_s"].append(together.comm_s)
    return samples


def _counted_together(work: dist.Work, compute: Callable[[], None]) -> Together:
    """Compute until the all-reduce is done, for devices that run synchronously."""
    start_s = time.perf_counter()
    count = 0
    while count == 0 or not work.is_completed():
        compute()
        count += 1
    elapsed_s = time.perf_counter() - start_s
    work.wait()
    return Together(comm_s=elapsed_s, compute_s=elapsed_s / count)


def _queued_together(work: dist.Work, compute: Callable[[], None], *, num_queued: int) -> Together:
    """Queue more compute than the all-reduce lasts; see how much was done when it ended."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_queued + 1)]
    end = torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    marks[0].record()
    with torch.cuda.stream(side):
        work.wait()
        end.record()
    for mark in marks[1:]:
        compute()
        mark.record()
    torch.cuda.synchronize()
    comm_s = marks[0].elapsed_time(end) / 1e3
    durations_s = [first.elapsed_time(mark) / 1e3 for first, mark in itertools.pairwise(marks)]
    beside = [
        duration_s
        for duration_s, end_s in zip(durations_s, itertools.accumulate(durations_s), strict=True)
        if end_s <= comm_s
    ]
    chosen = beside or durations_s[:1]
    return Together(comm_s=comm_s, compute_s=sum(chosen) / len(chosen))


def _timed(session: Session, act: Callable[[], object]) -> Seconds:
    start_s = time.perf_counter()
    act()
    session.synchronise()
    return time.perf_counter() - start_s
