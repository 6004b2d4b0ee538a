"""Many virtual ranks in one process: steps are recorded once from real host code, and replayed on any truth.

Threads stand for ranks. They run the worker's own functions; what they would tell each other over gloo they
leave in a box. What a step asks of host and device does not depend on the truth, so one record serves all.
"""

import gc
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.device import Clock
from calibrate.probes import Session
from calibrate.probes.compute import TimedKernel
from calibrate.probes.training import Trainer
from calibrate.task import ComputeTask
from calibrate.virtual import Truth
from calibrate.virtual.carrier import NAME, Carrier
from calibrate.virtual.gpu import VirtualGpu, Work
from perfmodel.cost import Samples
from perfmodel.documents.observation import QUEUE_PROBE
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.tracing.reference import REFERENCES
from perfmodel.units import Bytes, Seconds

T = TypeVar("T")

#: Probes that need no tensors.
REPLAYED_PROBES: Final = ("matmul", "convolution", "memory", "view", "dispatch", QUEUE_PROBE)
#: Rows of noise that are drawn at once.
_DRAWN: Final = 256
#: DDP forms its final buckets after its first step.
_UNRECORDED = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant that a clock marks."""


MARK = Mark()
Items = tuple[Work | Mark, ...]


class Kind(NamedTuple):
    """What tells recorded steps of a model apart, beside their micro-batch."""

    synchronisation: Synchronisation
    bucket_cap_mb: float | None = None
    accumulation: int = 1

    @property
    def is_parallel(self) -> bool:
        """Whether several ranks run it."""
        return self.synchronisation is not Synchronisation.NONE

    @classmethod
    def of(cls, setting: RunSetting) -> "Kind":
        """The kind of a setting."""
        return cls(setting.synchronisation, setting.bucket_cap_mb, setting.accumulation)

    def at(self, model: str, micro_batch: int, *, world_size: int = 2) -> RunSetting:
        """A setting of this kind; ``world_size`` counts where several ranks run it."""
        return RunSetting(
            workload=model,
            world_size=world_size if self.is_parallel else 1,
            micro_batch=micro_batch,
            accumulation=self.accumulation,
            synchronisation=self.synchronisation,
            bucket_cap_mb=self.bucket_cap_mb,
        )


class _Recorder(VirtualGpu):
    """Notes what it executes."""

    def __init__(self) -> None:
        super().__init__(Truth.read("balanced"))
        self.items: list[Work | Mark] = []

    def execute(self, work: Work, *, num_nodes: int | None = None) -> Seconds:
        self.items.append(work)
        return super().execute(work, num_nodes=num_nodes)

    def mark(self) -> None:
        self.items.append(MARK)

    def seconds(self) -> list[Seconds]:
        raise NotImplementedError

    def taken(self) -> Items:
        items, self.items = tuple(self.items), []
        return items


class Recording:
    """Host code at work on a device that notes what it is asked for; one per process."""

    def __init__(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.gpu = _Recorder()
        self.carrier = Carrier.open(self.gpu)

    def _module(self, setting: RunSetting) -> nn.Module:
        reference = REFERENCES[setting.workload]
        with self.gpu.torch_device:
            module = reference.build()
        if setting.synchronisation is Synchronisation.NONE:
            return module
        return reference.wrapped(module, bucket_cap_mb=setting.bucket_cap_mb)

    def of_calibration(self, setting: RunSetting) -> Items:
        """A step as the worker trains it, its marks among it."""
        reference, module = REFERENCES[setting.workload], self._module(setting)
        inputs, labels = reference.draw_batch(setting.micro_batch).pair
        trainer = Trainer(
            reference=reference,
            module=module,
            optimizer=reference.make_optimizer(module.parameters()),
            inputs=inputs,
            labels=labels,
            device=self.gpu,
            is_pinned=True,
        )
        for _ in range(_UNRECORDED):
            trainer.step(0, setting=setting, clock=self.gpu)
        self.gpu.taken()
        trainer.step(0, setting=setting, clock=self.gpu)
        return self.gpu.taken()

    def of_plain_loop(self, setting: RunSetting) -> tuple[Items, Bytes]:
        """A step as users write it, and what it holds at most."""
        self.carrier.works.clear()
        gc.collect()
        before_bytes = self.gpu.memory.held_bytes
        reference, module = REFERENCES[setting.workload], self._module(setting)
        optimizer = reference.make_optimizer(module.parameters())
        inputs, labels = reference.draw_batch(setting.micro_batch).pair
        last = setting.accumulation - 1
        for _ in range(_UNRECORDED + 1):
            self.gpu.taken()
            self.gpu.memory.reset_peak()
            optimizer.zero_grad()
            for number in range(setting.accumulation):
                x, y = inputs.to(NAME, non_blocking=True), labels.to(NAME, non_blocking=True)
                with ExitStack() as stack:
                    if isinstance(module, DistributedDataParallel) and number < last:
                        stack.enter_context(module.no_sync())
                    with self.gpu.autocast(reference.precision):
                        outputs = module(x)
                        loss = reference.loss(outputs, y)
                    loss.backward()
            optimizer.step()
        return self.gpu.taken(), self.gpu.memory.peak_bytes - before_bytes


@dataclass(kw_only=True)
class Team:
    """As many ranks as threads, and what they tell each other."""

    truth: Truth
    size: int
    occasion: str = ""
    gpus: list[VirtualGpu] = field(init=False)
    _box: list[Any] = field(init=False)
    _barriers: dict[int, threading.Barrier] = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = [
            VirtualGpu(self.truth, rank=rank, occasion=self.occasion) for rank in range(self.size)
        ]
        self._box = [None] * self.size
        self._barriers = {n: threading.Barrier(n, timeout=30) for n in range(1, self.size + 1)}
        for rank, gpu in enumerate(self.gpus):
            gpu.latest = partial(self._latest, rank)

    def _latest(self, rank: int, num_ranks: int, ready_s: Seconds) -> Seconds:
        return max(self.exchanged(rank, ready_s, num_ranks))

    def exchanged(self, rank: int, value: T, num_ranks: int) -> list[T]:
        """Values of the first ranks, on each of them."""
        self._box[rank] = value
        self._barriers[num_ranks].wait()
        values = self._box[:num_ranks]
        self._barriers[num_ranks].wait()
        return values

    def run(self, num_ranks: int, act: Callable[[int], T]) -> list[T]:
        """What the first ranks return."""
        if num_ranks == 1:
            return [act(0)]
        results: list[Any] = [None] * num_ranks
        errors: list[BaseException] = []

        def keep(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except BaseException as error:  # noqa: BLE001 - told by the caller's thread
                errors.append(error)
                self._barriers[num_ranks].abort()

        threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class TeamSession(Session):
    """A rank's view of the measurement, its peers in other threads."""

    __slots__ = ("gpu", "team")

    def __init__(self, team: Team, rank: int) -> None:
        self.gpu = team.gpus[rank]
        super().__init__(
            rank=rank, world_size=team.size, measured=self.gpu, control={}, data={}, models={}
        )
        self.team = team

    def barrier(self, world_size: int | None = None) -> None:
        self.team.exchanged(self.rank, None, world_size or self.world_size)

    def gather(self, value: Any, *, world_size: int) -> list[Any]:
        return [value] if world_size == 1 else self.team.exchanged(self.rank, value, world_size)

    def agree(self, value: Any, *, world_size: int) -> Any:
        return self.gather(value, world_size=world_size)[0]

    def clear(self, *, keep: Any = None) -> None:  # noqa: ARG002 - as the ranks of a worker have it
        # Recorded steps hold nothing: a search for garbage would take longer than they do.
        self.measured.release()
        self.synchronise()


def play(gpu: VirtualGpu, items: Items, *, world_size: int, mark: Callable[[], None]) -> None:
    """Let a GPU execute a recorded step in a group of ``world_size`` ranks."""
    for item in items:
        if isinstance(item, Mark):
            mark()
        elif item.kind == "collective":
            gpu.execute(replace(item, group_size=world_size))
        else:
            gpu.execute(item)


@dataclass(kw_only=True)
class ReplayedTrainer:
    """A trainer whose steps were recorded."""

    gpu: VirtualGpu
    items: Callable[[RunSetting], Items]
    module: None = None
    is_warm: bool = False

    def step(self, index: int, *, setting: RunSetting, clock: Clock) -> None:  # noqa: ARG002
        play(self.gpu, self.items(setting), world_size=setting.world_size, mark=clock.mark)


def begun(session: TeamSession, kind: str, size_bytes: int, world_size: int) -> Any:
    """A collective that was issued; whoever has it can wait for its end."""
    work = Work(kind="collective", collective=kind, size_bytes=size_bytes, group_size=world_size)
    end_s = session.gpu.execute(work)
    return SimpleNamespace(wait=lambda: session.gpu.wait_for(end_s))


@contextmanager
def replaying(items: Callable[[RunSetting], Items]) -> Iterator[None]:
    """Probes replay steps, collectives and products instead of making tensors."""

    def build(session: TeamSession, *_: object, **__: object) -> ReplayedTrainer:
        return ReplayedTrainer(gpu=session.gpu, items=items)

    def begins(
        session: TeamSession, collective: str, *, size_bytes: int, world_size: int
    ) -> Sequence[Callable[[], Any]]:
        return [lambda: begun(session, collective, size_bytes, world_size)]

    def kernel(session: TeamSession, task: ComputeTask) -> TimedKernel:
        """Products, convolutions, passes over the memory, operators alone; others tell nothing about steps here."""
        added = Work(kind="kernel", operator="aten::add_", size_bytes=8)
        if task.probe in ("view", "dispatch"):
            issued = Work(kind="view") if task.probe == "view" else added
            return TimedKernel(act=partial(session.gpu.execute, issued))
        if task.probe == QUEUE_PROBE:
            [count] = task.shape
            row = (added,) * count
            return TimedKernel(
                act=lambda: [session.gpu.execute(work) for work in row], launches=count
            )
        element_bytes = 2 if task.dtype.endswith("16") else 4
        if task.probe == "matmul":
            rows, inner, columns = task.shape
            flop = 2.0 * rows * inner * columns
            moved = element_bytes * (rows * inner + inner * columns + rows * columns)
        else:
            elements, flop = math.prod(task.shape), 0.0
            moved = 8 * elements
            if task.probe == "convolution":
                flop, moved = 2.0 * 9 * elements * task.shape[1], 2 * element_bytes * elements
        work = Work(
            kind="kernel",
            operator=added.operator if task.probe == "memory" else "",
            flop=flop,
            size_bytes=moved,
            dtype=task.dtype,
            is_convolution=task.probe == "convolution",
        )
        act = partial(session.gpu.execute, work)
        return TimedKernel(act=act, flop=work.flop, moved_bytes=float(work.size_bytes))

    def beside(session: TeamSession, *, size_bytes: int, world_size: int) -> Any:
        product = Work(kind="kernel", flop=2.0 * 512**3, size_bytes=3 * 4 * 512**2)
        return (
            lambda: session.gpu.execute(product),
            lambda: begun(session, "all_reduce", size_bytes, world_size),
        )

    with ExitStack() as stack:
        stack.enter_context(patch("calibrate.probes.training._build", build))
        stack.enter_context(patch("calibrate.probes.compute._begins", begins))
        stack.enter_context(patch("calibrate.probes.compute._beside", beside))
        kernels = dict.fromkeys(REPLAYED_PROBES, kernel)
        stack.enter_context(patch.dict("calibrate.probes.compute._KERNELS", kernels))
        yield


class Fleet:
    """Ranks that all do the same, as arrays: in the mean what as many ``VirtualGpu`` do, in a part of the time."""

    def __init__(self, truth: Truth, num_ranks: int, *, name: str, occasion: str) -> None:
        self._one = VirtualGpu(truth, occasion=occasion)
        self._one.begin(name)
        self.truth, self.factor = truth, self._one.factor
        speeds = truth.device.speed
        self._speed = np.array([speeds[min(i, len(speeds) - 1)] for i in range(num_ranks)])
        self._host_s, self._compute_s = np.zeros(num_ranks), np.zeros(num_ranks)
        self._comm_s: Seconds = 0.0
        self._queued: deque[Samples | Seconds] = deque(maxlen=truth.host.queue)
        self._collectives: deque[tuple[Seconds, Seconds]] = deque()
        seed = zlib.crc32(repr((truth.seed, occasion, name, "fleet")).encode())
        self._rng = np.random.default_rng(seed)
        self._window, self._window_factor = np.full(num_ranks, -1), np.ones(num_ranks)
        self._noise: list[Samples] = []

    @property
    def host_s(self) -> Seconds:
        """When the last host has issued all. [s]"""
        return float(self._host_s.max())

    def execute(self, work: Work, world_size: int) -> None:
        """Issue some work on every rank."""
        truth, host = self.truth, self.truth.host
        match work.kind:
            case "view" | "module" | "phase":
                self._host_s += self._one.python_s(work)
            case "kernel":
                self._issue(*self._one.cost_of(work))
            case "copy":
                self._issue(truth.copy_s(work.size_bytes, pinned=work.is_pinned), host.launch_s)
            case "collective":
                cost_s = truth.collective_s(work.collective, work.size_bytes, world_size)
                self._collect(cost_s, skew_s=truth.network.skew_s * (world_size > 1))
            case "wait":
                np.maximum(self._compute_s, self._comm_s, out=self._compute_s)
            case "synchronise":
                self.synchronise()

    def synchronise(self) -> None:
        """Hosts wait for their devices."""
        self._host_s = np.maximum(np.maximum(self._host_s, self._compute_s), self._comm_s)

    def _enter(self, host_s: Seconds) -> None:
        """A launch waits for the end of the one that is a queue's length before it."""
        self._host_s += host_s * self._one.host_factor
        if len(self._queued) == self._queued.maxlen:
            np.maximum(self._host_s, self._queued[0], out=self._host_s)

    def _issue(self, cost_s: Seconds, host_s: Seconds) -> None:
        self._enter(host_s)
        start_s = np.maximum(self._host_s, self._compute_s)
        duration_s = cost_s * self._noise_at(start_s) / self._speed
        self._compute_s = start_s + self._beside_collectives(start_s, duration_s)
        self._queued.append(self._compute_s.copy())

    def _collect(self, cost_s: Seconds, *, skew_s: Seconds) -> None:
        """A collective begins when the last rank is there."""
        self._enter(self.truth.host.launch_s)
        late_s = np.abs(self._rng.standard_normal(len(self._speed))) * skew_s
        ready_s = np.maximum(np.maximum(self._host_s, self._compute_s), self._comm_s) + late_s
        start_s = float(ready_s.max())
        self._comm_s = start_s + cost_s * self.factor
        self._collectives.append((start_s, self._comm_s))
        self._queued.append(self._comm_s)

    def _noise_at(self, now_s: Samples) -> Samples:
        noise = self.truth.noise
        window = (now_s / noise.window_s).astype(int)
        changed = window != self._window
        if changed.any():
            drawn = np.exp(noise.window * self._rng.standard_normal(len(window)))
            self._window_factor = np.where(changed, drawn, self._window_factor)
            self._window = window
        if not self._noise:
            drawn = self._rng.standard_normal((_DRAWN, len(window)))
            self._noise = list(np.exp(noise.kernel * drawn))
        return self.factor * self._window_factor * self._noise.pop()

    def _beside_collectives(self, start_s: Samples, duration_s: Samples) -> Samples:
        """Duration of a kernel that is slower while a collective runs. [s]"""
        slowdown = self.truth.network.compute_slowdown
        first_s = start_s.min()
        while self._collectives and self._collectives[0][1] <= first_s:
            self._collectives.popleft()
        if not self._collectives:
            return duration_s
        now_s, left_s = start_s.copy(), duration_s.copy()
        is_running = np.ones(len(now_s), bool)
        for begin_s, end_s in self._collectives:
            alone_s = np.maximum(0.0, begin_s - now_s)
            is_running &= left_s > alone_s
            if not is_running.any():
                break
            now_s = np.where(is_running, now_s + alone_s, now_s)
            left_s = np.where(is_running, left_s - alone_s, left_s)
            beside_s = np.minimum(np.maximum(0.0, end_s - now_s), left_s * slowdown)
            now_s = np.where(is_running, now_s + beside_s, now_s)
            left_s = np.where(is_running, left_s - beside_s / slowdown, left_s)
        return now_s + left_s - start_s


def plain_loop_s(  # noqa: PLR0913 - what a loop is
    truth: Truth,
    name: str,
    items: Items,
    *,
    world_size: int,
    occasion: str,
    steps: int = 8,
    warm_ups: int = 4,
    are_alike: bool = False,
) -> Seconds:
    """Seconds per step of the slowest rank in a loop that only waits at its end; ranks take turns. [s]

    The step of a long loop is what more steps add to a short one: both wait for as much at their ends.

    ``warm_ups``: Steps before the loops, and of the short one.
    ``are_alike``: Whether all ranks do as the first one does, which then stands for all.
    """
    count = 1 if are_alike else world_size
    ranks = Fleet(truth, count, name=name, occasion=occasion)
    works = [item for item in items if not isinstance(item, Mark)]

    def loop_s(count: int) -> Seconds:
        begin_s = ranks.host_s
        for work in works * count:
            ranks.execute(work, world_size)
        ranks.synchronise()
        return ranks.host_s - begin_s

    loop_s(warm_ups)
    short_s = loop_s(warm_ups)
    return (loop_s(warm_ups + steps) - short_s) / steps
