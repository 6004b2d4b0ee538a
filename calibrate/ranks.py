"""Ranks of one launch: each carries out a task in a copy of itself, which has measured nothing before.

A rank opens its device by the kind. ``calibrate.device`` cannot: the virtual device, which costs what a truth file
says, builds on it.
"""

import datetime as dt
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore, init_process_group  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from calibrate.campaign import BEGIN_PREFIX, DONE_PREFIX
from calibrate.device import Cpu, Cuda, Device
from calibrate.environment import describe_environment, processor_time, torch_facts
from calibrate.processes import die_with_parent
from calibrate.task import (
    LayoutTask,
    ModelTask,
    ReplayTask,
    StepTask,
    Task,
    WorkOrder,
    failure_of,
    num_ranks,
)
from perfmodel.documents.observation import (
    OUT_OF_MEMORY,
    EnvironmentObservation,
    ProcessorObservation,
)
from perfmodel.files import append_line
from perfmodel.tracing.fork import Fork
from perfmodel.units import Seconds

Result = TypeVar("Result")

_LONGEST_WAIT: Final = dt.timedelta(days=1)


def open_device(
    kind: str, *, local_rank: int, truth: str | None = None, occasion: str = ""
) -> Device:
    """The device of a rank, which this process keeps for good."""
    if kind == "cuda":
        return Cuda(local_rank)
    if kind == "cpu":
        return Cpu()
    assert truth is not None, kind
    from calibrate.virtual import Truth  # noqa: PLC0415 - few need it
    from calibrate.virtual.carrier import Carrier  # noqa: PLC0415
    from calibrate.virtual.gpu import VirtualGpu  # noqa: PLC0415

    gpu = VirtualGpu(Truth.read(truth), rank=local_rank, occasion=occasion)
    Carrier.open(gpu)
    return gpu


def prepare(kind: str, tasks: Iterable[Task]) -> None:
    """Import what each task would import again, in seconds, before copies of this process carry them out."""
    # Whether there is a GPU, torch then asks NVML. It would start CUDA otherwise, which copies cannot use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The first optimizer asks for the compiler, and so does the first fake tensor.
    names = {"torch._dynamo"} | ({"calibrate.virtual.carrier"} if kind == "virtual" else set())
    for task in tasks:
        if isinstance(task, LayoutTask):  # needs torch 2.6
            names.add("calibrate.probes.strategies")
        elif isinstance(task, ModelTask) or (isinstance(task, StepTask) and task.random_model):
            names.add("calibrate.random_models")
        elif isinstance(task, ReplayTask) and task.document:
            names.add("torchvision")  # most models of users ask for it
    for name in sorted(names):
        importlib.import_module(name)


def traced_as(kind: str) -> str:
    """What torch calls a kind of device whose operators are traced in this process."""
    if kind != "virtual":
        return kind
    from calibrate.virtual.carrier import NAME, register  # noqa: PLC0415 - few need it

    register()
    return NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A rank among those that torchrun started; it has joined no group and waits in the kernel.

    What was measured before in a process changes what comes after: its heap has holes, and the C
    library has learned to keep memory that a new process gives back. So every task begins in a clean process, as a
    training does, without the seconds that importing torch takes.
    """

    rank: int
    world_size: int
    store: Store

    @classmethod
    def open(cls) -> "Ranks":
        """The rank that torchrun made of this process."""
        store, rank, world_size = next(rendezvous("env://"))
        return cls(rank=rank, world_size=world_size, store=store)

    def carry_out(self, act: Callable[[], Result], *, within_s: Seconds | None = None) -> Result:
        """What a function returns in a copy of this process; whatever it raises is raised here.

        ``TimeoutError`` if that takes longer than a limit [s], at which the copy ends.
        The copy has all threads of this process, which computes nothing before.
        """

        def alone() -> Result:
            die_with_parent()
            return act()

        with Fork(alone, is_measured=True) as copy:
            return copy.result(within_s=within_s)

    def announce(self, prefix: str, task: str) -> None:
        """Say on standard output, for all ranks, how far they are."""
        if self.rank == 0:
            sys.stdout.write(f"{prefix}{task}\n")
            sys.stdout.flush()

    def tell_too_large(self, task: Task, error: Exception, output: Path) -> None:
        """Note once, by whichever rank comes first, that memory did not hold a task of several ranks.

        The others may wait for this one for ever: its caller ends the launch, and the next one leaves the task out.
        """
        if self.store.add(f"{task.name}/too large", 1) == 1:
            append_line(output, failure_of(task, one_line_of(error)).model_dump_json())

    def first_reason(self, task: Task, reason: str) -> str:
        """Why a task of several ranks failed: one that only lost another rank asks what that says."""
        key = f"{task.name}/reason"
        if "gloo/transport" not in reason:
            self.store.set(key, reason)
        with suppress(RuntimeError):  # all of them lost one
            self.store.wait([key], dt.timedelta(seconds=5))
            return str(self.store.get(key), encoding="utf-8")
        return "another rank was gone"

    def meet(self, name: str) -> None:
        """Wait until all ranks have come to this point."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.world_size)], _LONGEST_WAIT)


#: JSON of what a rank finds in a task; it is complete on rank 0 only.
CarryOut = Callable[[Task], str]


def serve(begin: Callable[[WorkOrder, Ranks], CarryOut]) -> None:
    """Carry out the work order named on the command line, task by task; all ranks meet after each.

    Rank 0 appends one line per finished task to the output file: finished tasks stay finished.
    """
    die_with_parent()
    order = WorkOrder.read(Path(sys.argv[1]))
    ranks, output = Ranks.open(), Path(order.output)
    if ranks.rank == 0:
        # What initialises CUDA cannot be copied any more.
        facts = ranks.carry_out(
            lambda: describe_environment(order.truth, torch_facts(), observe_s=0.0)
        )
        name = f"environment-{time.time_ns()}"
        append_line(
            output, EnvironmentObservation(task=name, round=0, facts=facts).model_dump_json()
        )
    prepare(order.device_kind, order.tasks)
    carry_out = begin(order, ranks)
    for task in order.tasks:
        before = processor_time()
        ranks.announce(BEGIN_PREFIX, task.name)
        found = carry_out(task) if ranks.rank < num_ranks(task) else ""
        if ranks.rank == 0:
            busy_s, steal_s = processor_time()
            # Counters that were set back count as standing still.
            processors = ProcessorObservation(
                task=task.name,
                round=task.round,
                busy_s=max(0.0, busy_s - before[0]),
                steal_s=max(0.0, steal_s - before[1]),
            )
            append_line(output, found, processors.model_dump_json())
        ranks.announce(DONE_PREFIX, task.name)
        ranks.meet(task.name)


#: What torch and the C library say when memory ends; a copy that the kernel ends says SIGKILL.
_NO_MEMORY: Final = (
    *("allocate memory", "out of memory", "OutOfMemoryError", "SIGKILL"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def ran_out_of_memory(error: Exception) -> bool:
    """Whether memory ended, of the host or of the device."""
    words = " ".join(str(error).split())
    return isinstance(error, MemoryError) or any(sign in words for sign in _NO_MEMORY)


def one_line_of(error: Exception) -> str:
    """An error in one line of at most 300 characters; what ends memory is called so."""
    words = " ".join(str(error).split())
    if ran_out_of_memory(error):
        words = f"{OUT_OF_MEMORY}: {words}"
    elif not isinstance(error, ArithmeticError):
        words = f"{type(error).__name__}: {words}"
    return words[:300]


def join(name: str, *, rank: int, world_size: int, device_kind: str = "cpu") -> None:
    """Join the group of one task, in the copy that carries it out: gloo, and NCCL for what lies on a GPU."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    backend = "cpu:gloo,cuda:nccl" if device_kind == "cuda" else "gloo"
    init_process_group(
        backend, store=PrefixStore(f"{name}/group", store), rank=rank, world_size=world_size
    )
