"""Trainings to a target loss, with the norms that tell the gradient noise scale."""

import functools
import math
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.probes import Session
from calibrate.task import TrainingTask
from perfmodel.documents.observation import TrainingObservation
from perfmodel.tracing.reference import MODELS

NUM_CLASSES: Final = 10
_WIDTH: Final = 28
_COARSE: Final = 7
_LARGEST_SHIFT: Final = 3
_PATTERN_SEED: Final = 1234


class Samples:
    """An endless source: which of ten smooth patterns is it, shifted and under noise?

    Different seeds share the patterns and nothing else. ``noise`` is its standard deviation over that of a
    pattern: classes overlap, gradients differ.
    """

    def __init__(self, seed: int, *, noise: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = noise

    def draw(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Images of shape ``(num_samples, 1, 28, 28)`` and the numbers of their patterns."""
        labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=self.generator)
        rows, columns = (self._shifted(num_samples) for _ in range(2))
        images = _patterns()[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
        noise = torch.randn(images.shape, generator=self.generator)
        return (images + self.noise * noise)[:, None], labels

    def _shifted(self, num_samples: int) -> Tensor:
        shifts = torch.randint(
            -_LARGEST_SHIFT, _LARGEST_SHIFT + 1, (num_samples, 1), generator=self.generator
        )
        return (torch.arange(_WIDTH) + shifts) % _WIDTH


@functools.cache
def _patterns() -> Tensor:
    """Shape ``(10, 28, 28)``, standard deviation 1 each."""
    generator = torch.Generator().manual_seed(_PATTERN_SEED)
    coarse = torch.randn(NUM_CLASSES, 1, _COARSE, _COARSE, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=_WIDTH, mode="bicubic")[:, 0]
    return smooth / smooth.std(dim=(1, 2), keepdim=True)


_EVALUATION_SEED: Final = 7
#: Seeds of training lie above that of the evaluation, whatever the task's own seed.
_FIRST_SEED: Final = 1000
#: Steps over which the learning rate rises to its value.
_WARM_UP: Final = 10


@dataclass(slots=True, kw_only=True)
class _Norms:
    """Squared norms of one step, summed over the buckets that DDP reduces."""

    group: dist.ProcessGroup
    world_size: int
    own: Tensor = field(default_factory=lambda: torch.zeros(()))
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))

    def taken(self, session: Session) -> tuple[float, float]:
        """Mean square of the ranks' gradients, and square of their mean, since it was last asked."""
        own = self.own.to(torch.float64).reshape(1)
        dist.all_reduce(own, group=session.control[self.world_size])
        found = float(own) / self.world_size, float(self.mean)
        self.own, self.mean = torch.zeros(()), torch.zeros(())
        return found


def measure_training(session: Session, task: TrainingTask) -> TrainingObservation:
    """Train until the loss is reached or the steps are used up; all ranks of the task must call it."""
    module = _built(session, task)
    norms = None
    if task.world_size > 1:
        norms = _Norms(group=session.data[task.world_size], world_size=task.world_size)
        module = _observed(session, module, norms)
    optimizer = torch.optim.SGD(module.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / _WARM_UP, total_iters=_WARM_UP
    )
    seed = _FIRST_SEED + task.seed * session.world_size + session.rank
    stream = Samples(seed, noise=task.noise)
    held_out = Samples(_EVALUATION_SEED, noise=task.noise).draw(task.evaluated_samples)
    seen: list[tuple[float, float]] = []
    losses: dict[int, float] = {}
    next_look = 1
    for step in range(1, task.max_steps + 1):
        images, labels = (part.to(session.device) for part in stream.draw(task.micro_batch))
        nn.functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if norms is not None:
            seen.append(norms.taken(session))
        if step < next_look:
            continue
        next_look = max(step + 1, int(step * task.look_growth) + 1)
        loss = session.agree(_loss_of(session, module, held_out), world_size=task.world_size)
        if not math.isfinite(loss):
            break
        losses[step] = loss
        if loss <= task.target_loss:
            break
    finite = [pair for pair in seen if all(map(math.isfinite, pair))]
    return TrainingObservation(
        task=task.name,
        round=task.round,
        workload=task.workload,
        samples=f"{NUM_CLASSES} patterns shifted by up to {_LARGEST_SHIFT} pixels under "
        f"{task.noise:g} times as much noise",
        world_size=task.world_size,
        micro_batch=task.micro_batch,
        learning_rate=task.learning_rate,
        seed=task.seed,
        target_loss=task.target_loss,
        mean_squares=tuple(mean_square for mean_square, _ in finite),
        squares_of_mean=tuple(square_of_mean for _, square_of_mean in finite),
        evaluated_steps=tuple(losses),
        losses=tuple(losses.values()),
    )


def _built(session: Session, task: TrainingTask) -> nn.Module:
    torch.manual_seed(task.seed)
    module = MODELS[task.workload].build().to(session.device)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            # LeNet's sigmoids hardly learn from torch's own start [Zhang et al., Dive into Deep
            # Learning, section 7.6].
            nn.init.xavier_uniform_(parameter)
    return module


def _observed(session: Session, module: nn.Module, norms: _Norms) -> nn.Module:
    wrapped = DistributedDataParallel(
        module,
        device_ids=[session.device.index] if session.asynchronous else None,
        process_group=norms.group,
    )
    wrapped.register_comm_hook(norms, _average_and_note)
    return wrapped


def _average_and_note(
    norms: _Norms,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # only in builds with distributed
) -> torch.futures.Future[Tensor]:
    """DDP's own average, with the norms before and after it."""
    gradient = bucket.buffer()
    norms.own = norms.own + gradient.square().sum().cpu()
    gradient.div_(norms.world_size)
    work = dist.all_reduce(gradient, group=norms.group, async_op=True)
    assert work is not None

    def note(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        averaged = future.value()[0]
        norms.mean = norms.mean + averaged.square().sum().cpu()
        return averaged

    return work.get_future().then(note)


def _loss_of(session: Session, module: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    images, labels = (part.to(session.device) for part in held_out)
    plain.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(plain(images), labels))
    plain.train()
    return loss
