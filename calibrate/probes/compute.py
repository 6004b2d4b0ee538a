"""Compute, copies and dispatch alone on one rank."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.device import Device
from calibrate.layers import Layer
from calibrate.probes import LONG_S, Session, repeats_within
from calibrate.task import CollectiveTask, ComputeTask, OverlapTask
from perfmodel.documents.observation import (
    DDP_PROBE,
    HOST_PROBES,
    QUEUE_PROBE,
    CollectiveObservation,
    ComputeObservation,
    OptimizerPoint,
    OverlapObservation,
)
from perfmodel.tracing.source import make_optimizer
from perfmodel.units import MIB, Bytes, Seconds

_DTYPES: Final = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_CALLS_PER_DISPATCH_SAMPLE: Final = 1000
_SAMPLES_OF_STACK: Final = 8
#: Kernels and events that are queued behind one hold: of more than 1,024 CUDA lets the host wait.
_MOST_QUEUED: Final = 500
#: Elements of a kernel that takes no longer than its start.
_SHORT_KERNEL: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """Work of one call, and how many operators one call issues."""

    act: Callable[[], object]
    flop: float = 0.0
    moved_bytes: float = 0.0
    calls: int = 1
    launches: int = 1
    """Kernels that one call queues."""


def measure_compute(session: Session, task: ComputeTask) -> ComputeObservation:
    """Time repeats of one kernel on this rank alone."""
    kernel = _KERNELS[task.probe](session, task)
    # Matrix products and convolutions have a switch each.
    switches: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = task.dtype == "tf32"
    try:
        timed = session.host_times if task.probe in HOST_PROBES else session.time_repeats
        warm_s = timed(kernel.act, repeats=4)
        most = min(200, session.measured.most_repeats, _MOST_QUEUED // (kernel.launches + 1))
        repeats = repeats_within(task.target_s, warm_s[1:], minimum=6, maximum=most)
        # Of two that alternate as many each.
        durations_s = timed(kernel.act, repeats=repeats + repeats % 2)
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed
    return ComputeObservation(
        task=task.name,
        round=task.round,
        probe=task.probe,
        dtype=task.dtype,
        shape=task.shape,
        flop=kernel.flop,
        moved_bytes=kernel.moved_bytes,
        durations_s=tuple(duration_s / kernel.calls for duration_s in durations_s),
    )


def _matmul(session: Session, task: ComputeTask) -> TimedKernel:
    rows, inner, columns = task.shape
    dtype = _DTYPES[task.dtype]
    left = torch.randn(rows, inner, device=session.device).to(dtype)
    right = torch.randn(inner, columns, device=session.device).to(dtype)
    return TimedKernel(
        act=lambda: left @ right,
        flop=2.0 * rows * inner * columns,
        moved_bytes=float(left.element_size() * (rows * inner + inner * columns + rows * columns)),
    )


def _memory(session: Session, task: ComputeTask) -> TimedKernel:
    values = torch.zeros(task.shape, device=session.device)
    return TimedKernel(act=lambda: values.add_(1), moved_bytes=8.0 * values.numel())


def _queue(session: Session, task: ComputeTask) -> TimedKernel:
    """Some of the shortest kernels in a row: between two events, since only the last is waited for."""
    values = torch.zeros(_SHORT_KERNEL, device=session.device)
    (count,) = task.shape

    def act() -> None:
        for _ in range(count):
            values.add_(1)

    return TimedKernel(act=act, launches=count)


def _copy(session: Session, task: ComputeTask) -> TimedKernel:
    """From pinned memory of the host to the device."""
    source = session.measured.pinned(torch.zeros(task.shape))
    target = torch.zeros(task.shape, device=session.device)
    return TimedKernel(
        act=lambda: target.copy_(source, non_blocking=True), moved_bytes=4.0 * source.numel()
    )


def _dispatch(session: Session, task: ComputeTask) -> TimedKernel:
    """Cost of one operator that has nothing to do, or that starts no kernel."""
    value = torch.zeros(task.shape, device=session.device)
    issue = (
        functools.partial(value.add_, 1)
        if task.probe == "dispatch"
        else functools.partial(value.view, -1)
    )

    calls = min(_CALLS_PER_DISPATCH_SAMPLE, session.measured.most_repeats)

    def act() -> None:
        for _ in range(calls):
            issue()

    return TimedKernel(act=act, calls=calls)


def _ddp(session: Session, task: ComputeTask) -> TimedKernel:
    """A bare stack of square layers and one under DDP by turns: their difference is what DDP costs one rank."""
    num_gradients, width = task.shape

    def stack() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_gradients)))

    wrapped = DistributedDataParallel(stack(), process_group=session.data[1])
    turns = itertools.cycle((stack(), wrapped))
    inputs = torch.randn(_SAMPLES_OF_STACK, width)

    def act() -> None:
        module = next(turns)
        module(inputs).sum().backward()
        module.zero_grad()

    return TimedKernel(act=act)


_KERNELS: Final[dict[str, Callable[[Session, ComputeTask], TimedKernel]]] = {
    "matmul": _matmul,
    "memory": _memory,
    QUEUE_PROBE: _queue,
    "host_to_device": _copy,
    "dispatch": _dispatch,
    "view": _dispatch,
    DDP_PROBE: _ddp,
}


#: Buffers rotate through this much memory: gradients are not in a cache either.
_ROTATION_BYTES: Final = 64 * MIB
_MAXIMUM_REPEATS: Final = 100
#: Back to back on a device with a queue, which its most repeats may forbid.
_MINIMUM_BACK_TO_BACK: Final = 20


def measure_collective(session: Session, task: CollectiveTask) -> CollectiveObservation:
    """Time repeats of one collective over some ranks; behind a queue their mean alone.

    Its size is that of the whole array, as nccl-tests counts it: for all-gather the result, for
    reduce-scatter the input.
    """
    group = session.among(task.world_size, task.stride)
    gathered: list[list[Seconds]] = []
    if group is not None:
        gathered = group.gather(_collective_s(group, task), world_size=task.world_size)
    return CollectiveObservation(
        task=task.name,
        round=task.round,
        collective=task.collective,
        world_size=task.world_size,
        size_bytes=task.size_bytes,
        stride=task.stride,
        durations_s=tuple(map(tuple, gathered)),
    )


def _collective_s(session: Session, task: CollectiveTask) -> list[Seconds]:
    """Of each repeat on this rank. [s]"""
    world_size = task.world_size
    begins = itertools.cycle(
        _begins(session, task.collective, size_bytes=task.size_bytes, world_size=world_size)
    )

    def act() -> None:
        next(begins)().wait()

    warm_s = session.time_repeats(act, repeats=3)
    most = min(_MAXIMUM_REPEATS, session.measured.most_repeats)
    repeats = session.agree(
        repeats_within(
            task.target_s,
            warm_s[1:],
            minimum=min(_MINIMUM_BACK_TO_BACK, most) if session.asynchronous else 3,
            maximum=most,
        ),
        world_size=world_size,
    )
    if session.asynchronous:
        return [_back_to_back(session.measured, begins, repeats=repeats)]
    durations_s = []
    for _ in range(repeats):
        session.barrier(world_size)
        durations_s += session.time_repeats(act, repeats=1)
    return durations_s


def _back_to_back(device: Device, begins: Iterator[Callable[[], Any]], *, repeats: int) -> Seconds:
    """Mean of collectives that nothing stands between, on this rank. [s]

    One before them waits for the last rank, while the device is held until the host has issued all.
    """
    start, end = device.event(), device.event()
    device.hold()
    next(begins)().wait()
    start.record()
    works = [next(begins)() for _ in range(repeats)]
    works[-1].wait()
    end.record()
    device.synchronise()
    return float(end.seconds_since(start)) / repeats


def _begins(
    session: Session, collective: str, *, size_bytes: Bytes, world_size: int
) -> list[Callable[[], Any]]:
    """What begins it and returns its work, one closure per rotating buffer."""
    num_buffers = max(1, min(16, _ROTATION_BYTES // size_bytes))
    num_elements = max(world_size, size_bytes // 4 // world_size * world_size)
    group = session.data[world_size]
    buffers = [torch.zeros(num_elements, device=session.device) for _ in range(num_buffers)]
    shard = torch.zeros(num_elements // world_size, device=session.device)
    exchanged = torch.zeros_like(buffers[0]) if collective == "all_to_all" else shard

    def send_recv(buffer: torch.Tensor) -> Any:
        if session.rank == 0:
            return dist.isend(buffer, dst=1, group=group)
        return dist.irecv(buffer, src=0, group=group)

    both: dict[str, Any] = {"group": group, "async_op": True}
    known: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda buffer: dist.all_reduce(buffer, **both),
        "all_to_all": lambda buffer: dist.all_to_all_single(exchanged, buffer, **both),
        "broadcast": lambda buffer: dist.broadcast(buffer, src=0, **both),
        "all_gather": lambda buffer: dist.all_gather_into_tensor(buffer, shard, **both),
        "reduce_scatter": lambda buffer: dist.reduce_scatter_tensor(shard, buffer, **both),
        "send_recv": send_recv,
    }
    return [functools.partial(known[collective], buffer) for buffer in buffers]


#: Of matrix products short enough to count them while an all-reduce runs.
_WIDTH: Final = 256
#: On a GPU, in bf16: the first that takes as long as the host needs to issue it, and some 20 us at most.
_DEVICE_WIDTHS: Final = (512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072)
_PRODUCT_S: Final[Seconds] = 1e-5
#: On a GPU this multiple of the length of the all-reduce is queued, to outlast it even if it slows down.
_OUTLAST = 3


def measure_overlap(session: Session, task: OverlapTask) -> OverlapObservation:
    """Time an all-reduce and matrix products: each alone, and both at once.

    Samples of one matrix product and of one all-reduce, all of the same length.
    """
    world_size = task.world_size
    compute, begin = _beside(session, size_bytes=task.size_bytes, world_size=world_size)

    def communicate() -> None:
        begin().wait()

    comm_s = min(_timed(session, communicate) for _ in range(3))
    compute_s = min(session.time_repeats(compute, repeats=5))
    num_alone = session.agree(max(1, round(comm_s / compute_s)), world_size=world_size)
    repeats = session.agree(
        repeats_within(task.target_s, [3 * comm_s], minimum=3, maximum=30), world_size=world_size
    )
    samples: dict[str, list[Seconds]] = {
        name: []
        for name in ("compute_alone_s", "comm_alone_s", "compute_together_s", "comm_together_s")
    }
    for _ in range(repeats):
        session.barrier(world_size)
        alone_s = session.time_repeats(compute, repeats=num_alone)
        samples["compute_alone_s"].append(sum(alone_s) / len(alone_s))
        session.barrier(world_size)
        samples["comm_alone_s"].append(_timed(session, communicate))
        session.barrier(world_size)
        both_s = (
            _queued_together(session.measured, begin, compute, num_queued=_OUTLAST * num_alone)
            if session.asynchronous
            else _counted_together(session.measured, begin(), compute)
        )
        samples["compute_together_s"].append(both_s[0])
        samples["comm_together_s"].append(both_s[1])
    return OverlapObservation(
        task=task.name,
        round=task.round,
        world_size=world_size,
        size_bytes=task.size_bytes,
        **{name: tuple(values_s) for name, values_s in samples.items()},
    )


def _beside(
    session: Session, *, size_bytes: Bytes, world_size: int
) -> tuple[Callable[[], object], Callable[[], Any]]:
    """A matrix product, and what begins an all-reduce."""
    group = session.data[world_size]
    buffer = torch.zeros(size_bytes // 4, device=session.device)
    begin = functools.partial(dist.all_reduce, buffer, group=group, async_op=True)
    width = _device_width(session) if session.asynchronous else _WIDTH
    return _product(session, session.agree(width, world_size=world_size)), begin


def _product(session: Session, width: int) -> Callable[[], object]:
    """A matrix product, in bf16 on a GPU."""
    dtype = torch.bfloat16 if session.asynchronous else torch.float32
    matrix = torch.randn((width, width), device=session.device).to(dtype)
    return functools.partial(torch.mm, matrix, matrix)


def _device_width(session: Session) -> int:
    """Shorter products would wait for the host, longer ones count badly beside an all-reduce."""
    for width in _DEVICE_WIDTHS:
        if min(session.time_repeats(_product(session, width), repeats=5)) >= _PRODUCT_S:
            return width
    return _DEVICE_WIDTHS[-1]


def _counted_together(
    device: Device, work: dist.Work, compute: Callable[[], object]
) -> tuple[Seconds, Seconds]:
    """One matrix product and the all-reduce, computing until it is done: for synchronous devices. [s]"""
    start_s = device.now()
    count = 0
    while count == 0 or not work.is_completed():
        compute()
        count += 1
    elapsed_s = device.now() - start_s
    work.wait()
    return elapsed_s / count, elapsed_s


def _queued_together(
    device: Device, begin: Callable[[], Any], compute: Callable[[], object], *, num_queued: int
) -> tuple[Seconds, Seconds]:
    """Queue more compute than the all-reduce lasts; see how much was done when it ended."""
    marks = [device.event() for _ in range(num_queued + 1)]
    end = device.event()
    device.hold()
    # The first product waits for all ranks.
    begin().wait()
    marks[0].record()
    work = begin()
    with device.side_stream():
        work.wait()
        end.record()
    for mark in marks[1:]:
        compute()
        mark.record()
    device.synchronise()
    comm_s = end.seconds_since(marks[0])
    durations_s = [mark.seconds_since(first) for first, mark in itertools.pairwise(marks)]
    beside = [
        duration_s
        for duration_s, end_s in zip(durations_s, itertools.accumulate(durations_s), strict=True)
        if end_s <= comm_s
    ]
    chosen = beside or durations_s[:1]
    return sum(chosen) / len(chosen), comm_s


def _timed(session: Session, act: Callable[[], object]) -> Seconds:
    if session.asynchronous:
        # The first one waits for the last rank.
        return session.time_repeats(act, repeats=2)[1]
    (time_s,) = session.host_times(act, repeats=1)
    return time_s


# Steps of an optimizer over equal tensors as they follow a backward pass.
#: Larger than the last cache of common hosts, so that reading it evicts everything else.
_EVICTION_BYTES: Final = 48 * MIB
_REPEATS: Final = 4
#: The first makes the states; by the second most memory has been handed out.
_WARM_UPS: Final = 2
#: A gradient as training has them.
_ORDINARY: Final = 1e-3


class Evictor:
    """Empties the caches by reading something large."""

    def __init__(self, device: Device) -> None:
        size_bytes = max(_EVICTION_BYTES, 2 * device.cache_bytes)
        self._values = torch.zeros(size_bytes // 4, device=device.torch_device)

    def evict(self) -> None:
        """Fill the caches with something else."""
        self._values.sum()


def measure_optimizer(session: Session, layer: Layer, evictor: Evictor) -> OptimizerPoint:
    """Time an optimizer's step, with giving the gradients back, over equal tensors.

    Since its last step a whole forward and backward pass went through the caches, and the gradients
    were newly allocated.
    """
    name, implementation = layer.kind.split()
    count, size = layer.sizes
    parameters = [nn.Parameter(torch.zeros(size, device=session.device)) for _ in range(count)]
    optimizer = make_optimizer(parameters, name=name, implementation=implementation)

    def timed_step() -> Seconds:
        evictor.evict()
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, _ORDINARY)
        (time_s,) = session.time_repeats(lambda: _step(optimizer), repeats=1)
        return time_s

    *_, last_s = (timed_step() for _ in range(_WARM_UPS))
    times_s = [last_s] if last_s > LONG_S else [timed_step() for _ in range(_REPEATS)]
    return OptimizerPoint(
        optimizer=name,
        implementation=implementation,
        num_tensors=count,
        tensor_bytes=4 * size,
        times_s=tuple(times_s),
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
