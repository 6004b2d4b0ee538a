"""What is predicted of a large model under a layout, and the search over layouts."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from perfmodel.documents.base import Document, Provenance, Record, Share
from perfmodel.documents.prediction import Interval


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
    """Parts of a step at the fitted latents, which add up to it before deviations of runs. [s]"""

    compute_s: NonNegativeFloat
    tensor_s: NonNegativeFloat
    pipeline_s: NonNegativeFloat
    data_s: float
    other_s: NonNegativeFloat


class StageMemory(Record):
    """The fullest moment of a rank of one pipeline stage. [B]"""

    stage: NonNegativeInt
    layers: PositiveInt
    parameters_bytes: NonNegativeFloat
    gradients_bytes: NonNegativeFloat
    optimizer_bytes: NonNegativeFloat
    activations_bytes: NonNegativeFloat
    logits_bytes: NonNegativeFloat
    needed_bytes: NonNegativeFloat
    """All tensors, the allocator's slack and the framework's context."""


class LayoutPredictionDocument(Document):
    """One layout: step, throughput, utilisation, memory, doubt."""

    current_version: ClassVar[int] = 2
    title: ClassVar[str] = "prediction of a layout"

    provenance: Provenance
    profile_digest: str
    device_name: str
    evidence: Literal["inferred"]
    trained: TrainedModel
    layout: str
    """In the grammar of ``--layout``, accumulation included."""
    step_s: Interval
    """Median step, with 90 % of runs between p5 and p95. [s]"""
    tokens_per_s: Interval
    """Of all devices. [1/s]"""
    mfu: Interval
    """Model FLOP over the dense peak of the data sheet; attention counted in full, nothing recomputed."""
    parts_s: StepPartsRecord
    simulated_step_s: PositiveFloat
    """The step program in simulated time, at the fitted latents, before deviations of runs. [s]"""
    formula_step_s: PositiveFloat
    """The closed form of the same. [s]"""
    memory: Annotated[tuple[StageMemory, ...], Field(min_length=1)]
    """Every pipeline stage, in order."""
    capacity_bytes: PositiveInt | None
    fit_probability: Share | None
    """That the fullest rank runs within the capacity; None if none was given."""
    caveats: tuple[str, ...]


class LayoutScenario(Record):
    """One layout of a comparison."""

    name: str
    """What was changed, as typed."""
    prediction: LayoutPredictionDocument
    throughput_ratio: Interval | None
    """Tokens per second over those of the first layout; None for the first."""
    probability_faster: Share | None


class LayoutWhatIfDocument(Document):
    """Layouts side by side, the first of which the others are compared with."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "what-if of layouts"

    provenance: Provenance
    scenarios: Annotated[tuple[LayoutScenario, ...], Field(min_length=1)]


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


class ParallelismPlanDocument(Document):
    """Layouts of a model on a cluster, fastest first."""

    current_version: ClassVar[int] = 1
    title: ClassVar[str] = "plan of the parallelism"

    provenance: Provenance
    profile_digest: str
    device_name: str
    evidence: Literal["inferred"]
    trained: TrainedModel
    capacity_bytes: PositiveInt
    num_feasible: NonNegativeInt
    """Layouts that the model and the cluster allow."""
    num_fitting: NonNegativeInt
    """Of these, those whose memory fits with the required probability."""
    ranked: tuple[RankedLayout, ...]
    caveats: tuple[str, ...]
