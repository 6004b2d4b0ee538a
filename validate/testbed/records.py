"""Records of the testbed: what runs on which links, and what was seen."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)

from perfmodel.documents import Record, read_lines
from perfmodel.files import append_line, trim_unfinished_line


class Fabric(Record):
    """Nodes with one rank each, on one switch."""

    num_ranks: PositiveInt
    bytes_per_s: PositiveFloat
    """Rate at which each node may send. [B/s]"""


class EmulatedLayer(Record):
    """A layer that takes time on an emulated device and has a gradient of true size."""

    num_elements: PositiveInt
    """Of four bytes each."""
    forward_s: PositiveFloat
    backward_s: PositiveFloat


class EmulatedModel(Record):
    """Layers in forward order."""

    name: str
    layers: Annotated[tuple[EmulatedLayer, ...], Field(min_length=1)]
    optimizer_s: NonNegativeFloat = 0.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return 4 * sum(layer.num_elements for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Forward and backward of one micro-step. [s]"""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


class TrainingSetting(Record):
    """One DistributedDataParallel run on emulated devices."""

    kind: Literal["training"] = "training"
    name: str
    family: str
    """What the setting is there for: to fit steps, their cost to the machine, or to judge."""
    model: EmulatedModel
    fabric: Fabric
    accumulation: PositiveInt = 1
    bucket_cap_mb: PositiveFloat | None = None
    num_steps: PositiveInt = 10


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"
]


class CollectiveSetting(Record):
    """Collectives of one kind and several sizes, one at a time on idle links."""

    kind: Literal["collective"] = "collective"
    name: str
    collective: CollectiveKind = "all_reduce"
    family: str = "collective"
    fabric: Fabric
    sizes_bytes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Of the whole array, as nccl-tests counts it."""
    repeats: PositiveInt = 8
    """At most, where ``target_s`` is given."""
    target_s: PositiveFloat | None = None
    """Repeat each size for about so long, three times at least; None: ``repeats`` times. [s]"""
    pause_s: NonNegativeFloat = 0.03
    """Before each collective: makes links idle and their burst full; 0 keeps the group warm. [s]"""
    warm_up_bytes: NonNegativeInt = 0
    """Of each size, unrecorded, before it is timed: what shaped links let through at once is used up."""
    keep_awake: bool = False
    """Let idle work fill the cores: a core that has dozed off wakes late, a busy one does not."""
    copies: PositiveInt = 1
    """Groups that do the same at the same time on the same nodes: many saturate the machine."""


class Job(Record):
    """What the process that plays the cluster is asked for."""

    setting: Annotated[TrainingSetting | CollectiveSetting, Field(discriminator="kind")]
    limit_s: PositiveFloat


class HostUse(Record):
    """What the machine that plays the cluster had to do during the timed part."""

    window_s: PositiveFloat
    own_cpu_s: NonNegativeFloat
    """CPU time of all ranks. [s]"""
    foreign_cpu_s: NonNegativeFloat
    """CPU time of everything else on the machine. [s]"""
    steal_cpu_s: NonNegativeFloat = 0.0
    """What the hypervisor gave to other guests while cores here had work; 0 in earlier runs. [s]"""
    num_cores: PositiveInt
    is_realtime: bool
    """Whether the ranks ran before everything else (``SCHED_RR``)."""

    @property
    def own_share(self) -> float:
        """CPU time of the ranks over what the cores could give."""
        return self.own_cpu_s / (self.window_s * self.num_cores)

    @property
    def steal_share(self) -> float:
        """Time that other guests took, over what the cores could give."""
        return self.steal_cpu_s / (self.window_s * self.num_cores)


class _Run(Record):
    started_utc: float
    host: HostUse
    attempts: PositiveInt = 1
    """Runs until other guests left the machine alone; the quietest is kept."""


class TrainingRun(_Run):
    """What one training setting did."""

    kind: Literal["training"] = "training"
    setting: TrainingSetting
    step_s: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """From the end of one step of the last rank to the end of the next. [s]"""
    link_bytes: dict[str, NonNegativeInt]
    """Sent during the timed steps over each shaped link. [B]"""
    bucket_bytes: tuple[PositiveInt, ...]
    late_mean_s: NonNegativeFloat
    """By how much emulated layers ended after their time. [s]"""
    late_p99_s: NonNegativeFloat


class CollectiveRun(_Run):
    """What the collectives took."""

    kind: Literal["collective"] = "collective"
    setting: CollectiveSetting
    durations_s: tuple[tuple[PositiveFloat, ...], ...]
    """For each size all repeats of the first group: from the last rank's start to the last rank's
    end. [s]"""
    cpu_s: tuple[NonNegativeFloat, ...]
    """CPU time of all ranks of a group per collective, for each size. [s]"""


Run = Annotated[TrainingRun | CollectiveRun, Field(discriminator="kind")]
_RUN: TypeAdapter[Run] = TypeAdapter(Run)


def read_runs(path: Path) -> list[Run]:
    """All complete lines of a file of runs; ``InvalidDocument`` if one breaks the schema."""
    return read_lines(path, _RUN, what="runs") if path.exists() else []


def append_run(path: Path, run: Run) -> None:
    """Add one line, on disk when this returns; first remove what an interruption left of a line."""
    trim_unfinished_line(path)
    append_line(path, run.model_dump_json())
