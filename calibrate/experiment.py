"""Which points a calibration measures, in which (seeded) order, how often; pure."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from calibrate.environment import DeviceKind
from calibrate.layers import planned_layers
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
)
from perfmodel.documents import installed_version
from perfmodel.documents.observation import DDP_PROBE, QUEUE_PROBE, StackSpec
from perfmodel.errors import UsageError
from perfmodel.layout import RunSetting, Synchronisation
from perfmodel.units import GIB, KIB, MIB, Seconds

#: One thing to time: which kernel, on which type, of which shape.
_Probe: TypeAlias = tuple[str, str, tuple[int, ...]]


def _planned_probes(device_kind: str) -> Iterator[_Probe]:
    """Everything that is measured on a kind of device."""
    if is_cpu := device_kind == "cpu":
        # Without matrix units bf16 runs a hundred times slower than fp32 on a CPU: small shapes suffice.
        dtypes: tuple[str, ...] = ("fp32", "bf16")
        widths: tuple[int, ...] = (64, 256)
        mebibytes: tuple[int, ...] = (1, 16, 128)
    else:
        dtypes, widths = ("fp32", "tf32", "bf16", "fp16"), (512, 1024, 2048, 4096, 8192)
        mebibytes = (1, 16, 256, 1024)
    yield from (("matmul", dtype, (width,) * 3) for dtype in dtypes for width in widths)
    if is_cpu:
        yield "matmul", "fp32", (1024,) * 3
    yield from (("memory", "fp32", (size * 2**18,)) for size in mebibytes)
    if not is_cpu:
        # As large as gradients of small layers: what adding them takes.
        yield from (("memory", "fp32", (2**power,)) for power in (8, 13, 16))
        # One kernel between two events takes longer than its share of a row of them.
        yield from ((QUEUE_PROBE, "fp32", (count,)) for count in (1, 17))
        # Models differ too little in their shares of views to tell what one costs.
        yield "view", "fp32", (1,)
        # What a copy of a batch takes to start, and its rate.
        yield "host_to_device", "fp32", (2**10,)
        yield "host_to_device", "fp32", (64 * 2**18,)
    yield "dispatch", "fp32", (1,)


#: An interrupted task is lost: as many layers as take about two seconds.
_LAYERS_PER_TASK: Final = 20


def doubling_sizes(world_size: int) -> tuple[int, ...]:
    """Group sizes 1, 2, 4 ... and the full world size."""
    sizes = []
    size = 1
    while size < world_size:
        sizes.append(size)
        size *= 2
    return (*sizes, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much time a calibration may take, and what it spends it on."""

    num_rounds: int
    """Fresh process groups; every setting is measured once in each."""
    other_rounds: int
    """Rounds in which collectives, overlaps and replays are measured too."""
    has_layouts: bool
    """Whether stacks under FSDP, ZeRO, TP and PP are run, and the collectives that only these need."""
    repetition_s: Seconds
    """Timed steps per repetition ..."""
    min_steps: int
    """... but not fewer than these."""
    num_batches: int
    """Micro-batch sizes per model."""
    collective_sizes: tuple[int, ...]
    replay_rounds: int
    """Rounds in which the largest step of each model is replayed; its smallest is in every round."""
    layer_share: float
    """Single layers whose operators are timed, as a share of the full grid."""
    optimizer_share: float
    """The same of optimizers: a curve over two sizes needs a few points in any budget."""
    num_models: int
    """Models drawn at random whose operators are timed inside their steps."""

    @classmethod
    def of(cls, name: str, device_kind: str) -> "Budget":
        """Of a name on a kind of device; a borrowed GPU has little time."""
        budget = BUDGETS[name]
        if not is_short(name, device_kind):
            return budget
        return replace(budget, num_rounds=_ROUNDS_OF_GPU, num_models=_MODELS_OF_GPU)


def is_short(budget: str, device_kind: str) -> bool:
    """Whether a budget repeats less on a kind of device than elsewhere: quick on a GPU, which is often borrowed."""
    return device_kind == "cuda" and budget == "quick"


#: Of a quick calibration; five take a minute longer, to start processes.
_ROUNDS_OF_GPU: Final = 3
#: Three reference models hardly tell what the host takes for others, and hold no recurrent cells or experts.
_MODELS_OF_GPU: Final = 12
_SIZES: Final = tuple(KIB * 4**power for power in range(10))

BUDGETS: Final = {
    "quick": Budget(
        num_rounds=5,
        other_rounds=2,
        has_layouts=False,
        repetition_s=0.2,
        min_steps=3,
        num_batches=2,
        collective_sizes=_SIZES[::2],
        replay_rounds=1,
        layer_share=0.1,
        optimizer_share=0.2,
        num_models=0,
    ),
    "standard": Budget(
        num_rounds=4,
        other_rounds=4,
        has_layouts=True,
        repetition_s=0.4,
        min_steps=3,
        num_batches=4,
        collective_sizes=_SIZES,
        replay_rounds=2,
        layer_share=0.5,
        optimizer_share=1.0,
        num_models=45,
    ),
    "thorough": Budget(
        num_rounds=12,
        other_rounds=12,
        has_layouts=True,
        repetition_s=0.9,
        min_steps=4,
        num_batches=4,
        collective_sizes=_SIZES,
        replay_rounds=12,
        layer_share=2.0,
        optimizer_share=2.0,
        num_models=180,
    ),
}

#: Micro-batches per model, the most useful first: a budget takes as many as it can pay for. The GPU's models are
#: those of ``perfmodel.tracing.reference.GPU_MODELS`` with their precision and optimizer, and small ones that wait for
#: the host.
_MICRO_BATCHES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "cpu": {
        "lenet": (64, 512, 192, 320),
        "resnet18": (1, 4, 2, 6),
        "mlp": (16, 256, 64, 128),
        "transformer": (1, 8, 3, 12),
    },
    "gpu": {
        "resnet50": (32, 256, 64, 128),
        "resnet50-fp32": (32, 128, 64, 96),
        "gpt2": (4, 32, 8, 16),
        "lenet": (64, 4096, 512, 1024),
        "resnet50-tuned": (32, 256, 64, 128),
        "resnet18": (16, 512, 64, 256),
        "mlp": (64, 4096, 512, 1024),
        "transformer": (8, 512, 64, 256),
    },
}

#: How many models of its table a kind of device runs where the user names none.
_NUM_DEFAULT: Final = 4


def _table(device_kind: str) -> dict[str, tuple[int, ...]]:
    return _MICRO_BATCHES["cpu" if device_kind == "cpu" else "gpu"]


def default_models(device_kind: str) -> tuple[str, ...]:
    """Reference models that suit a kind of device."""
    return tuple(_table(device_kind))[:_NUM_DEFAULT]


#: PyTorch's default, and one small enough to cut every model into several buckets.
BUCKET_CAPS_MB: Final = (None, 4.0)


#: Gradients of a stack of square layers, and their width.
_WRAPPED: Final = ((16, 64), (64, 64), (256, 64), (16, 256), (64, 256), (4, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A calibration: what to measure on which world sizes."""

    device_kind: DeviceKind
    world_sizes: tuple[int, ...]
    models: tuple[str, ...]
    budget: Budget = field(default_factory=lambda: BUDGETS["standard"])
    seed: int = 0
    ranks_per_node: int | None = None
    """None: all ranks are on one node."""

    def __post_init__(self) -> None:
        """Refuse models that the kind of device does not run, none at all, and one twice."""
        if not self.models or len(set(self.models)) < len(self.models):
            raise UsageError(
                f"--models: must name at least one model, each once, got {','.join(self.models)!r}"
            )
        known = _table(self.device_kind)
        for model in self.models:
            if model not in known:
                raise UsageError(f"--models: must be among {', '.join(known)}, got {model!r}")

    def settings(self) -> tuple[tuple[RunSetting, ...], ...]:
        """Settings to run, grouped into blocks whose members differ only in synchronisation."""
        return tuple(
            self._block(model, micro_batch)
            for model in self.models
            for micro_batch in self.micro_batches(model)
        )

    def micro_batches(self, model: str) -> tuple[int, ...]:
        """Micro-batch sizes that the budget affords, ascending."""
        batches = _table(self.device_kind)[model]
        return tuple(sorted(batches[: self.budget.num_batches]))

    def _block(self, model: str, micro_batch: int) -> tuple[RunSetting, ...]:
        single = RunSetting(
            workload=model,
            world_size=1,
            micro_batch=micro_batch,
            synchronisation=Synchronisation.NONE,
        )
        # One rank under DDP, and small buckets: of the shortest steps these differences tell most.
        is_varied = micro_batch == self.micro_batches(model)[0]
        caps_mb = BUCKET_CAPS_MB if is_varied else BUCKET_CAPS_MB[:1]
        # One rank under DDP pays for buckets and hooks, but communicates nothing. On a CPU two processes
        # differ by more than that: there a probe has both in one.
        is_wrapped = is_varied and self.device_kind != "cpu"
        wrapped = [replace(single, synchronisation=Synchronisation.DDP)] if is_wrapped else []
        parallel = [
            replace(single, world_size=n, synchronisation=how, bucket_cap_mb=cap_mb)
            for n in self.world_sizes
            if n > 1
            for how, cap_mb in (
                (Synchronisation.NO_SYNC, None),
                *((Synchronisation.DDP, cap_mb) for cap_mb in caps_mb),
            )
        ]
        return (single, *wrapped, *parallel)

    def rounds(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks of each round, in the order in which they are to run.

        Settings of one block stay together, so that their differences are free of drift; blocks
        and their members change places from round to round.
        """
        return tuple(self._round(index) for index in range(self.budget.num_rounds))

    def _round(self, index: int) -> tuple[Task, ...]:
        shuffle = random.Random(f"{self.seed}-{index}")  # noqa: S311 - an order, not a secret
        blocks = [list(block) for block in self.settings()]
        for block in blocks:
            shuffle.shuffle(block)
        shuffle.shuffle(blocks)
        steps = [
            StepTask(
                name=f"{index}: {setting.label}",
                round=index,
                setting=setting,
                target_s=self.budget.repetition_s,
                min_steps=self.budget.min_steps,
            )
            for block in blocks
            for setting in block
        ]
        once = (*self._traces(), *self._compute()) if index == 0 else ()
        others = self._others(index, shuffle) if index < self.budget.other_rounds else ()
        return (*once, *self._wrapping(index), *_interleave(steps, others))

    def _others(self, index: int, shuffle: random.Random) -> tuple[Task, ...]:
        """What is measured beside the steps of a round."""
        collectives = list(self._collectives(index))
        shuffle.shuffle(collectives)
        operators = _interleave(
            [*self._layers(index), *self._models(index)], [*self._replays(index)]
        )
        # A virtual device has none of the groups that layouts need.
        is_virtual = self.device_kind == "virtual"
        has_layouts = self.budget.has_layouts and not is_virtual and _divides_models()
        layouts = [*self._layouts(index)] if has_layouts else []
        shuffle.shuffle(layouts)
        return _interleave([*collectives, *self._overlaps(index)], [*operators, *layouts])

    def _wrapping(self, index: int) -> Iterable[Task]:
        """What DDP costs a rank alone: many small gradients, and few large ones."""
        for num_gradients, width in _WRAPPED if self.device_kind == "cpu" else ():
            yield ComputeTask(
                name=f"{index}: ddp {num_gradients}x{width}",
                round=index,
                probe=DDP_PROBE,
                dtype="fp32",
                shape=(num_gradients, width),
                target_s=self.budget.repetition_s,
            )

    def _layers(self, index: int) -> Iterable[Task]:
        """The round's part of the single layers."""
        drawn = planned_layers(
            share=self.budget.layer_share,
            optimizer_share=self.budget.optimizer_share,
            seed=self.seed,
            device_kind=self.device_kind,
        )
        parts = [
            drawn[start : start + _LAYERS_PER_TASK]
            for start in range(0, len(drawn), _LAYERS_PER_TASK)
        ]
        low, high = (len(parts) * at // self.budget.other_rounds for at in (index, index + 1))
        for number, layers in enumerate(parts[low:high], start=low):
            yield LayersTask(name=f"{index}: layers {number}", round=index, layers=layers)

    def _models(self, index: int) -> Iterable[Task]:
        """The round's part of the drawn models. Their seeds are below 0: no judge draws them."""
        for number in range(index, self.budget.num_models, self.budget.other_rounds):
            yield ModelTask(
                name=f"{index}: model {number}",
                round=index,
                seed=-1 - self.seed,
                index=number,
                target_s=self.budget.repetition_s,
            )

    def _replays(self, index: int) -> Iterable[Task]:
        """Reference models operator by operator: what do their real steps add?"""
        for model in self.models:
            batches = self.micro_batches(model)
            replayed = sorted({batches[0], batches[-1]})
            for micro_batch in replayed if index < self.budget.replay_rounds else replayed[:1]:
                yield ReplayTask(
                    name=f"{index}: replay {model} micro_batch={micro_batch}",
                    round=index,
                    workload=model,
                    micro_batch=micro_batch,
                    target_s=self.budget.repetition_s,
                )

    def _traces(self) -> Iterable[Task]:
        for model in self.models:
            yield TraceTask(name=f"trace {model}", round=0, workload=model)

    def _compute(self) -> Iterable[Task]:
        for probe, dtype, shape in _planned_probes(self.device_kind):
            yield ComputeTask(
                name=f"{probe} {dtype} {'x'.join(map(str, shape))}",
                round=0,
                probe=probe,
                dtype=dtype,
                shape=shape,
                target_s=self.budget.repetition_s / 4,
            )

    def _collectives(self, index: int) -> Iterable[Task]:
        # DDP needs two kinds of them, other layouts the rest.
        is_full = index % 2 == 0 and self.budget.has_layouts
        names = _COLLECTIVES if is_full else _COLLECTIVES[:2]
        for world_size, stride in self._groups():
            for collective in names:
                if collective == "send_recv" and (world_size, stride) != (2, 1):
                    continue
                of = "" if stride == 1 else f" one of {stride}"
                for size_bytes in self._sizes(collective):
                    yield CollectiveTask(
                        name=f"{index}: {collective} n={world_size}{of} {size_bytes}",
                        round=index,
                        collective=collective,
                        world_size=world_size,
                        size_bytes=size_bytes,
                        stride=stride,
                        target_s=self.budget.repetition_s / 3,
                    )

    def _groups(self) -> list[tuple[int, int]]:
        """How many ranks, and how far apart: the first ones, and one on each of several nodes."""
        found = [(n, 1) for n in self.world_sizes]
        each = self.ranks_per_node or 1
        if each > 1:
            found += [(n, each) for n in doubling_sizes(-(-self.world_sizes[-1] // each))]
        return [(n, stride) for n, stride in found if n > 1]

    def _layouts(self, index: int) -> Iterable[Task]:
        """Small stacks under every family of layouts: what their own code costs.

        One rank in every round, each layout in every second one: all rounds tell of every family.
        """
        sizes = [n for n in self.world_sizes if n > 1 and _STACK_PARTS % n == 0]
        layouts = [layout.format(n=n, twice=2 * n) for layout in _LAYOUTS for n in sizes]
        for number, stack in enumerate(_STACKS if layouts else ()):
            for layout in ("dp=1", *layouts[(number + index) % 2 :: 2]):
                yield LayoutTask(
                    name=f"{index}: {layout} {stack.layers}x{stack.width}",
                    round=index,
                    stack=stack,
                    layout=f"{layout} micro_batch={_STACK_BATCH}",
                    target_s=self.budget.repetition_s,
                    traced=index == 0 and layout == "dp=1",
                )

    def _sizes(self, collective: str) -> tuple[int, ...]:
        """Of one collective; what a contract promises is an all-reduce of a gigabyte between GPUs."""
        is_promised = self.device_kind == "cuda" and collective == "all_reduce"
        return (*self.budget.collective_sizes, *((GIB,) if is_promised else ()))

    def _overlaps(self, index: int) -> Iterable[Task]:
        # Between GPUs a smaller one ends with the first product beside it.
        sizes = (4 * MIB, 16 * MIB) if self.device_kind == "cpu" else (32 * MIB, 128 * MIB)
        for world_size in self.world_sizes:
            for size_bytes in sizes if world_size > 1 else ():
                yield OverlapTask(
                    name=f"{index}: overlap n={world_size} {size_bytes}",
                    round=index,
                    world_size=world_size,
                    size_bytes=size_bytes,
                    target_s=self.budget.repetition_s,
                )


#: Ranks that can share the layers and the heads of every stack: these, and what divides them.
_STACK_PARTS: Final = 8
#: Layers that hardly compute, layers of many parameters, and layers of large activations.
_STACKS: Final = (
    StackSpec(layers=_STACK_PARTS, width=64, tokens=16, head=64 // _STACK_PARTS),
    StackSpec(layers=_STACK_PARTS, width=384),
    StackSpec(layers=_STACK_PARTS, width=256, tokens=64, head=256 // _STACK_PARTS),
)
_STACK_BATCH: Final = 4
_LAYOUTS: Final = ("fsdp={n}", "dp={n} zero=1", "tp={n}", "pp={n} accumulation={twice}")
_COLLECTIVES: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv")


def _divides_models() -> bool:
    """Whether the installed torch runs FSDP2 and pipelines on every kind of device, as it does since 2.6."""
    numbers = (installed_version("torch") or "").split(".")[:2]
    return len(numbers) < 2 or tuple(map(int, numbers)) >= (2, 6)


def _interleave(steps: Sequence[Task], others: Sequence[Task]) -> tuple[Task, ...]:
    """Spread the second list evenly over the first, so that both see the same drift."""
    positions = [
        *((index / max(len(steps), 1), 0, task) for index, task in enumerate(steps)),
        *((index / max(len(others), 1), 1, task) for index, task in enumerate(others)),
    ]
    return tuple(task for _, _, task in sorted(positions, key=lambda entry: entry[:2]))
