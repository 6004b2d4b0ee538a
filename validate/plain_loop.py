"""The loop that judges: what PyTorch's tutorials do, and a clock around many steps.

``torchrun -m validate.plain_loop WORK_ORDER``: each run of a setting is a new process. Nothing here is
shared with what calibrates, no clock stands between two steps, and nothing is corrected.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from calibrate.device import Device
from calibrate.ranks import (
    CarryOut,
    Ranks,
    join,
    one_line_of,
    open_device,
    ran_out_of_memory,
    serve,
)
from calibrate.task import StepTask, Task, WorkOrder, failure_of
from perfmodel.documents.observation import LoopObservation, PeakMemory
from perfmodel.layout import Synchronisation
from perfmodel.tracing.reference import REFERENCES
from perfmodel.units import Seconds

_SAMPLES: Final = 512
_WARM_UP_STEPS: Final = 3
_WARM_UP_S: Final = 0.3
_MOST_STEPS: Final = 3000
#: That a loader has ready for a GPU.
_BATCHES_AHEAD: Final = 4


class Training:
    """A data set of tensors, a model, a loss and an optimizer."""

    def __init__(self, task: StepTask, device: Device) -> None:
        setting = task.setting
        self.setting = setting
        samples = max(_SAMPLES, 2 * setting.micro_batch)
        self.loss: Callable[[Any, Tensor], Tensor]
        inputs: tuple[Tensor, ...]
        make_optimizer: Callable[[Any], torch.optim.Optimizer]
        wrapped: Callable[..., nn.Module]
        if task.random_model is None:
            reference = REFERENCES[setting.workload]
            module, batch = reference.build(), reference.draw_batch(samples)
            (inputs, targets), self.loss = (batch.positional, batch.pair[1]), reference.loss
            make_optimizer, self.precision = reference.make_optimizer, reference.precision
            wrapped = reference.wrapped
            torch.backends.cudnn.benchmark = reference.cudnn_benchmark
        else:
            from calibrate.random_models import draw  # noqa: PLC0415 - torchvision takes seconds

            model = draw(*task.random_model, on_gpu=device.asynchronous)
            module, self.loss = model.sketch.build(), model.sketch.loss
            inputs = tuple(entry.draw(samples) for entry in model.sketch.inputs)
            targets = model.sketch.targets.draw(samples)
            make_optimizer, self.precision = model.make_optimizer, model.precision
            wrapped = DistributedDataParallel
        self.module: nn.Module = module.to(device.torch_device)
        self.is_wrapped = setting.synchronisation is not Synchronisation.NONE
        if self.is_wrapped:
            self.module = wrapped(self.module, bucket_cap_mb=setting.bucket_cap_mb)
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.module.parameters())
        self.tensors = (*inputs, targets)
        self.device, self.now = device, device.now
        self.has_begun = False
        """A static graph is learned in a pass that synchronises."""
        self.batches = self._shuffled()

    def _shuffled(self) -> Iterator[list[Tensor]]:
        """Batches on the device, in a new order in every epoch.

        A GPU gets them from page-locked memory. A loader that is never late fills that, not this loop.
        """
        gathered = self._gathered()
        if self.device.asynchronous:
            first = [
                [self.device.pinned(tensor) for tensor in batch]
                for batch in itertools.islice(gathered, _BATCHES_AHEAD)
            ]
            gathered = itertools.cycle(first)
        for batch in gathered:
            yield [
                tensor.to(self.device.torch_device, non_blocking=self.device.asynchronous)
                for tensor in batch
            ]

    def _gathered(self) -> Iterator[list[Tensor]]:
        while True:
            order = torch.randperm(len(self.tensors[0]))
            for rows in torch.split(order, self.setting.micro_batch):
                if len(rows) == self.setting.micro_batch:
                    yield [tensor[rows] for tensor in self.tensors]

    def seconds(self, num_steps: int) -> tuple[Seconds, float]:
        """How long a number of steps takes, and the last loss. [s]"""
        accumulation = self.setting.accumulation
        started_s = self.now()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            for micro in range(accumulation):
                *inputs, targets = next(self.batches)
                waits = self.is_wrapped and self.has_begun and micro < accumulation - 1
                with self.module.no_sync() if waits else nullcontext():  # type: ignore[operator]
                    with self.device.autocast(self.precision):
                        outputs = self.module(*inputs)
                        loss = self.loss(outputs, targets)
                    shared = loss / accumulation if accumulation > 1 else loss
                    shared.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.has_begun = True
        last = loss.item()  # a GPU has done all steps by then
        return self.now() - started_s, last


def train(task: StepTask, order: WorkOrder, rank: int) -> tuple[Seconds, int, PeakMemory | None]:
    """Seconds per step of the slowest rank, over how many steps, and the memory that this rank took."""
    setting = task.setting
    is_grouped = setting.synchronisation is not Synchronisation.NONE
    if is_grouped:
        join(
            task.name,
            rank=rank,
            world_size=setting.world_size,
            device_kind=order.device_kind,
        )

    def slowest(value: float) -> float:
        box = torch.tensor(value, dtype=torch.float64)
        if is_grouped:
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return box.item()

    device = open_device(order.device_kind, local_rank=rank, truth=order.truth, occasion="loop")
    device.begin(task.name)
    torch.manual_seed(rank)
    training = Training(task, device)
    spent_s, steps = 0.0, 0
    while steps < _WARM_UP_STEPS or (slowest(spent_s) < _WARM_UP_S and steps < device.most_repeats):
        step_s, _ = training.seconds(1)
        spent_s, steps = spent_s + step_s, steps + 1
    num_steps = min(
        _MOST_STEPS,
        device.most_repeats,
        max(task.min_steps, round(task.target_s / slowest(step_s))),
    )
    total_s, loss = training.seconds(num_steps)
    if not math.isfinite(loss):
        raise ArithmeticError(f"diverged: the loss is {loss} after {steps + num_steps} steps")
    return slowest(total_s) / num_steps, num_steps, device.peak_memory()


def begin(order: WorkOrder, ranks: Ranks) -> CarryOut:
    """What a rank does with each task of an order: a run in a process of its own."""

    def carry_out(task: Task) -> str:
        assert isinstance(task, StepTask), task
        started_utc = time.time()
        try:
            step_s, num_steps, memory = ranks.carry_out(partial(train, task, order, ranks.rank))
        except Exception as error:
            if ran_out_of_memory(error) and task.setting.world_size > 1:
                ranks.tell_too_large(task, error, Path(order.output))
                raise
            return failure_of(task, one_line_of(error)).model_dump_json()
        return LoopObservation(
            task=task.name,
            round=task.round,
            started_utc=started_utc,
            setting=task.setting,
            step_s=step_s,
            num_steps=num_steps,
            memory=memory,
        ).model_dump_json()

    return carry_out


@record
def main() -> None:
    """Carry out the work order named on the command line."""
    serve(begin)


if __name__ == "__main__":
    main()
