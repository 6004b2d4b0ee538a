"""Entry of every rank: ``torchrun ... -m calibrate.worker WORK_ORDER``.

Ranks carry out the tasks of a work order one after another, on a processor each in new processes.
Rank 0 appends one line per finished task to the output file: finished tasks stay finished.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from calibrate.agent import die_with_parent
from calibrate.campaign import BEGIN_PREFIX, DONE_PREFIX
from calibrate.device import Cpu, open_device
from calibrate.environment import describe_environment, processor_time, torch_facts
from calibrate.experiment import ComputeProbe
from calibrate.layers import is_optimizer
from calibrate.probes import Session
from calibrate.probes.compute import (
    Evictor,
    measure_checkpoint,
    measure_collective,
    measure_compute,
    measure_optimizer,
    measure_overlap,
)
from calibrate.probes.convergence import measure_training
from calibrate.probes.layers import measure_layers
from calibrate.probes.replay import Replay, Replayed
from calibrate.probes.tracing import trace_workload
from calibrate.probes.training import bucket_bytes, measure_device_streams, measure_steps
from calibrate.ranks import Ranks, join, one_line_of, ran_out_of_memory
from calibrate.task import (
    CheckpointTask,
    CollectiveTask,
    ComputeTask,
    LayersTask,
    LayoutTask,
    ModelTask,
    OverlapTask,
    ReplayTask,
    StepTask,
    Task,
    TraceTask,
    TrainingTask,
    WorkOrder,
    failure_of,
    num_ranks,
)
from perfmodel.documents import append_line
from perfmodel.documents.observation import (
    CollectiveObservation,
    ComputeObservation,
    EnvironmentObservation,
    IsolatedOperator,
    LayoutObservation,
    Observation,
    OperatorsObservation,
    OverlapObservation,
    ProcessorObservation,
    ReplayObservation,
    StepObservation,
    WorkloadObservation,
)
from perfmodel.layout import Synchronisation, parse_layout

_DEVICE_STREAM_STEPS: Final = 5
#: Of the passes through a drawn model: a median needs no more.
_KEPT_PASSES: Final = 7


@record
def main() -> None:
    """Carry out the work order named on the command line."""
    die_with_parent()
    order = WorkOrder.read(Path(sys.argv[1]))

    ranks, output = Ranks.open(), Path(order.output)
    if ranks.rank == 0:
        facts = describe_environment(ranks.carry_out(torch_facts), observe_s=0.0)
        if order.truth is not None:
            from calibrate.virtual import with_truth  # noqa: PLC0415

            facts = with_truth(facts, order.truth)
        name = f"environment-{time.time_ns()}"
        environment = EnvironmentObservation(task=name, round=0, facts=facts)
        append_line(output, environment.model_dump_json())
    carry_out, clear = _alone(ranks) if order.device_kind == "cpu" else _together(order)
    for task in order.tasks:
        start = processor_time()
        ranks.announce(BEGIN_PREFIX, task.name)
        found = None
        if ranks.rank < num_ranks(task):
            found = _carried_out(carry_out, clear, task, ranks, output)
        spent = processor_time().since(start)
        if ranks.rank == 0:
            assert found is not None, task
            processors = ProcessorObservation(
                task=task.name, round=task.round, busy_s=spent.busy_s, steal_s=spent.steal_s
            )
            append_line(output, f"{found}\n{processors.model_dump_json()}")
        ranks.announce(DONE_PREFIX, task.name)
        ranks.meet(task.name)


#: JSON of what a rank finds in a task; it is complete on rank 0 only.
_CarryOut = Callable[[Task, Path], str]


def _carried_out(
    carry_out: _CarryOut, clear: Callable[[], None], task: Task, ranks: Ranks, output: Path
) -> str:
    """What a rank finds; a step that cannot be replayed, or that memory does not hold, is told.

    Neither ends the launch, unless other ranks may wait for this one for ever, or the device is of no use any more:
    then new processes go on.
    """
    try:
        return carry_out(task, output)
    except Exception as error:
        is_large = ran_out_of_memory(error)
        if is_large and num_ranks(task) > 1:
            ranks.tell_too_large(task, error, output)
            raise
        if not is_large and not isinstance(task, ReplayTask | ModelTask):
            raise
        reason = one_line_of(error)
    # A replay takes other memory than the step that it repeats: it tells nothing of that.
    is_replay = isinstance(task, ReplayTask | ModelTask)
    failed = failure_of(task, f"replay: {reason}" if is_replay else reason)
    clear()
    return failed.model_dump_json()


def _alone(ranks: Ranks) -> tuple[_CarryOut, Callable[[], None]]:
    """Each task in new processes; nothing is left of one that fails."""

    def observe(task: Task, output: Path) -> str:
        join(task.name, rank=ranks.rank, world_size=num_ranks(task))
        sizes = [num_ranks(task)]
        session = Session.open(Cpu(), group_sizes=sizes)
        return _observed(session, task, output)

    return lambda task, output: ranks.carry_out(lambda: observe(task, output)), lambda: None


def _together(order: WorkOrder) -> tuple[_CarryOut, Callable[[], None]]:
    """All tasks in this process, since what drives a GPU cannot be copied; and what clears up after one that fails."""
    dist.init_process_group("gloo")
    session = Session.open(
        open_device(
            order.device_kind,
            local_rank=int(os.environ["LOCAL_RANK"]),
            truth=order.truth,
            occasion=Path(order.output).parent.name,
        ),
        group_sizes=order.world_sizes,
    )
    if layouts := [parse_layout(t.layout) for t in order.tasks if isinstance(t, LayoutTask)]:
        from calibrate.probes.strategies import form_groups  # noqa: PLC0415 - slow imports

        form_groups(session, layouts)
    return lambda task, output: _observed(session, task, output), session.clear


def _observed(session: Session, task: Task, output: Path) -> str:
    session.observations = output
    session.measured.begin(task.name)
    found = _PROBES[type(task)](session, task)
    return found.model_dump_json() if session.rank == 0 else ""


def _steps(session: Session, task: StepTask) -> StepObservation:
    """Steps of one setting, on all of its ranks."""
    setting = task.setting
    started_utc = time.time()
    mine = measure_steps(
        session,
        setting,
        target_s=task.target_s,
        min_steps=task.min_steps,
    )
    streams = None
    # One rank under DDP tells what hooks and buckets cost the host, and what they cost the device.
    if session.asynchronous and setting.world_size == 1:
        streams = measure_device_streams(session, setting, steps=_DEVICE_STREAM_STEPS)
    buckets = bucket_bytes(session, setting)
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
    from calibrate.probes.layers import chosen_layers  # noqa: PLC0415 - scipy, for this task alone

    evictor = Evictor(session.measured)
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


def _model(session: Session, task: ModelTask) -> OperatorsObservation:
    from calibrate.random_models import draw  # noqa: PLC0415 - torchvision takes seconds

    model = draw(task.seed, task.index, on_gpu=session.asynchronous)
    with tempfile.TemporaryDirectory() as folder, session.measured.without():
        traced = model.traced(Path(folder), session.device.type)
    step = traced.step.at(micro_batch=model.micro_batch)
    replay = Replay(session, step)
    replay.for_about(task.target_s)
    counts, times = step.call_counts(), replay.times
    return OperatorsObservation(
        task=task.name,
        round=task.round,
        model=model.name,
        operators=tuple(
            IsolatedOperator(
                operator=step.operators[key[0]],
                phase=key[1],
                times_s=tuple(times_s[-_KEPT_PASSES:]),
                num_calls=counts[key],
            )
            for key, times_s in times.calls_s.items()
            if key[0] not in times.failed
        ),
        optimizers=(),
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


def _layout(session: Session, task: LayoutTask) -> LayoutObservation:
    from calibrate.probes.strategies import measure_layout, trace_stack  # noqa: PLC0415 - slow imports

    mine = measure_layout(session, task)
    gathered = session.gather(mine, world_size=task.world_size)
    is_traced = task.traced and session.rank == 0
    return LayoutObservation(
        task=task.name,
        round=task.round,
        stack=task.stack,
        layout=task.layout,
        optimizer=task.optimizer,
        step_s=tuple(map(tuple, gathered)),
        **(trace_stack(task, session.device.type) if is_traced else {}),
    )


_PROBES: Final[dict[type[Any], Callable[[Session, Any], Observation]]] = {
    StepTask: _steps,
    CollectiveTask: _collective,
    OverlapTask: _overlap,
    TraceTask: _trace,
    ComputeTask: _compute,
    ReplayTask: _replay,
    LayersTask: _layers,
    ModelTask: _model,
    CheckpointTask: measure_checkpoint,
    TrainingTask: measure_training,
    LayoutTask: _layout,
}


if __name__ == "__main__":
    main()
