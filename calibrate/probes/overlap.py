"""Compute and an all-reduce alone and at the same time."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from calibrate.probes.session import Session, repeats_within
from perfmodel.units import Bytes, Seconds

_WIDTH = {"cpu": 384, "cuda": 4096}


def measure_overlap(
    session: Session, *, size_bytes: Bytes, world_size: int, target_s: Seconds
) -> dict[str, list[Seconds]]:
    """Time matmuls of about the all-reduce's length: alone, the all-reduce alone, and both at once."""
    group = session.data[world_size]
    buffer = torch.zeros(size_bytes // 4, device=session.device)
    matrix = torch.randn((_WIDTH[session.device.type],) * 2, device=session.device)

    def communicate() -> None:
        dist.all_reduce(buffer, group=group)

    comm_s = min(_timed(session, communicate) for _ in range(3))
    matmul_s = min(_timed(session, lambda: matrix @ matrix) for _ in range(5))
    num_matmuls = session.agree(max(1, round(comm_s / matmul_s)), world_size=world_size)

    def compute() -> None:
        for _ in range(num_matmuls):
            torch.mm(matrix, matrix)

    repeats = session.agree(
        repeats_within(target_s, [3 * comm_s], minimum=3, maximum=30), world_size=world_size
    )
    samples: dict[str, list[Seconds]] = {
        name: []
        for name in ("compute_alone_s", "comm_alone_s", "compute_together_s", "comm_together_s")
    }
    for _ in range(repeats):
        session.barrier(world_size)
        samples["compute_alone_s"].append(_timed(session, compute))
        session.barrier(world_size)
        samples["comm_alone_s"].append(_timed(session, communicate))
        session.barrier(world_size)
        start_s = time.perf_counter()
        work = dist.all_reduce(buffer, group=group, async_op=True)
        compute()
        if session.asynchronous:
            torch.cuda.current_stream().synchronize()
        samples["compute_together_s"].append(time.perf_counter() - start_s)
        work.wait()
        session.synchronise()
        samples["comm_together_s"].append(time.perf_counter() - start_s)
    return samples


def _timed(session: Session, act: Callable[[], object]) -> Seconds:
    start_s = time.perf_counter()
    act()
    session.synchronise()
    return time.perf_counter() - start_s
