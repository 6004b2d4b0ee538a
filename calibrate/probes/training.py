"""Real training steps: with and without DDP, with and without gradient synchronisation."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from calibrate.device import HOLD_S, Clock, Device
from calibrate.locks import work_folder
from calibrate.probes import Session, repeats_within
from calibrate.processes import die_with_parent
from calibrate.task import StepTask
from perfmodel.cost.traced import issued
from perfmodel.documents.observation import (
    PHASES,
    DeviceStreams,
    HostSteps,
    RankSteps,
    StepObservation,
)
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.tracing.fork import Fork
from perfmodel.tracing.reference import REFERENCES, ReferenceModel
from perfmodel.tracing.source import ModelSource, make_optimizer
from perfmodel.tracing.sources import find_source
from perfmodel.units import Seconds
from perfmodel.workload import Phase
from perfmodel.workload.step import TracedStep

if TYPE_CHECKING:
    from calibrate.random_models import RandomModel

_T = TypeVar("_T")
_POOL_SAMPLES = 512
_MAXIMUM_STEPS = 200
#: Of a model's own training: of the longest steps a few, of the shortest as many as fill the time asked for.
_FEWEST_TRAINED: Final = 3
_MOST_TRAINED: Final = 3000
#: For drawing batches of a model that trains: time, and memory for all.
_DRAWING_S: Final = 0.25
_DRAWN_BYTES: Final = 64e6
#: Steps until a host that runs ahead of its device has filled the queue between them.
_LEAD_IN = 5
#: A new process is slow for longer than that: its first 0.1 s by a fifth to a third. As the loops that judge. [s]
_WARM_UP_S: Final = 0.3
_DENSE_STEPS = 5
#: Steps of which the host's part is timed: runs of a host differ more than these steps do.
_MOST_ISSUED = 40
#: Of a step that the device ends before the host has issued it.
_FEW_SAMPLES = 4
#: A queue holds about 1,024 launches, and some operators launch two kernels.
_MOST_WAITING = 500


@dataclass(slots=True, kw_only=True)
class Trainer:
    """A model, its optimizer and a pool of samples in host memory."""

    reference: ReferenceModel
    module: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor
    device: Device
    is_pinned: bool = False
    """Whether the pool can be copied behind the host's back."""
    is_warm: bool = False

    def batch(self, index: int, *, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Copy one micro-batch out of the pool, and to the device."""
        if self.is_pinned:
            # Gathered rows would lie in pageable memory, whose copies wait for the device.
            start = index * micro_batch % max(1, len(self.inputs) - micro_batch)
            rows: slice | Tensor = slice(start, start + micro_batch)
        else:
            rows = torch.arange(index * micro_batch, (index + 1) * micro_batch) % len(self.inputs)
        device = self.device.torch_device
        return (
            self.inputs[rows].to(device, non_blocking=True),
            self.labels[rows].to(device, non_blocking=True),
        )

    def step(self, index: int, *, setting: RunSetting, clock: Clock) -> None:
        """Run one optimizer step and mark the end of each phase of each micro-step."""
        for micro_step in range(setting.accumulation):
            is_last = micro_step == setting.accumulation - 1
            inputs, labels = self.batch(
                index * setting.accumulation + micro_step, micro_batch=setting.micro_batch
            )
            clock.mark()
            with self._synchronisation(setting, is_last=is_last):
                with self.device.autocast(self.reference.precision):
                    # Held until the next one, as in scripts.
                    outputs = self.module(inputs)
                    loss = self.reference.loss(outputs, labels)
                clock.mark()
                loss.backward()  # type: ignore[no-untyped-call]
            clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.mark()

    def _synchronisation(
        self, setting: RunSetting, *, is_last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        synchronised = setting.synchronisation is Synchronisation.DDP and is_last
        if synchronised or not isinstance(self.module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()


def measure_steps(session: Session, task: StepTask) -> StepObservation:
    """Time steps of one setting; all of its ranks must call it."""
    setting = task.setting
    started_utc = time.time()
    trainer = _trainer(session, setting)
    mine = _rank_steps(session, trainer, task)
    streams = None
    # One rank under DDP tells what hooks and buckets cost the host, and what they cost the device.
    if session.asynchronous and setting.world_size == 1:
        num_steps = repeats_within(
            task.target_s / 2,
            mine.step_s,
            minimum=_DENSE_STEPS,
            maximum=min(_MOST_ISSUED, session.measured.most_repeats // 2),
        )
        streams = _device_streams(session, trainer, setting, num_steps=num_steps)
    buckets = _bucket_bytes(trainer.module)
    return StepObservation(
        task=task.name,
        round=task.round,
        started_utc=started_utc,
        setting=setting,
        ranks=tuple(session.gather(mine, world_size=setting.world_size)),
        device_streams=streams,
        bucket_bytes=buckets if setting.synchronisation is Synchronisation.DDP else (),
    )


def _rank_steps(session: Session, trainer: Trainer, task: StepTask) -> RankSteps:
    """Steps of this rank."""
    setting = task.setting
    # DDP forms its final buckets after its first step; a second is as long as later ones. A GPU learns for longer.
    is_new = session.asynchronous and not trainer.is_warm
    warm_s = _run(session, trainer, setting, num_steps=3 if is_new else 2)["step"]
    # Each task has new processes on a processor.
    while not session.asynchronous and session.agree(
        sum(warm_s) < _WARM_UP_S, world_size=setting.world_size
    ):
        warm_s += _run(session, trainer, setting, num_steps=1)["step"]
    trainer.is_warm = True
    session.measured.reset_peak()
    num_steps = session.agree(
        repeats_within(
            task.target_s,
            warm_s[1:],
            minimum=task.min_steps,
            maximum=min(_MAXIMUM_STEPS, session.measured.most_repeats),
        ),
        world_size=setting.world_size,
    )
    lead = _LEAD_IN if session.asynchronous else 0
    phases_s = _run(session, trainer, setting, num_steps=lead + num_steps)
    phases_s = {name: times_s[lead:] for name, times_s in phases_s.items()}
    return RankSteps(
        rank=session.rank,
        step_s=tuple(phases_s["step"]),
        input_s=tuple(phases_s["input"]),
        forward_s=tuple(phases_s["forward"]),
        backward_s=tuple(phases_s["backward"]),
        optimizer_s=tuple(phases_s["optimizer"]),
        memory=session.measured.peak_memory(),
    )


def _bucket_bytes(module: nn.Module) -> tuple[int, ...]:
    """Buckets that DDP really formed, in the order in which it reduces them. [B]"""
    if not isinstance(module, DistributedDataParallel):
        return ()
    logged = module._get_ddp_logging_data()  # noqa: SLF001 - the only place where DDP tells
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return tuple(int(size) for size in str(sizes).split(",") if size.strip())


def _device_streams(
    session: Session, trainer: Trainer, setting: RunSetting, *, num_steps: int
) -> DeviceStreams:
    """Take host and device time of a step apart (asynchronous devices only).

    Dispatch times come from steps that each wait for the device to end the one before, so that no full queue holds
    the host up; a host that pauses longer finds its caches cold. Dense times come from steps behind a long idle
    kernel: when the device reaches them, the host has issued everything.
    """
    dispatch: dict[str, list[Seconds]] = {phase: [] for phase in PHASES}
    dense: dict[str, list[Seconds]] = {phase: [] for phase in PHASES}
    for index in range(num_steps + 1):
        session.synchronise()
        host = session.measured.host_clock()
        host.mark()
        trainer.step(index, setting=setting, clock=host)
        issued_s = host.seconds()[-1]
        if index > 0:
            _collect(dispatch, host.seconds(), setting)
    for index in range(_DENSE_STEPS):
        session.synchronise()
        session.measured.hold(max(HOLD_S, 2 * issued_s))
        device = session.measured.clock()
        device.mark()
        trainer.step(index, setting=setting, clock=device)
        _collect(dense, device.seconds(), setting)
    return DeviceStreams(
        # To issue the copy of the batch is work of the host, too.
        dispatch_forward_s=tuple(
            map(sum, zip(dispatch["input"], dispatch["forward"], strict=True))
        ),
        dispatch_backward_s=tuple(dispatch["backward"]),
        dispatch_optimizer_s=tuple(dispatch["optimizer"]),
        dense_input_s=tuple(dense["input"]),
        dense_forward_s=tuple(dense["forward"]),
        dense_backward_s=tuple(dense["backward"]),
        dense_optimizer_s=tuple(dense["optimizer"]),
    )


def host_steps(
    session: Session, model: "RandomModel", step: TracedStep, *, target_s: Seconds
) -> HostSteps | None:
    """Train a drawn model on few samples; time what its host issues."""
    device = session.measured
    module = model.sketch.build().to(device.torch_device)
    optimizer = model.make_optimizer(module.parameters())
    drawn = (*model.sketch.inputs, model.sketch.targets)
    pool = [device.pinned(entry.draw(_FEW_SAMPLES)) for entry in drawn]

    def forward() -> Tensor:
        *inputs, targets = (each.to(device.torch_device, non_blocking=True) for each in pool)
        with device.autocast(model.precision):
            return model.sketch.loss(module(*inputs), targets)

    def update(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return issued_steps(
        session,
        forward,
        lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        update,
        issued={phase: issued(step, phase) for phase in Phase},
        num_gradients=sum(parameter.requires_grad for parameter in module.parameters()),
        target_s=target_s,
    )


def trained(
    session: Session, code: str | None, step: TracedStep, *, target_s: Seconds, world_size: int = 1
) -> tuple[Seconds | None, Seconds | None]:
    """Mean step of a user's model in a loop as tutorials have it, and what the host takes to issue one. [s]

    None where operators are timed alone; where host and device are one, nothing is issued.
    No clock stands between two steps. Each gathers its batch: samples that were drawn, in a new order; a GPU gets
    them from page-locked memory, as from a loader that is never late. Several ranks, all of which must call it, train
    under DistributedDataParallel, each on batches of its own; the slowest counts.

    Raises
    ------
    ValueError
        If the loss is not finite; else whatever the model's code raises. What is traced needs no values: indices
        of an example may be memory as it was found.
    """
    micro_batch, method = step.micro_batch, step.method
    if code is None or method.checkpointing != "none":
        return None, None
    device = session.measured
    torch.manual_seed(session.rank)
    source = find_source(code)
    module, batches = _built(session, source, micro_batch)
    module = module.to(device.torch_device)
    optimizer = make_optimizer(
        (weights for weights in module.parameters() if weights.requires_grad),
        name=method.optimizer,
        implementation=method.optimizer_implementation,
    )
    if world_size > 1:
        module = DistributedDataParallel(module, process_group=session.data[world_size])

    def one_step() -> Tensor:
        optimizer.zero_grad()
        leaves, structure = next(batches)
        if session.asynchronous:
            taken = [
                leaf.to(device.torch_device, non_blocking=True)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
        else:
            rows = torch.randperm(micro_batch)
            taken = [_in_order(rows, leaf) for leaf in leaves]
        positional, keyword, targets = tree_unflatten(taken, structure)
        with device.autocast(method.precision):
            loss: Tensor = source.loss(module(*positional, **keyword), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def run(num_steps: int) -> Seconds:
        session.barrier(world_size)
        begun_s = device.now()
        for _ in range(num_steps):
            loss = one_step()
        # A GPU has done all steps by then.
        if not math.isfinite(loss.item()):
            raise ValueError(f"{code}: diverged")
        return device.now() - begun_s

    def issuing() -> Seconds:
        session.synchronise()
        begun_s = device.now()
        one_step()
        return device.now() - begun_s

    count = _count(session, run, target_s=target_s, world_size=world_size)
    each_s = session.gather(run(count) / count, world_size=world_size)
    step_s = session.agree(max(each_s, default=None), world_size=world_size)
    if not session.asynchronous:
        return step_s, None
    # A full queue holds the host up.
    num_issued = min(count, _MOST_ISSUED, device.most_repeats // 4)
    return step_s, statistics.median(issuing() for _ in range(num_issued))


def _count(
    session: Session, run: Callable[[int], Seconds], *, target_s: Seconds, world_size: int
) -> int:
    """Steps that take about this time, the same on all ranks, once process and device are warm."""
    warm_s, most = [run(1)], min(_MOST_TRAINED, session.measured.most_repeats)
    fewest = _LEAD_IN if session.asynchronous else 2
    while len(warm_s) < fewest or (
        len(warm_s) < most and session.agree(sum(warm_s) < _WARM_UP_S, world_size=world_size)
    ):
        warm_s.append(run(1))
    count = repeats_within(target_s, warm_s[1:], minimum=_FEWEST_TRAINED, maximum=most)
    agreed: int = session.agree(count, world_size=world_size)
    return agreed


def _built(
    session: Session, source: ModelSource, micro_batch: int
) -> tuple[nn.Module, Iterator[Any]]:
    """A model, and its inputs, keywords and targets again and again: batches that take little memory and time.

    Each batch is taken apart into leaves and structure before: a step would take up to 0.1 ms for that.
    On a processor a copy of this process draws all but the first. Gradients would else lie where the models before it
    were, in pages that are there: a plain loop maps theirs in every step, at 2 us each, half of a step of wide layers.
    """
    if session.asynchronous:
        module, batches = _drawn(session, source, micro_batch)
        batches = tree_map_only(Tensor, session.measured.pinned, batches)
        return module.train(), itertools.cycle([*map(tree_flatten, batches)])

    def others() -> None:
        die_with_parent()
        _, batches = _drawn(session, source, micro_batch)
        # A part of a tensor would be written with the whole, and what is no tensor perhaps not at all.
        torch.save([[leaf.clone() for leaf in _tensors(batch)] for batch in batches[1:]], file)

    with work_folder("perfmodel-batches-") as folder:
        file = f"{folder}/batches"
        with Fork(others) as copy:
            copy.result()
        # Mapped: to free what they were read into would teach the C library to keep memory that a plain loop maps.
        drawn = torch.load(file, mmap=True, weights_only=False)  # written by this very program
    module = source.build()
    leaves, structure = tree_flatten(_batch(source, micro_batch))
    batches = [(leaves, structure)]
    for each in map(iter, drawn):
        values = [next(each) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batches.append((values, structure))
    return module.train(), itertools.cycle(batches)


def _drawn(session: Session, source: ModelSource, micro_batch: int) -> tuple[nn.Module, list[Any]]:
    """Batches, and the model of the last: one that comes with a model is drawn again only with that."""
    module = source.build()
    begun_s, batches = session.measured.now(), [_batch(source, micro_batch)]
    size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(batches))
    most = min(_POOL_SAMPLES / micro_batch, _DRAWN_BYTES / max(1, size_bytes))
    # The clock of a virtual device stands still.
    most = min(most, session.measured.most_repeats)
    while len(batches) < most and session.measured.now() - begun_s < _DRAWING_S:
        if source.own_samples() is not None:
            del module  # memory may not hold two; a loss may hold the last
            module = source.build()
        batches.append(_batch(source, micro_batch))
    return module, batches


def _batch(source: ModelSource, micro_batch: int) -> tuple[Any, ...]:
    """Inputs, keywords and targets."""
    found = source.draw_batch(micro_batch)
    return found.positional, found.keyword, found.targets


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All that a batch holds."""
    return (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _in_order(rows: Tensor, leaf: Any) -> Any:
    """A part of a batch with its samples in an order; what holds no samples as it is."""
    holds_samples = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == len(rows)
    return leaf[rows] if holds_samples else leaf


def issued_steps(  # noqa: PLR0913 - what a step is
    session: Session,
    forward: Callable[[], _T],
    backward: Callable[[_T], object],
    update: Callable[[_T], object],
    *,
    issued: dict[Phase, dict[str, int]],
    num_gradients: int,
    target_s: Seconds,
) -> HostSteps | None:
    """Steps of two micro-batches, each on an idle device; the second one adds to the gradients of the first.

    A full queue holds the host up. While the device is busy, of the K kernels of one micro-batch and the update this
    many wait when the host has issued the last one:

        K x (end of the step - last issue) / (end of the step - first issue)

    ``None`` where that is too near to what a queue holds.
    """
    device = session.measured
    num_kernels = sum(found[f"{phase.value}_s"] for phase, found in issued.items())
    durations_s: list[list[Seconds]] = []
    waiting: list[float] = []

    def one_step() -> Seconds:
        host = device.host_clock()
        for _ in range(2):
            session.synchronise()
            host.mark()
            loss = forward()
            host.mark()
            backward(loss)
            host.mark()
        update(loss)
        host.mark()
        session.synchronise()
        host.mark()
        *instants_s, end_s = host.seconds()
        apart_s = [end - start for start, end in itertools.pairwise(instants_s)]
        durations_s.append([*apart_s[:2], apart_s[-1], apart_s[-2]])
        waiting.append(num_kernels * (end_s - instants_s[-1]) / (end_s - instants_s[3]))
        return end_s

    warm_s = [one_step() for _ in range(_LEAD_IN)]
    most = min(_MAXIMUM_STEPS, device.most_repeats)
    for _ in range(repeats_within(target_s, warm_s, minimum=_DENSE_STEPS, maximum=most)):
        one_step()
    if statistics.median(waiting[_LEAD_IN:]) > _MOST_WAITING:
        return None
    *columns, adding_s = zip(*durations_s[_LEAD_IN:], strict=True)
    return HostSteps(
        issued=issued,
        dispatch_s=dict(zip(Phase, columns, strict=True)),
        adding_s=adding_s,
        num_gradients=num_gradients,
    )


def _run(
    session: Session,
    trainer: Trainer,
    setting: RunSetting,
    *,
    num_steps: int,
) -> dict[str, list[Seconds]]:
    """Time steps in a plain loop, by phase and as a whole. [s]"""
    clock = session.measured.clock()
    session.barrier(setting.world_size)
    for index in range(num_steps):
        clock.mark()
        trainer.step(index, setting=setting, clock=clock)
    instants_s = clock.seconds()
    marks_per_step = 3 * setting.accumulation + 2
    phases: dict[str, list[Seconds]] = {phase: [] for phase in (*PHASES, "step")}
    for index in range(num_steps):
        window = instants_s[index * marks_per_step : (index + 1) * marks_per_step]
        _collect(phases, window, setting)
        phases["step"].append(window[-1] - window[0])
    return phases


def _collect(
    phases: dict[str, list[Seconds]], instants_s: Sequence[Seconds], setting: RunSetting
) -> None:
    """Sort the durations between the marks of one step by phase, summed over micro-steps."""
    durations_s = [end - start for start, end in itertools.pairwise(instants_s)]
    micro = durations_s[: 3 * setting.accumulation]
    for offset, phase in enumerate(PHASES[:3]):
        phases[phase].append(sum(micro[offset::3]))
    phases["optimizer"].append(durations_s[-1])


def _trainer(session: Session, setting: RunSetting) -> Trainer:
    """The model of a setting; on a GPU it is the only one, so that the peak of memory is that of its own steps."""
    wrapped = setting.synchronisation is not Synchronisation.NONE
    # no_sync steps share the wrapper of the default bucket size.
    cap_mb = setting.bucket_cap_mb if setting.synchronisation is Synchronisation.DDP else None
    key = (
        setting.workload,
        wrapped,
        setting.world_size if wrapped else 0,
        cap_mb,
        setting.micro_batch if session.asynchronous else 0,
    )
    if session.asynchronous:
        # A wrapped model is built by all of its ranks together: rank 0 has seen all tasks, the others some.
        is_kept = session.agree(key in session.models, world_size=setting.world_size)
        session.clear(keep=key if is_kept else None)
    if key not in session.models:
        session.models[key] = _build(session, setting, wrapped=wrapped, cap_mb=cap_mb)
    trainer: Trainer = session.models[key]
    torch.backends.cudnn.benchmark = REFERENCES[setting.workload].cudnn_benchmark
    return trainer


def _build(
    session: Session, setting: RunSetting, *, wrapped: bool, cap_mb: float | None
) -> Trainer:
    reference = REFERENCES[setting.workload]
    torch.manual_seed(0)
    with session.device:  # made there, tied weights stay tied on every kind of device
        module = reference.build()
    if wrapped:
        module = reference.wrapped(
            module,
            device_ids=[session.device.index] if session.device.type == "cuda" else None,
            process_group=session.data[setting.world_size],
            bucket_cap_mb=cap_mb,
        )
    pin = session.asynchronous
    num_samples = max(_POOL_SAMPLES, setting.micro_batch) if pin else _POOL_SAMPLES
    inputs, labels = reference.draw_batch(num_samples).pair
    trainer = Trainer(
        reference=reference,
        module=module,
        optimizer=reference.make_optimizer(module.parameters()),
        inputs=session.measured.pinned(inputs),
        labels=session.measured.pinned(labels),
        device=session.measured,
        is_pinned=pin,
    )
    if wrapped and reference.ddp_options:
        first = replace(setting, synchronisation=Synchronisation.DDP, accumulation=1)
        trainer.step(0, setting=first, clock=session.measured.host_clock())
    return trainer
