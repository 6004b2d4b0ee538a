"""Collectives alone on the machine, on buffers that are not in a cache."""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from calibrate.probes.session import Session, repeats_within
from perfmodel.units import MIB, Bytes, Seconds

COLLECTIVES: Final = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)

#: Buffers rotate through this much memory: gradients are not in a cache either.
_ROTATION_BYTES: Final = 64 * MIB
_MAXIMUM_REPEATS: Final = 100


def measure_collective(
    session: Session, collective: str, *, size_bytes: Bytes, world_size: int, target_s: Seconds
) -> list[Seconds]:
    """Time repeats of one collective over the first ``world_size`` ranks. [s]

    ``size_bytes`` is the whole array, as nccl-tests counts it: for all-gather the result, for
    reduce-scatter the input.
    """
    acts = _acts(session, collective, size_bytes=size_bytes, world_size=world_size)
    num_calls = 0

    def act() -> None:
        nonlocal num_calls
        acts[num_calls % len(acts)]()
        num_calls += 1

    warm_s = session.time_repeats(act, repeats=3, is_joint=True)
    repeats = session.agree(
        repeats_within(target_s, warm_s[1:], minimum=5, maximum=_MAXIMUM_REPEATS),
        world_size=world_size,
    )
    durations_s = []
    for _ in range(repeats):
        session.barrier(world_size)
        durations_s += session.time_repeats(act, repeats=1, is_joint=True)
    return durations_s


def _acts(
    session: Session, collective: str, *, size_bytes: Bytes, world_size: int
) -> list[Callable[[], object]]:
    """One closure per rotating buffer."""
    num_buffers = max(1, min(16, _ROTATION_BYTES // size_bytes))
    num_elements = max(world_size, size_bytes // 4 // world_size * world_size)
    group = session.data[world_size]
    buffers = [torch.zeros(num_elements, device=session.device) for _ in range(num_buffers)]
    shard = torch.zeros(num_elements // world_size, device=session.device)
    exchanged = torch.zeros_like(buffers[0]) if collective == "all_to_all" else shard

    def all_reduce(buffer: torch.Tensor) -> object:
        return dist.all_reduce(buffer, group=group)

    def broadcast(buffer: torch.Tensor) -> object:
        return dist.broadcast(buffer, src=0, group=group)

    def all_gather(buffer: torch.Tensor) -> object:
        return dist.all_gather_into_tensor(buffer, shard, group=group)

    def reduce_scatter(buffer: torch.Tensor) -> object:
        return dist.reduce_scatter_tensor(shard, buffer, group=group)

    def send_recv(buffer: torch.Tensor) -> object:
        if session.rank == 0:
            return dist.send(buffer, dst=1, group=group)
        return dist.recv(buffer, src=0, group=group)

    def all_to_all(buffer: torch.Tensor) -> object:
        return dist.all_to_all_single(exchanged, buffer, group=group)

    act = {
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "send_recv": send_recv,
    }[collective]
    return [lambda buffer=buffer: act(buffer) for buffer in buffers]  # type: ignore[misc]
