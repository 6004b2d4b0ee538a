"""One unit of measuring: small enough that an interruption loses seconds."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from perfmodel.documents.base import Document, Record
from perfmodel.parallelism.strategy import Setting


class TraceTask(Record):
    """Trace a reference model."""

    kind: Literal["trace"] = "trace"
    name: str
    round: int
    workload: str


class StepTask(Record):
    """Run one setting for a while."""

    kind: Literal["step"] = "step"
    name: str
    round: int
    setting: Setting
    target_s: float


class CollectiveTask(Record):
    """Repeat one collective."""

    kind: Literal["collective"] = "collective"
    name: str
    round: int
    collective: str
    world_size: int
    size_bytes: int
    target_s: float


class ComputeTask(Record):
    """Repeat one kernel on one rank."""

    kind: Literal["compute"] = "compute"
    name: str
    round: int
    probe: str
    dtype: str
    shape: tuple[int, ...]
    target_s: float


class OverlapTask(Record):
    """Run compute and an all-reduce alone, then together."""

    kind: Literal["overlap"] = "overlap"
    name: str
    round: int
    world_size: int
    size_bytes: int
    target_s: float


Task = Annotated[
    TraceTask | StepTask | CollectiveTask | ComputeTask | OverlapTask, Field(discriminator="kind")
]
TASKS: TypeAdapter[list[Task]] = TypeAdapter(list[Task])


class WorkOrder(Document):
    """What one launch of the worker measures, in order."""

    title = "work order"

    device_kind: Literal["cpu", "cuda"]
    output: str
    """File that rank 0 appends observations to."""
    tasks: tuple[Task, ...]

    @property
    def world_sizes(self) -> frozenset[int]:
        """How many ranks take part in its tasks."""
        return frozenset(
            task.setting.world_size if isinstance(task, StepTask) else task.world_size
            for task in self.tasks
            if isinstance(task, StepTask | CollectiveTask | OverlapTask)
        )
