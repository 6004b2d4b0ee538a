"""One rank of a real strategy: FSDP2, ZeroRedundancyOptimizer, tensor parallelism, pipeline stages."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from perfmodel.documents.testbed import EmulatedLayer, EmulatedStack, StrategySetting
from perfmodel.layout.layout import Layout, Schedule, parse_layout
from perfmodel.units import Seconds
from validate.testbed.rank import DeviceClock, Layer, Place, mark

#: The first step makes buffers and buckets, the second rebuilds DDP's.
WARM_UP_STEPS = 2

Step = Callable[[], None]


def train(place: Place, setting: StrategySetting) -> dict[str, Any]:
    """Run the steps of one setting; return clocks and counters."""
    clock = WaitingClock()
    layout = parse_layout(setting.layout)
    step = _STEPS[setting.family](setting, layout, clock)
    ends_s: list[Seconds] = []
    before: dict[str, Any] = {}
    dist.barrier()
    for number in range(WARM_UP_STEPS + setting.num_steps):
        if number == WARM_UP_STEPS:
            before = mark(place)
        step()
        ends_s.append(time.perf_counter())
    return {"before": before, "after": mark(place), "ends_s": ends_s[WARM_UP_STEPS - 1 :]}


class WaitingClock(DeviceClock):
    """A device whose host waits for collectives: work begins when it is asked for, not before."""

    def run(self, duration_s: Seconds) -> None:
        """Return when a piece of work that begins now has ended."""
        self.synchronize()
        super().run(duration_s)


def _fsdp(setting: StrategySetting, layout: Layout, clock: DeviceClock) -> Step:
    model = setting.model
    mesh = init_device_mesh("cpu", (layout.dp,))
    layers = _layers(model, clock)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layout.zero == 3)
    module = torch.nn.Sequential(*layers)
    sharded = fully_shard(module, mesh=mesh)
    if setting.prefetch:
        sharded._set_unshard_async_op(True)  # noqa: SLF001 - the only way to gather beside compute on CPU
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        for _ in range(layout.accumulation):
            module(x).sum().backward()
        clock.run(model.optimizer_s / layout.dp)
        module.zero_grad(set_to_none=True)

    return step


def _zero(setting: StrategySetting, layout: Layout, clock: DeviceClock) -> Step:
    model = setting.model
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*_layers(model, clock)), bucket_cap_mb=setting.bucket_cap_mb
    )
    per_element_s = model.optimizer_s / (model.num_layers * model.layer_elements)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optimizer_class=_EmulatedOptimizer,
        parameters_as_bucket_view=True,
        clock=clock,
        per_element_s=per_element_s,
    )
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        for number in range(layout.accumulation):
            ddp.require_backward_grad_sync = number == layout.accumulation - 1
            ddp(x).sum().backward()
        optimizer.step()
        ddp.zero_grad(set_to_none=True)

    return step


class _EmulatedOptimizer(torch.optim.Optimizer):
    """Takes its time over the parameters that it was given."""

    def __init__(
        self, params: Iterable[torch.Tensor], *, clock: DeviceClock, per_element_s: Seconds
    ) -> None:
        super().__init__(params, {})
        self.clock = clock
        self.per_element_s = per_element_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update nothing, in the time of all."""
        assert closure is None
        held = sum(p.numel() for group in self.param_groups for p in group["params"])
        self.clock.run(held * self.per_element_s)


def _tensor(setting: StrategySetting, layout: Layout, clock: DeviceClock) -> Step:
    model = setting.model
    mesh = init_device_mesh("cpu", (layout.tp,))
    # Attention and perceptron are a pair each: its first matrix is divided by columns, its second by rows.
    widths = [(3 * model.hidden, model.hidden), (4 * model.hidden, 4 * model.hidden)]
    pairs = [_Pair(model, *w, mesh, clock) for _ in range(model.num_layers) for w in widths]
    module = torch.nn.Sequential(*pairs)
    x = torch.zeros(model.rows, model.hidden, requires_grad=True)

    def step() -> None:
        for _ in range(layout.accumulation):
            module(x).sum().backward()
        clock.run(model.optimizer_s / layout.tp)
        module.zero_grad(set_to_none=True)

    return step


class _Pair(torch.nn.Sequential):
    """Two linear layers that share one all-reduce in each direction."""

    def __init__(
        self,
        model: EmulatedStack,
        middle_out: int,
        middle_in: int,
        mesh: DeviceMesh,
        clock: DeviceClock,
    ) -> None:
        part_s = (model.forward_s / 4 / mesh.size(), model.backward_s / 4 / mesh.size())
        first = _Linear(model.hidden, middle_out, _Kernel(clock, *part_s, Shard(-1), mesh))
        second = _Linear(middle_in, model.hidden, _Kernel(clock, *part_s, Partial(), mesh))
        super().__init__(first, second)
        parallelize_module(self, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What stands for a matrix product of one rank."""

    clock: DeviceClock
    forward_s: Seconds
    backward_s: Seconds
    placement: Placement
    """Of the result."""
    mesh: DeviceMesh


class _Linear(torch.nn.Linear):
    """A linear layer without arithmetic, as its styles divide it."""

    def __init__(self, features_in: int, features_out: int, kernel: _Kernel) -> None:
        super().__init__(features_in, features_out, bias=False)
        self.kernel = kernel

    def forward(self, x: DTensor) -> DTensor:  # type: ignore[override]
        """Take the forward time."""
        assert isinstance(self.weight, DTensor)
        # A column-divided layer leaves each rank with its share of the input's gradient.
        inputs = [Partial()] if isinstance(self.kernel.placement, Shard) else x.placements
        local = x.to_local(grad_placements=inputs)
        result = _Product.apply(local, self.weight.to_local(), self.kernel)
        return DTensor.from_local(
            result, self.kernel.mesh, [self.kernel.placement], run_check=False
        )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kernel: _Kernel) -> torch.Tensor:
        ctx.kernel, ctx.shape, ctx.weight_shape = kernel, x.shape, weight.shape
        _wait_for(x)
        kernel.clock.run(kernel.forward_s)
        return torch.zeros(len(x), weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kernel: _Kernel = ctx.kernel
        _wait_for(gradients[0])
        kernel.clock.run(kernel.backward_s)
        return torch.zeros(ctx.shape), torch.zeros(ctx.weight_shape), None


def _wait_for(x: torch.Tensor) -> None:
    """Return when the collective that fills a tensor has ended."""
    if isinstance(x, AsyncCollectiveTensor):
        x.wait()


def _pipeline(setting: StrategySetting, layout: Layout, clock: DeviceClock) -> Step:
    model = setting.model
    number = dist.get_rank()
    held = _layers(model, clock)[: model.num_layers // layout.pp]
    stage = PipelineStage(torch.nn.Sequential(*held), number, layout.pp, torch.device("cpu"))
    kind = ScheduleGPipe if layout.schedule is Schedule.GPIPE else Schedule1F1B
    schedule = kind(stage, layout.accumulation, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    x = torch.zeros(layout.accumulation * model.rows, model.hidden)
    given = (x,) if number == 0 else ()
    target = x if number == layout.pp - 1 else None

    def step() -> None:
        schedule.step(*given, target=target)
        clock.run(model.optimizer_s / layout.pp)
        for layer in held:
            layer.zero_grad(set_to_none=True)

    return step


def _layers(model: EmulatedStack, clock: DeviceClock) -> list[Any]:
    spec = EmulatedLayer(
        num_elements=model.layer_elements,
        forward_s=model.forward_s,
        backward_s=model.backward_s,
    )
    return [Layer(spec, clock) for _ in range(model.num_layers)]


_STEPS = {"fsdp": _fsdp, "zero": _zero, "tensor": _tensor, "pipeline": _pipeline}
