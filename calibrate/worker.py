"""Entry of every rank: ``torchrun ... -m calibrate.worker WORK_ORDER``.

Ranks carry out the tasks of a work order one after another: on a processor, and where models of users train, each
in new processes.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from calibrate.device import Device
from calibrate.probes import Session
from calibrate.probes.compute import (
    measure_collective,
    measure_compute,
    measure_overlap,
)
from calibrate.probes.layers import measure_layers
from calibrate.probes.replay import measure_model, measure_replay, measure_workload
from calibrate.probes.training import measure_steps
from calibrate.ranks import (
    CarryOut,
    Ranks,
    join,
    one_line_of,
    open_device,
    ran_out_of_memory,
    serve,
)
from calibrate.task import (
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
    WorkOrder,
    failure_of,
    num_ranks,
)
from perfmodel.documents.observation import FailedObservation, Observation
from perfmodel.files import unseal_line
from perfmodel.layout import parse_layout
from perfmodel.tracing.fork import Fork

#: Of a training on several ranks, its model built and drawn: the slowest takes some 10 s. [s]
_LONGEST_S: Final = 60.0


def begin(order: WorkOrder, ranks: Ranks) -> CarryOut:
    """What a rank does with each task of an order."""
    in_place = all(isinstance(task, ReplayTask) and task.document for task in order.tasks)
    if in_place or order.device_kind == "cpu":
        carry_out, clear = _alone(order, ranks, in_place=in_place)
    else:
        carry_out, clear = _together(order)
    return lambda task: _carried_out(carry_out, clear, task, ranks, Path(order.output))


def _carried_out(
    carry_out: CarryOut, clear: Callable[[], None], task: Task, ranks: Ranks, output: Path
) -> str:
    """What a rank finds; a step that cannot be replayed, or that memory does not hold, is told.

    Neither ends the launch, unless other ranks may wait for this one for ever, or the device is of no use any more:
    then new processes go on. A training on several ranks ends by itself: the copies of those that wait for a rank
    that is gone fail, or are given up.
    """
    try:
        return carry_out(task)
    except Exception as error:
        is_large = ran_out_of_memory(error)
        is_replay = isinstance(task, ReplayTask | ModelTask)
        if is_large and num_ranks(task) > 1 and not is_replay:
            ranks.tell_too_large(task, error, output)
            raise
        if not is_large and not is_replay:
            raise
        reason = one_line_of(error)
    # A replay takes other memory than the step that it repeats: it tells nothing of that.
    if is_replay and num_ranks(task) > 1:
        reason = f"under DDP: {ranks.first_reason(task, reason)}"
    elif is_replay:
        reason = f"replay: {reason}"
    failed = failure_of(task, reason)
    clear()
    return failed.model_dump_json()


def _alone(
    order: WorkOrder, ranks: Ranks, *, in_place: bool
) -> tuple[CarryOut, Callable[[], None]]:
    """Each task in new processes; nothing is left of one that fails. What took too long is not trained again.

    That holds in later starts, too.
    """
    said = f"training took longer than {_LONGEST_S:g} s; ranks may wait for each other"
    too_long: set[str] = set()
    if in_place:
        # Read in a copy: to free the text would teach the C library to keep memory, here and in all later copies.
        with Fork(partial(_failed_with, said, Path(order.output))) as copy:
            too_long = copy.result()

    def observe(task: Task) -> str:
        size = num_ranks(task)
        if in_place and size == 1:  # as a user's loop, which is in no group
            session = Session(rank=0, world_size=1, measured=_device(order), control={}, data={})
        else:
            join(task.name, rank=ranks.rank, world_size=size, device_kind=order.device_kind)
            session = Session.open(_device(order), group_sizes=(size,))
        return _observed(session, task)

    def carry_out(task: Task) -> str:
        act = partial(observe, task)
        if not isinstance(task, ReplayTask) or task.world_size == 1:
            return ranks.carry_out(act)
        if task.workload in too_long:
            raise TimeoutError(f"{said} (in an earlier round)")
        try:
            return ranks.carry_out(act, within_s=_LONGEST_S)
        except TimeoutError:
            too_long.add(task.workload)
            raise TimeoutError(said) from None

    return carry_out, lambda: None


def _failed_with(said: str, output: Path) -> set[str]:
    """Workloads whose failure says so in a file of observations."""
    lines = (line for line in output.read_bytes().splitlines() if said.encode() in line)
    failed = (FailedObservation.model_validate_json(unseal_line(line)[0]) for line in lines)
    return {entry.setting.workload for entry in failed}


def _together(order: WorkOrder) -> tuple[CarryOut, Callable[[], None]]:
    """All tasks in this process, since what drives a GPU cannot be copied; and what clears up after one that fails."""
    dist.init_process_group("gloo")
    session = Session.open(_device(order), group_sizes=order.world_sizes)
    if layouts := [parse_layout(t.layout) for t in order.tasks if isinstance(t, LayoutTask)]:
        from calibrate.probes.strategies import form_groups  # noqa: PLC0415 - needs torch 2.6

        form_groups(session, layouts)
    return lambda task: _observed(session, task), session.clear


def _device(order: WorkOrder) -> Device:
    """Of this rank."""
    return open_device(
        order.device_kind,
        local_rank=int(os.environ["LOCAL_RANK"]),
        truth=order.truth,
        occasion=Path(order.output).parent.name,
    )


def _observed(session: Session, task: Task) -> str:
    session.measured.begin(task.name)
    found = _PROBES[type(task)](session, task)
    return found.model_dump_json() if session.rank == 0 else ""


def _layout(session: Session, task: LayoutTask) -> Observation:
    from calibrate.probes.strategies import measure_layout  # noqa: PLC0415 - needs torch 2.6

    return measure_layout(session, task)


_PROBES: Final[dict[type[Any], Callable[[Session, Any], Observation]]] = {
    StepTask: measure_steps,
    CollectiveTask: measure_collective,
    OverlapTask: measure_overlap,
    TraceTask: measure_workload,
    ComputeTask: measure_compute,
    ReplayTask: measure_replay,
    LayersTask: measure_layers,
    ModelTask: measure_model,
    LayoutTask: _layout,
}


@record
def main() -> None:
    """Carry out the work order named on the command line."""
    serve(begin)


if __name__ == "__main__":
    main()
