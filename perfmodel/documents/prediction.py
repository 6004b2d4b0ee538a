"""The prediction: quantities with intervals, evidence per term, caveats."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from perfmodel.documents import Document, Printed, Provenance, Record, Shown
from perfmodel.layout import RunSetting
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval, Share
from perfmodel.step import Cause


class RankMemory(Record):
    """What one rank of a pipeline stage holds at its highest moment. [B]"""

    stage: NonNegativeInt
    layers: PositiveInt | None = None
    """None where a traced step was divided."""
    parts_bytes: dict[str, NonNegativeFloat]
    needed_bytes: NonNegativeFloat
    """All parts together."""
    spread_bytes: NonNegativeFloat | None = None
    """Standard deviation of the whole; None where only the machine as a whole has one."""


class TrainedModel(Record):
    """What is trained, and where."""

    name: str
    parameters: PositiveFloat
    sequence: PositiveInt
    """Tokens per sequence."""
    devices: PositiveInt
    devices_per_node: PositiveInt
    global_batch: PositiveInt
    """Sequences per optimizer step."""


class StepPartsRecord(Record):
    """Parts of a step at the fitted parameters, which add up to it before deviations of runs. [s]"""

    compute_s: NonNegativeFloat
    tensor_s: NonNegativeFloat
    pipeline_s: NonNegativeFloat
    data_s: float
    other_s: NonNegativeFloat


class LargeModelStep(Record):
    """What is known of a step of a transformer by its shape, on a machine inferred from runs."""

    trained: TrainedModel
    tokens_per_s: Interval
    """Of all devices. [1/s]"""
    mfu: Interval
    """Model FLOP over the dense peak of the data sheet; attention counted in full, nothing recomputed."""
    parts_s: StepPartsRecord
    simulated_step_s: PositiveFloat
    """The step program in simulated time, at the fitted parameters, before deviations of runs. [s]"""
    formula_step_s: PositiveFloat
    """The closed form of the same. [s]"""


class PredictedPoint(Record):
    """One layout."""

    setting: RunSetting
    step_s: Interval
    """Typical step of a run, from the end of one step to the end of the next. [s]"""
    samples_per_s: Interval
    """Global batch over step. [1/s]"""
    speedup: Interval | None = None
    """Throughput over that of one device on its own (no DDP) with the batch that the scaling fixes;
    None for a large model, which does not run on one."""
    scaling_efficiency: Interval | None = None
    """Speed-up over world size."""
    exposed_comm_s: Interval
    """Step minus the same step with communication that costs nothing. [s]"""
    breakdown_s: dict[Cause, float]
    """Time on the critical path by cause; sums to the simulated step. [s]"""
    straggler_s: float
    """Part of the step spent waiting for the slowest rank. [s]"""
    evidence: dict[str, Evidence]
    """Term of the model to where it comes from."""
    bottleneck_link: str | None = None
    """With a cluster: which tier costs most of the largest all-reduce, and why."""
    layout: str = ""
    """In the grammar of ``--layout``, if that was asked."""
    memory: tuple[RankMemory, ...] = ()
    """Of a rank of every pipeline stage, where the layout and the workload's memory are known."""
    capacity_bytes: PositiveInt | None = None
    fit_probability: Share | None = None
    """That the fullest rank runs within the capacity; None if none was given."""
    large_model: LargeModelStep | None = None

    @property
    def weakest_evidence(self) -> Evidence:
        """Of all its terms, if the step was not measured as a whole."""
        return Evidence.of_step(self.evidence)


class MeasuredPoint(Record):
    """A real run of the same workload, for comparison."""

    world_size: PositiveInt
    micro_batch: PositiveInt
    step_s: PositiveFloat
    speedup: PositiveFloat | None


class ScalingAdvice(Record):
    """Where scaling ends, at the largest count that was asked."""

    devices: PositiveInt
    knee_devices: PositiveInt | None
    """From here on every doubling gains less than 1.5x; None if none does."""
    limit: str
    """What costs most at the largest count beyond what one device pays."""
    limit_share: Share
    """Part of the lost time that its removal alone would save."""
    target_efficiency: Share
    bandwidth_factor: PositiveFloat | None
    """Bandwidth over today's that reaches the target; 1: it is reached; None: no bandwidth does."""
    needed_busbw_bytes_per_s: PositiveFloat | None
    """The same as bus bandwidth of the largest all-reduce. [B/s]"""
    measure_devices: tuple[PositiveInt, ...]
    """Counts of devices to measure next, each in a run of its own; empty where none narrows the interval."""
    interval_ratio: Share | None
    """Width of the interval then over that of today, in log; None without such counts."""
    least_ratio: Share | None
    """The same if one and all devices were measured: how runs differ. None where nothing is left."""


class PredictionDocument(Shown, Document):
    """Steps of a workload on numbers of devices, or under one layout."""

    schema_version: int = 5
    title: ClassVar[str] = "prediction"
    made_by: ClassVar[str] = "perfmodel predict --output"

    provenance: Provenance
    profile_digest: str
    validation_digest: str | None = None
    device_name: str
    workload: str
    scaling: Literal["weak", "strong"]
    """Weak: the batch of each rank is fixed; strong: the global batch is."""
    method: str | None = None
    """Precision and optimizer of a step that was traced; None if the loop was measured."""
    cluster: str | None = None
    """Name of the cluster; without it, one ring of links like the measured ones."""
    points: tuple[PredictedPoint, ...]
    measured: tuple[MeasuredPoint, ...] = ()
    scaling_advice: ScalingAdvice | None = None
    """Where several devices were asked."""
    samples: PositiveFloat | None = None
    """Of the whole training, where the time to them was asked."""
    caveats: tuple[str, ...]


class ExtrapolatedPoint(Record):
    """More devices than were measured."""

    devices: PositiveInt
    samples_per_s: Interval
    """Of all devices. [1/s]"""
    efficiency: Interval
    """Samples per second of a device over those of one among the fewest."""


class ExtrapolatedSeries(Record):
    """Runs of a table that differ in nothing but the number of devices."""

    model: str
    machine: str
    precision: str
    batch: PositiveFloat | None
    """Samples of one device in a step."""
    devices_per_node: PositiveInt
    measured: tuple[PositiveInt, ...]
    """Numbers of devices, ascending."""
    points: tuple[ExtrapolatedPoint, ...]


class GrowthDocument(Printed, Document):
    """Samples per second on more devices than a table of runs has."""

    title: ClassVar[str] = "prediction from runs"
    made_by: ClassVar[str] = "perfmodel predict --throughput TABLE --output"

    provenance: Provenance
    table_sha256: str
    series: tuple[ExtrapolatedSeries, ...]
    caveats: tuple[str, ...]


class Contrast(Record):
    """A scenario against the first one, draw by draw."""

    throughput_ratio: Interval
    """Samples per second over those of the first scenario."""
    step_difference_s: Interval
    """Step minus that of the first scenario, whatever their batches. [s]"""
    probability_faster: Share
    """Share of the draws with more samples per second."""


class ScenarioOutcome(Record):
    """What one scenario would do."""

    name: str
    changes: dict[str, str]
    """Field to value, as typed; empty for the question as it was asked."""
    device_name: str
    workload: str
    scaling: Literal["weak", "strong"]
    point: PredictedPoint
    lost_s: dict[str, float] = Field(default_factory=dict)
    """Cause to the time that its removal alone would save, per step of this scenario. [s]"""
    remarks: tuple[str, ...] = ()
    contrast: Contrast | None = None
    """None for the first scenario."""


class WhatIfDocument(Shown, Document):
    """Scenarios, the first of which the others are compared with."""

    schema_version: int = 5
    title: ClassVar[str] = "what-if"
    made_by: ClassVar[str] = "perfmodel whatif --output"

    provenance: Provenance
    scenarios: Annotated[tuple[ScenarioOutcome, ...], Field(min_length=1)]
    caveats: tuple[str, ...]


class RankedLayout(Record):
    """One feasible layout of a search."""

    rank: PositiveInt
    """From 1; layouts that tie share the best rank among them."""
    layout: str
    step_s: Interval
    tokens_per_s: PositiveFloat
    mfu: PositiveFloat
    needed_bytes: PositiveFloat
    """Of the fullest rank. [B]"""
    fit_probability: Share
    slower_probability: Share
    """That it is slower than the first."""
    ties: bool
    """Whether the error bar of its ratio to the first holds 1."""
    parts_s: StepPartsRecord
    loses_in: str
    """The part that differs most from the first; empty for the first."""
    loses_by_s: float
    """How much longer that part is. [s]"""


class TestedLayout(Record):
    """A layout to try before a long run."""

    layout: str
    chance: Share
    """That it or one before it is within 3 % of the fastest, each run once."""


class ParallelismPlanDocument(Shown, Document):
    """Layouts of a model on a cluster, fastest first."""

    schema_version: int = 2
    title: ClassVar[str] = "plan of the parallelism"
    made_by: ClassVar[str] = "perfmodel plan parallelism"

    provenance: Provenance
    profile_digest: str
    device_name: str
    evidence: Evidence
    trained: TrainedModel
    capacity_bytes: PositiveInt
    num_feasible: NonNegativeInt
    """Layouts that the model and the cluster allow."""
    num_fitting: NonNegativeInt
    """Of these, those whose memory fits with the required probability."""
    ranked: tuple[RankedLayout, ...]
    test_first: tuple[TestedLayout, ...] = ()
    """Until 90 % are reached, at most 32."""
    caveats: tuple[str, ...]
