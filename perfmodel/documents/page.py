"""What the what-if page asks and what it is answered; limits stand here, because anybody may ask."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from perfmodel.documents import Record
from perfmodel.documents.prediction import Contrast
from perfmodel.layout import MOST_BATCH
from perfmodel.machine import Evidence
from perfmodel.statistics import Interval, Share

_Text = Annotated[str, Field(min_length=1, max_length=200)]
_Value = Annotated[str, Field(min_length=1, max_length=40)]
_Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]


class LoggedSpeed(Record):
    """What a training of the same setting logged, of all devices."""

    value: Annotated[float, Field(gt=0, le=1e12)]
    unit: Literal["ms", "s", "samples/s", "tokens/s"]


class PageQuestion(Record):
    """A workload under a layout on a machine of the page."""

    profile: _Text
    """Name on the page, never a path."""
    workload: _Text
    """The same; on a machine inferred from runs a transformer."""
    layout: _Text
    """In the grammar of ``--layout``; on a calibrated machine ``dp=DEVICES``."""
    scaling: Literal["weak", "strong"] = "weak"
    """On a calibrated machine."""
    batch: _Batch | None = None
    """Weak: of each device; strong, or on a machine inferred from runs: of all devices."""
    changes: Annotated[dict[_Text, _Value], Field(max_length=16)] = Field(default_factory=dict)
    """Fields of ``perfmodel whatif --set`` on a calibrated machine, values as typed there."""
    cluster: _Text | None = None
    """Name on the page, never a path; None: as the machine has it."""
    capacity_bytes: Annotated[int, Field(ge=1, le=2**60)] | None = None
    """Memory of one device. [B]"""
    logged: LoggedSpeed | None = None


class CurvePoint(Record):
    """One device count of the curve."""

    devices: PositiveInt
    value: Interval
    """Speed-up, or tokens per second of a layout."""
    ideal: PositiveFloat
    """If nothing were lost."""


class MemoryAnswer(Record):
    """Memory of the fullest device at the highest moment of a step."""

    parts_bytes: dict[str, NonNegativeFloat]
    needed_bytes: PositiveFloat
    capacity_bytes: PositiveInt
    fit_probability: Share
    verdict: str


class LikelyCause(Record):
    """Why a logged step is not what was predicted."""

    name: str
    means: str
    odds: Share


class PageDiagnosis(Record):
    """A logged speed beside the prediction."""

    logged_s: PositiveFloat
    """The step that was logged. [s]"""
    verdict: str
    """Normal, slower or faster than the predicted interval."""
    share_slower: Share
    """Of the predicted outcomes, those that take longer."""
    causes: tuple[LikelyCause, ...]
    """By data sheets, likeliest first; none for a normal step, or a device without a data sheet."""
    next_name: str
    """What to measure next; may be empty."""
    command: str
    """What says more."""


class PageDetail(Record):
    """What the page shows a moment after the answer: it takes longer."""

    curve: tuple[CurvePoint, ...]
    diagnosis: PageDiagnosis | None


class PageAnswer(Record):
    """What the page shows for one question at once."""

    setting: str
    """What was predicted, in words."""
    step_s: Interval
    throughput: Interval
    throughput_unit: Literal["samples/s", "tokens/s"]
    speedup: Interval | None
    """None for a layout: a large model does not run on one device."""
    efficiency: Interval
    """Scaling efficiency, or MFU of a layout."""
    efficiency_name: Literal["scaling efficiency", "MFU"]
    exposed_comm_s: Interval | None
    straggler_s: NonNegativeFloat | None
    contrast: Contrast | None
    """Against the same question on the machine as measured; None if nothing was changed."""
    breakdown_s: dict[str, float]
    evidence: dict[str, Evidence]
    memory: MemoryAnswer | None
    no_memory: str
    """Why memory is not known; empty if it is."""
    command: str
    """What prints the same numbers on the command line."""
    caveats: tuple[str, ...]


class CatalogueEntry(Record):
    """A workload of a profile with what its sliders can reach."""

    name: str
    batches: tuple[PositiveInt, ...] = ()
    """Micro-batches that were measured or traced; the middle one is where the page starts."""
    refused: dict[str, str] = Field(default_factory=dict)
    """Precision to the reason why it cannot be chosen."""
    no_devices: str = ""
    """Why no other device can be chosen; empty if one can."""
    precision: str = ""
    """In which it was traced; empty if it can be chosen."""
    layers: PositiveInt | None = None
    """Of a transformer: pipeline stages divide them."""
    heads: PositiveInt | None = None


class CatalogueTier(Record):
    """A tier of a cluster, whose links can be changed."""

    name: str
    bytes_per_s: PositiveFloat
    """Of one link, as the cluster has it. [B/s]"""


class CatalogueCluster(Record):
    """Where devices can stand: a cluster file, or the nodes of a machine."""

    name: str
    devices: PositiveInt
    tiers: tuple[CatalogueTier, ...]
    """From the inside out."""


class CatalogueProfile(Record):
    """A machine that the page can ask about."""

    name: str
    kind: Literal["calibrated", "inferred"]
    device: str
    bandwidth_bytes_per_s: PositiveFloat | None = None
    """Of the measured ring; None if one rank was measured, or links were inferred. [B/s]"""
    latency_s: PositiveFloat | None = None
    measured_devices: PositiveInt | None = None
    """Most devices that trained together; None if that is not known."""
    nodes: CatalogueCluster | None = None
    """Its node among others, where the machine knows them."""
    memory_bytes: PositiveInt | None = None
    """Of a device by its data sheet; None without one. [B]"""
    workloads: tuple[CatalogueEntry, ...]


class CatalogueLink(Record):
    """A link of the catalogue that can stand for the measured one."""

    id: str
    bytes_per_s: PositiveFloat
    """What a large all-reduce is assumed to reach. [B/s]"""


class CatalogueDevice(Record):
    """A device that need not be present."""

    id: str
    name: str
    memory_bytes: PositiveInt


class Catalogue(Record):
    """What can be chosen on a page."""

    version: str
    profiles: Annotated[tuple[CatalogueProfile, ...], Field(min_length=1)]
    clusters: tuple[CatalogueCluster, ...] = ()
    links: tuple[CatalogueLink, ...] = ()
    devices: tuple[CatalogueDevice, ...] = ()
