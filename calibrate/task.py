"""One unit of measuring: small enough that an interruption loses seconds."""

from typing import Annotated, Literal

from pydantic import Field

from calibrate.layers import Layer
from perfmodel.documents import Document, Record
from perfmodel.documents.observation import FailedObservation, StackSpec
from perfmodel.layout import RunSetting, Synchronisation, parse_layout


class _Task(Record):
    name: str
    round: int


class TraceTask(_Task):
    """Trace a reference model."""

    kind: Literal["trace"] = "trace"
    workload: str


class ReplayTask(_Task):
    """Repeat a traced step operator by operator; train the model itself first, if its code is at hand."""

    kind: Literal["replay"] = "replay"
    workload: str
    micro_batch: int
    document: str | None = None
    """File of the traced workload; ``None``: the worker traces the reference model of that name."""
    code: str | None = None
    """What it was traced from, such as FILE.py:FACTORY."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """On several ranks the model alone trains, under DistributedDataParallel."""
    target_s: float


class LayersTask(_Task):
    """Time the operators of single layers in a row."""

    kind: Literal["layers"] = "layers"
    layers: tuple[Layer, ...]


class ModelTask(_Task):
    """Time the operators of a model drawn at random, inside its step."""

    kind: Literal["model"] = "model"
    seed: int
    index: int
    target_s: float


class StepTask(_Task):
    """Run one setting for a while."""

    kind: Literal["step"] = "step"
    setting: RunSetting
    random_model: tuple[int, int] | None = None
    """Seed and index of a model that a judge draws; ``None``: the workload names a reference model."""
    target_s: float
    min_steps: Annotated[int, Field(ge=1)] = 4
    """However long they take."""


class CollectiveTask(_Task):
    """Repeat one collective."""

    kind: Literal["collective"] = "collective"
    collective: str
    world_size: int
    size_bytes: int
    stride: int = 1
    """How far its ranks are apart in the numbering of all: those of a node for one rank on each."""
    target_s: float


class ComputeTask(_Task):
    """Repeat one kernel on one rank."""

    kind: Literal["compute"] = "compute"
    probe: str
    dtype: str
    shape: tuple[int, ...]
    target_s: float


class OverlapTask(_Task):
    """Run compute and an all-reduce alone, then together."""

    kind: Literal["overlap"] = "overlap"
    world_size: int
    size_bytes: int
    target_s: float


class LayoutTask(_Task):
    """Train a stack of layers under a layout for a while."""

    kind: Literal["layout"] = "layout"
    stack: StackSpec
    layout: str
    """In the grammar of layouts, the micro-batch in it."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    target_s: float
    traced: bool = False
    """Whether the stack is traced as well."""

    @property
    def world_size(self) -> int:
        """Ranks that it takes."""
        return parse_layout(self.layout).world_size


Task = Annotated[
    TraceTask
    | StepTask
    | CollectiveTask
    | ComputeTask
    | OverlapTask
    | ReplayTask
    | LayersTask
    | ModelTask
    | LayoutTask,
    Field(discriminator="kind"),
]


def num_ranks(task: Task) -> int:
    """How many ranks a task takes, those between its own among them."""
    match task:
        case StepTask():
            return task.setting.world_size
        case CollectiveTask():
            return (task.world_size - 1) * task.stride + 1
        case OverlapTask() | LayoutTask() | ReplayTask():
            return task.world_size
        case _:
            return 1


def setting_of(task: Task) -> RunSetting:
    """What a task runs, or a setting that stands for it in a record of its failure."""
    if isinstance(task, StepTask):
        return task.setting
    size, micro_batch = num_ranks(task), 1
    # Without the number of its round; one name for all models that are drawn.
    name = task.name.partition(": ")[2] or task.name
    if isinstance(task, ReplayTask):
        name, micro_batch = task.workload, task.micro_batch
    elif isinstance(task, ModelTask):
        name = "a model drawn at random"
    return RunSetting(
        workload=name,
        world_size=size,
        micro_batch=micro_batch,
        synchronisation=Synchronisation.NONE if size == 1 else Synchronisation.DDP,
    )


def failure_of(task: Task, reason: str) -> FailedObservation:
    """The record of a task that failed."""
    return FailedObservation(
        task=task.name, round=task.round, setting=setting_of(task), reason=reason
    )


class WorkOrder(Document):
    """What one launch of the worker measures, in order."""

    title = "work order"

    device_kind: Literal["cpu", "cuda", "virtual"]
    truth: str | None = None
    """Costs of a virtual device, by name or as a file."""
    output: str
    """File that rank 0 appends observations to."""
    tasks: tuple[Task, ...]

    @property
    def world_sizes(self) -> frozenset[int]:
        """Groups of the first ranks that its tasks need; ranks that stand apart form their own."""
        return frozenset(
            num_ranks(task)
            for task in self.tasks
            if not isinstance(task, CollectiveTask) or task.stride == 1
        )
