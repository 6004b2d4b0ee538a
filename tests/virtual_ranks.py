"""Many virtual ranks in one process: steps are recorded once from real host code, and replayed on any truth.

Threads stand for ranks. They run the worker's own functions; what they would tell each other over gloo they
leave in a box. What a step asks of host and device does not depend on the truth, so one record serves all.
"""

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

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
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.tracing.reference import REFERENCES
from perfmodel.units import Bytes, Seconds

T = TypeVar("T")

#: Probes that need no tensors.
REPLAYED_PROBES: Final = ("matmul", "convolution", "memory")
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

    def execute(self, work: Work) -> Seconds:
        self.items.append(work)
        return super().execute(work)

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
        with self.gpu.torch_device:
            module = REFERENCES[setting.workload].build()
        if setting.synchronisation is Synchronisation.NONE:
            return module
        return DistributedDataParallel(module, bucket_cap_mb=setting.bucket_cap_mb)

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

    def of_ready_gradients(self, workload: str, samples: int) -> tuple[Items, tuple[str, ...]]:
        """A backward pass with a mark where each gradient is ready, and their names."""
        reference = REFERENCES[workload]
        with self.gpu.torch_device:
            module = reference.build()
        inputs, labels = (tensor.to(NAME) for tensor in reference.draw_batch(samples).pair)
        names: list[str] = []

        def note(name: str) -> None:
            names.append(name)
            self.gpu.mark()

        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        with self.gpu.autocast(reference.precision):
            loss = reference.loss(module(inputs), labels)
        self.gpu.taken()
        loss.backward()
        return self.gpu.taken(), tuple(names)


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


def play(gpu: VirtualGpu, items: Items, *, world_size: int, mark: Callable[[], None]) -> None:
    """Let a GPU execute a recorded step in a group of so many ranks."""
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


@contextmanager
def replaying(items: Callable[[RunSetting], Items]) -> Iterator[None]:
    """Probes replay steps, collectives and products instead of making tensors."""

    def build(session: TeamSession, *_: object, **__: object) -> ReplayedTrainer:
        return ReplayedTrainer(gpu=session.gpu, items=items)

    def begun(session: TeamSession, kind: str, size_bytes: int, world_size: int) -> Any:
        gpu = session.gpu
        work = Work(
            kind="collective", collective=kind, size_bytes=size_bytes, group_size=world_size
        )
        end_s = gpu.execute(work)
        return type("Begun", (), {"wait": lambda _: gpu.wait_for(end_s)})()

    def begins(
        session: TeamSession, collective: str, *, size_bytes: int, world_size: int
    ) -> Sequence[Callable[[], Any]]:
        return [lambda: begun(session, collective, size_bytes, world_size)]

    def kernel(session: TeamSession, task: ComputeTask) -> TimedKernel:
        """Products, convolutions and passes over the memory; other probes tell nothing about steps here."""
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
    ranks = range(1 if are_alike else world_size)
    gpus = [VirtualGpu(truth, rank=rank, occasion=occasion) for rank in ranks]
    works = [item for item in items if not isinstance(item, Mark)]
    for gpu in gpus:
        gpu.begin(name)

    def loop_s(count: int) -> Seconds:
        begin_s = max(gpu.host_s for gpu in gpus)
        for work in works * count:
            if work.kind == "collective" and world_size > 1:
                cost_s = truth.collective_s(work.collective, work.size_bytes, world_size)
                start_s = max(gpu.ready_for_collective(world_size) for gpu in gpus)
                for gpu in gpus:
                    gpu.carry_out(start_s, cost_s)
            else:
                for gpu in gpus:
                    gpu.execute(work)
        for gpu in gpus:
            gpu.synchronise()
        return max(gpu.host_s for gpu in gpus) - begin_s

    loop_s(warm_ups)
    short_s = loop_s(warm_ups)
    return (loop_s(warm_ups + steps) - short_s) / steps
