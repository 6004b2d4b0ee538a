"""Real steps of a stack of layers under a layout: DDP, ZeRO, FSDP2, tensor parallelism, pipelines."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from calibrate.probes import Session, new_group, repeats_within
from calibrate.task import LayoutTask
from perfmodel.documents.observation import LayoutObservation, StackSpec
from perfmodel.layout import Layout, Schedule, parse_layout
from perfmodel.tracing.source import Batch, ModelSource, classification_loss, make_optimizer
from perfmodel.tracing.trace import trace_model
from perfmodel.units import Seconds
from perfmodel.workload.step import DEFAULT, OPTIMIZERS, StepMethod

_CLASSES = 16
_WARM_UP = 3
_MOST_STEPS = 60

Step = Callable[[], None]


class Attention(nn.Module):
    """Self-attention; query, key and value of a head stand side by side, so that heads can be divided."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all tokens."""
        batch, tokens, _ = x.shape
        mixed = self.into(x).view(batch, tokens, -1, 3 * self.head).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).reshape(batch, tokens, -1))


class Perceptron(nn.Module):
    """Two linear layers, the hidden one four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, bend, narrow."""
        return self.out(nn.functional.gelu(self.into(x)))


class Block(nn.Module):
    """Normalised parts with residual sums around them."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        if spec.head:
            self.attention_norm = nn.LayerNorm(spec.width)
            self.attention = Attention(spec.width, spec.head)
        self.perceptron_norm = nn.LayerNorm(spec.width)
        self.perceptron = Perceptron(spec.width)
        self.attends = spec.head > 0

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        if self.attends:
            x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


class Stack(nn.Module):
    """Blocks, and scores of classes at the end; a pipeline stage holds a part."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.head: nn.Module = nn.Linear(spec.width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, shape ``(samples, classes)``."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1) if isinstance(self.head, nn.Linear) else x)


def traceable(spec: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A stack and a sample, as ``perfmodel trace FILE.py:FACTORY`` takes them."""
    found = StackSpec(**spec)
    return Stack(found), torch.randn(1, found.tokens, found.width)


def trace_stack(task: LayoutTask, kind: str) -> dict[str, Any]:
    """The stack of a task as a workload with its operators and memory."""
    spec = task.stack

    def draw(samples: int) -> Batch:
        x = torch.empty(samples, spec.tokens, spec.width)
        return Batch(positional=(x,), keyword={}, targets=torch.zeros(samples, dtype=torch.int64))

    source = ModelSource(
        name=f"stack-{spec.layers}x{spec.width}",
        build=lambda: Stack(spec),
        draw_batch=draw,
        loss=classification_loss,
    )
    method = StepMethod(
        optimizer=task.optimizer,
        optimizer_implementation=DEFAULT,
        precision="fp32",
        checkpointing="none",
        device_kind=kind,
    )
    found = trace_model(source, method, micro_batch=8)
    return {"workload": found.workload, "trace": found.step, "memory": found.memory}


def measure_layout(session: Session, task: LayoutTask) -> LayoutObservation:
    """Steps of a plain loop; every rank of the layout must call it."""
    mine = _steps_s(session, task)
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


def _steps_s(session: Session, task: LayoutTask) -> list[Seconds]:
    """On this rank. [s]"""
    layout = parse_layout(task.layout)
    if session.world_size == layout.world_size:
        form_groups(session, [layout])
    groups = {
        name: session.groups[row]
        for name, rows in _rows(layout).items()
        for row in rows
        if session.rank in row
    }
    step = _step(session, task, layout, groups)
    session.barrier(layout.world_size)
    warm_s = _timed(session, step, _WARM_UP)
    count = repeats_within(task.target_s, warm_s[1:], minimum=4, maximum=_MOST_STEPS)
    return _timed(session, step, session.agree(count, world_size=layout.world_size))


def _timed(session: Session, step: Step, count: int) -> list[Seconds]:
    """The clock on the wall; of steps that a device works on later, their mean. [s]"""
    session.synchronise()
    now = session.measured.now
    ends_s = [now()]
    for _ in range(count):
        step()
        ends_s.append(now())
    if session.asynchronous:
        session.synchronise()
        return [(now() - ends_s[0]) / count] * count
    return [end - start for start, end in itertools.pairwise(ends_s)]


def form_groups(session: Session, layouts: Iterable[Layout]) -> None:
    """Create the process groups of some layouts: a collective call of the default process group."""
    for layout in layouts:
        for rows in _rows(layout).values():
            for row in rows:
                if row not in session.groups:
                    session.groups[row] = new_group(row, session.backend)


def _rows(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """Ranks that stand beside each other along each dimension of a layout."""
    shape = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    ranks = torch.arange(layout.world_size).view(*shape.values())
    return {
        name: [tuple(row) for row in ranks.movedim(number, -1).reshape(-1, size).tolist()]
        for number, (name, size) in enumerate(shape.items())
    }


def _step(session: Session, task: LayoutTask, layout: Layout, groups: dict[str, Any]) -> Step:
    """Everything that one optimizer step does."""
    torch.manual_seed(0)
    device, pp = session.device, layout.pp
    module = Stack(task.stack).to(device)
    samples = layout.micro_batch * (layout.accumulation if pp > 1 else 1)
    x = torch.randn(samples, task.stack.tokens, task.stack.width, device=device)
    labels = torch.randint(0, _CLASSES, (samples,), device=device)
    if pp > 1:
        stage = dist.get_rank(groups["pp"])
        ends = torch.tensor((0, *layout.stages(task.stack.layers))).cumsum(0).tolist()
        module.blocks = module.blocks[ends[stage] : ends[stage + 1]]
        if stage < pp - 1:
            module.head = nn.Identity()
    trained = _spread(module, layout, groups, device)
    make = _optimizer(task, trained, layout, groups)

    def update() -> None:
        make.step()
        make.zero_grad()

    if pp > 1:
        part = PipelineStage(trained, stage, pp, device, group=groups["pp"])
        kind = ScheduleGPipe if layout.schedule is Schedule.GPIPE else Schedule1F1B
        schedule = kind(part, layout.accumulation, loss_fn=nn.functional.cross_entropy)

        def step() -> None:
            schedule.step(*(() if stage else (x,)), target=labels if stage == pp - 1 else None)
            update()

        return step

    def train() -> None:
        for number in range(layout.accumulation):
            # DDP reduces the gradients of the last micro-batch only; FSDP those of all.
            is_last = number == layout.accumulation - 1
            local: Any = contextlib.nullcontext()
            if isinstance(trained, DistributedDataParallel) and not is_last:
                local = trained.no_sync()
            with local:
                nn.functional.cross_entropy(trained(x), labels).backward()  # type: ignore[no-untyped-call]
        update()

    return train


def _spread(
    module: Stack, layout: Layout, groups: dict[str, Any], device: torch.device
) -> nn.Module:
    """The module as the layout divides it among ranks."""
    kind = device.type
    meshes = {
        name: DeviceMesh.from_group(group, kind, mesh_dim_names=(name,))
        for name, group in groups.items()
    }
    if layout.tp > 1 and layout.zero > 1:
        grid = torch.arange(layout.world_size).view(layout.dp, layout.tp)
        both = DeviceMesh.from_group(
            [groups["dp"], groups["tp"]], kind, mesh=grid, mesh_dim_names=("dp", "tp")
        )
        meshes |= {"dp": both["dp"], "tp": both["tp"]}
    if layout.tp > 1:
        for block in module.blocks:
            parts = [name for name, _ in block.named_children() if not name.endswith("norm")]
            plan: dict[str, ParallelStyle] = {}
            for part in parts:
                plan |= {f"{part}.into": ColwiseParallel(), f"{part}.out": RowwiseParallel()}
            parallelize_module(block, meshes["tp"], plan)
    if layout.zero > 1:
        for block in module.blocks:
            fully_shard(block, mesh=meshes["dp"], reshard_after_forward=layout.zero == 3)
        fully_shard(module, mesh=meshes["dp"])
        return module
    if layout.dp > 1 or layout.zero == 1:
        device_ids = [device] if kind == "cuda" else None
        return DistributedDataParallel(
            module,
            device_ids=device_ids,
            process_group=groups["dp"],
            bucket_cap_mb=layout.bucket_cap_mb,
        )
    return module


def _optimizer(
    task: LayoutTask, module: nn.Module, layout: Layout, groups: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer; with ZeRO-1 each rank updates its part of the parameters for all."""
    if layout.zero == 1:
        row = OPTIMIZERS[task.optimizer]
        options: dict[str, Any] = dict(row.arguments)
        return ZeroRedundancyOptimizer(
            module.parameters(),
            optimizer_class=getattr(torch.optim, row.torch_name),
            process_group=groups["dp"],
            parameters_as_bucket_view=True,
            lr=1e-3,
            foreach=True,
            **options,
        )
    # Operators on lists take tensors of one mesh only.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    lists: list[Any] = [{"params": held} for held in by_mesh.values()]
    return make_optimizer(lists, name=task.optimizer, implementation="foreach")
