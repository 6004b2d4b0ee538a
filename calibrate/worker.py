"""Entry of every rank: ``torchrun ... -m calibrate.worker WORK_ORDER``.

Ranks carry out the tasks of a work order one after another. Rank 0 appends one line per finished
task to the output file, so that whatever happens, finished tasks stay finished.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from calibrate.agent import die_with_parent
from calibrate.campaign import DONE_PREFIX
from calibrate.environment import describe_environment, processor_time, torch_facts
from calibrate.experiment import ComputeProbe
from calibrate.layers import is_optimizer
from calibrate.probes.chain import measure_layers
from calibrate.probes.compute import measure_collective, measure_compute, measure_overlap
from calibrate.probes.convergence import measure_training
from calibrate.probes.fork import own_heaps
from calibrate.probes.optimizers import Evictor, measure_checkpoint, measure_optimizer
from calibrate.probes.replay import Replayed
from calibrate.probes.session import Session
from calibrate.probes.tracing import trace_workload
from calibrate.probes.training import bucket_bytes, measure_device_streams, measure_steps
from calibrate.task import (
    CheckpointTask,
    CollectiveTask,
    ComputeTask,
    LayersTask,
    OverlapTask,
    ReplayTask,
    StepTask,
    Task,
    TraceTask,
    TrainingTask,
    WorkOrder,
)
from perfmodel.documents.base import append_line
from perfmodel.documents.observation import (
    CollectiveObservation,
    ComputeObservation,
    EnvironmentObservation,
    Observation,
    OperatorsObservation,
    OverlapObservation,
    ProcessorObservation,
    ReplayObservation,
    StepObservation,
    WorkloadObservation,
)
from perfmodel.layout.layout import Synchronisation

_DEVICE_STREAM_STEPS: Final = 5


@record
def main() -> None:
    """Carry out the work order named on the command line."""
    die_with_parent()
    order = WorkOrder.read(Path(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    session = Session.open(
        device_kind=order.device_kind,
        local_rank=int(os.environ["LOCAL_RANK"]),
        group_sizes=order.world_sizes,
    )
    output = Path(order.output)
    session.observations = output
    if session.rank == 0:
        facts = describe_environment(torch_facts(), observe_s=0.0)
        name = f"environment-{time.time_ns()}"
        environment = EnvironmentObservation(task=name, round=0, facts=facts)
        append_line(output, environment.model_dump_json())
    with _carrier(session, order.tasks) as carry_out:
        for task in order.tasks:
            start = processor_time()
            found = carry_out(task)
            spent = processor_time().since(start)
            if session.rank == 0:
                assert found is not None, task
                processors = ProcessorObservation(
                    task=task.name, round=task.round, busy_s=spent.busy_s, steal_s=spent.steal_s
                )
                append_line(output, f"{found}\n{processors.model_dump_json()}")
                sys.stdout.write(f"{DONE_PREFIX}{task.name}\n")
                sys.stdout.flush()
            session.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _carrier(session: Session, tasks: Sequence[Task]) -> Iterator[Callable[[Task], str | None]]:
    """What measures on the ranks that a task needs; its JSON is complete on rank 0 only."""

    def observe(task: Task) -> str | None:
        probe, world_size = _PROBES[type(task)], _num_ranks(task)
        if not session.takes_part(world_size):
            return None
        found = probe(session, task)
        return found.model_dump_json() if session.rank == 0 else None

    alone = {task.name for task in tasks if _wants_own_heap(session, task)}
    if not alone or session.rank != 0:
        yield lambda task: None if task.name in alone else observe(task)
        return
    with own_heaps(observe, imports=_imported_late(tasks)) as observe_alone:
        yield lambda task: (observe_alone if task.name in alone else observe)(task)


def _imported_late(tasks: Sequence[Task]) -> list[str]:
    """What optimizers, the choice of layers and models import when they are first used."""
    names = ["torch._dynamo"]
    if any(isinstance(task, LayersTask) for task in tasks):
        names.append("calibrate.probes.chain")
    if any(getattr(task, "model_spec", None) is not None for task in tasks):
        names.append("perfmodel.trace.sources")
    return names


def _wants_own_heap(session: Session, task: Task) -> bool:
    """Whether a task is about one model or single layers on one rank, as in a training of its own.

    What drives a GPU cannot be copied, and its memory does not come from the C library. The threads of
    OpenMP do not survive a copy either.
    """
    if session.asynchronous or torch.get_num_threads() > 1:
        return False
    match task:
        case StepTask():
            alone = task.setting.world_size == 1 and (
                task.setting.synchronisation is Synchronisation.NONE
            )
            return alone and task.model_spec is not None
        case ReplayTask():
            return task.model_spec is not None or task.document is not None
        case _:
            return isinstance(task, LayersTask)


def _steps(session: Session, task: StepTask) -> StepObservation:
    """Steps of one setting, on all of its ranks."""
    setting = task.setting
    started_utc = time.time()
    mine = measure_steps(
        session,
        setting,
        target_s=task.target_s,
        min_steps=task.min_steps,
        model_spec=task.model_spec,
    )
    streams = None
    if session.asynchronous and setting.synchronisation is Synchronisation.NONE:
        streams = measure_device_streams(session, setting, steps=_DEVICE_STREAM_STEPS)
    buckets = bucket_bytes(session, setting) if task.model_spec is None else ()
    return StepObservation(
        task=task.name,
        round=task.round,
        started_utc=started_utc,
        setting=setting,
        ranks=tuple(session.gather(mine, world_size=setting.world_size)),
        device_streams=streams,
        bucket_bytes=buckets if setting.synchronisation is Synchronisation.DDP else (),
    )


def _collective(session: Session, task: CollectiveTask) -> CollectiveObservation:
    mine = measure_collective(
        session,
        task.collective,
        size_bytes=task.size_bytes,
        world_size=task.world_size,
        target_s=task.target_s,
    )
    gathered = session.gather(mine, world_size=task.world_size)
    return CollectiveObservation(
        task=task.name,
        round=task.round,
        collective=task.collective,
        world_size=task.world_size,
        size_bytes=task.size_bytes,
        durations_s=tuple(map(tuple, gathered)),
    )


def _overlap(session: Session, task: OverlapTask) -> OverlapObservation:
    samples = measure_overlap(
        session, size_bytes=task.size_bytes, world_size=task.world_size, target_s=task.target_s
    )
    return OverlapObservation(
        task=task.name,
        round=task.round,
        world_size=task.world_size,
        size_bytes=task.size_bytes,
        **{name: tuple(values_s) for name, values_s in samples.items()},
    )


def _trace(session: Session, task: TraceTask) -> WorkloadObservation:
    workload = trace_workload(session, task.workload)
    return WorkloadObservation(task=task.name, round=task.round, workload=workload)


def _replay(session: Session, task: ReplayTask) -> ReplayObservation:
    replayed = Replayed.open(session, task)
    replayed.replay.for_about(task.target_s)
    return replayed.observation()


def _layers(session: Session, task: LayersTask) -> OperatorsObservation:
    from calibrate.probes.chain import chosen_layers  # noqa: PLC0415 - scipy, for this task alone

    evictor = Evictor(session.device)
    layers = chosen_layers(session, task)
    chain = [layer for layer in layers if not is_optimizer(layer)]
    operators = measure_layers(session, chain, evictor)
    optimizers = [
        measure_optimizer(session, layer, evictor) for layer in layers if is_optimizer(layer)
    ]
    return OperatorsObservation(
        task=task.name,
        round=task.round,
        operators=tuple(operators),
        optimizers=tuple(optimizers),
    )


def _compute(session: Session, task: ComputeTask) -> ComputeObservation:
    probe = ComputeProbe(probe=task.probe, dtype=task.dtype, shape=task.shape)
    kernel, durations_s = measure_compute(session, probe, target_s=task.target_s)
    return ComputeObservation(
        task=task.name,
        round=task.round,
        probe=task.probe,
        dtype=task.dtype,
        shape=task.shape,
        flop=kernel.flop,
        moved_bytes=kernel.moved_bytes,
        durations_s=tuple(durations_s),
    )


_PROBES: Final[dict[type[Any], Callable[[Session, Any], Observation]]] = {
    StepTask: _steps,
    CollectiveTask: _collective,
    OverlapTask: _overlap,
    TraceTask: _trace,
    ComputeTask: _compute,
    ReplayTask: _replay,
    LayersTask: _layers,
    CheckpointTask: measure_checkpoint,
    TrainingTask: measure_training,
}


def _num_ranks(task: Task) -> int:
    """The first so many ranks carry it out."""
    return task.setting.world_size if isinstance(task, StepTask) else getattr(task, "world_size", 1)


if __name__ == "__main__":
    main()
