"""Hardware as a person writes it down: clusters as tiers of links, and the catalogue of data sheets."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from perfmodel.documents import Record, Text, checked, read_toml
from perfmodel.errors import InvalidDocument
from perfmodel.machine import DEVICE, Cluster, SlowDevice, SlowLink, Tier, Traffic, chained
from perfmodel.statistics import NonNegative, Share
from perfmodel.units import (
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flop_rate,
    parse_power,
)


def _written(parse: Callable[[str], float], example: str) -> BeforeValidator:
    """A quantity as text with its unit; a bare number has none and is refused."""

    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise ValueError(f"must be text with a unit, such as {example}")  # noqa: TRY004 - pydantic
        return parse(value)

    return BeforeValidator(read)


_BANDWIDTH: Final = _written(parse_bandwidth, "400Gb/s")


class TierEntry(Record):
    """One tier, as ``Tier``; rates are of one link, each way."""

    name: Text
    of: Text = DEVICE
    count: PositiveInt
    link_bytes_per_s: Annotated[PositiveFloat, _BANDWIDTH] = Field(alias="bandwidth")
    latency_s: Annotated[NonNegative, _written(parse_duration, "5us")] = Field(alias="latency")
    links: PositiveInt = 1
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    in_switch_reduction: Share = 0.0
    source: Text


class Override(Record):
    """A what-if: one slow device, or the slow links of one member of a tier."""

    device: Annotated[int, Field(ge=0)] | None = None
    """Counted from 0; it takes ``factor`` (>= 1) times as long to compute."""
    tier: Text | None = None
    member: Annotated[int, Field(ge=0)] | None = None
    """Counted over the cluster; its links carry ``factor`` (<= 1) of their rate."""
    factor: PositiveFloat

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        given = (self.device is not None, self.tier is not None, self.member is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise ValueError("an override must name a device, or a tier and a member")
        return self


class TrafficEntry(Record):
    """What else a tier carries: a steady stream on the links of every member, or jobs like the predicted one."""

    tier: Text
    bandwidth: Annotated[float, _BANDWIDTH] | None = None
    jobs: PositiveInt | None = None

    @model_validator(mode="after")
    def _says_one(self) -> Self:
        if (self.bandwidth is None) == (self.jobs is None):
            raise ValueError("traffic must give a bandwidth or a number of jobs")
        return self


class ClusterFile(Record):
    """A cluster as it is written."""

    schema_version: Literal[1]
    name: Text
    devices: PositiveInt
    """Of all tiers together: a check of their counts."""
    tier: Annotated[tuple[TierEntry, ...], Field(min_length=1)]
    override: tuple[Override, ...] = ()
    traffic: tuple[TrafficEntry, ...] = ()

    def cluster(self) -> Cluster:
        """The cluster it describes; ``ValueError`` if it does not add up."""
        tiers = chained(Tier(**entry.model_dump()) for entry in self.tier)
        found = Cluster(
            name=self.name,
            tiers=tiers,
            slow_links=tuple(
                SlowLink(tier=o.tier, member=o.member, factor=o.factor)
                for o in self.override
                if o.tier is not None and o.member is not None
            ),
            slow_devices=tuple(
                SlowDevice(device=o.device, factor=o.factor)
                for o in self.override
                if o.device is not None
            ),
            traffic=tuple(
                Traffic(tier=t.tier, bytes_per_s=t.bandwidth or 0.0, jobs=t.jobs or 0)
                for t in self.traffic
            ),
        )
        if found.num_devices != self.devices:
            counts = " x ".join(str(tier.count) for tier in tiers)
            raise ValueError(
                f"devices must be the product of all counts ({counts} = {found.num_devices}), "
                f"got {self.devices}"
            )
        return found


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file in TOML; ``InvalidDocument`` if it breaks a rule or does not add up."""
    file = checked(read_toml(path, what="cluster file"), ClusterFile, where=path)
    try:
        return file.cluster()
    except ValueError as error:
        raise InvalidDocument(f"{path}: {error}; correct the file") from error


def cluster_text(cluster: Cluster, *, comments: tuple[str, ...] = ()) -> str:
    """TOML that ``read_cluster`` reads back; for importers."""

    def table(**values: object) -> list[str]:
        # JSON's text and numbers are also TOML's
        return [f"{key} = {json.dumps(value)}" for key, value in values.items()]

    lines = [f"# {comment}" for comment in comments]
    lines += table(schema_version=1, name=cluster.name, devices=cluster.num_devices)
    for tier in cluster.tiers:
        lines += ["", "[[tier]]"]
        lines += table(
            name=tier.name,
            of=tier.of,
            count=tier.count,
            bandwidth=f"{tier.link_bytes_per_s / 1e9:.6g}GB/s",
            latency=f"{tier.latency_s * 1e6:.6g}us",
            links=tier.links,
            oversubscription=tier.oversubscription,
            in_switch_reduction=tier.in_switch_reduction,
            source=tier.source,
        )
    return "\n".join(lines) + "\n"


Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]


class Source(Record):
    """Where figures were read."""

    title: str
    where: str
    """Address, or repository and path."""
    date: str
    """When it was written or stored, or "not stated"."""


class Figure(Record):
    """One value of a data sheet; the key names its source."""

    source: str


class Size(Figure):
    """Memory."""

    size_bytes: Annotated[PositiveInt, _written(parse_bytes, "80GB")] = Field(alias="value")


class Rate(Figure):
    """Bytes per second, links in one direction."""

    bytes_per_s: Annotated[PositiveFloat, _BANDWIDTH] = Field(alias="value")


class Peak(Figure):
    """Arithmetic."""

    flop_per_s: Annotated[PositiveFloat, _written(parse_flop_rate, "989TFLOP/s")] = Field(
        alias="value"
    )


class Power(Figure):
    """Power limit."""

    power_w: Annotated[PositiveFloat, _written(parse_power, "700W")] = Field(alias="value")


class Pcie(Figure):
    """Connection to the host, 16 lanes."""

    generation: PositiveInt


class DataSheet(Record):
    """One device; what no usable source gives is absent."""

    id: str
    name: str
    vendor: str
    kind: Literal["cuda", "other"]
    """Whether PyTorch calls it a CUDA device (ROCm does too)."""
    architecture: str
    form: str
    reported: tuple[str, ...] = ()
    """Names by which drivers and PyTorch report it."""
    aliases: tuple[str, ...] = ()
    launched: str | None = None
    memory: Size
    bandwidth: Rate | None = None
    peaks: dict[Precision, Peak]
    """Dense, by the type of the factors."""
    achieved: Peak | None = None
    """Fastest matrix product in bf16 that somebody measured."""
    link: Rate | None = None
    """Between devices of a node, all links of one device together, one direction."""
    link_name: str | None = None
    link_joins_pairs: bool = False
    """Whether a bridge joins two devices, instead of a switch or mesh all of a node."""
    pcie: Pcie | None = None
    power: Power | None = None
    note: str = ""

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure by its name, in the order of the file."""
        for name in ("memory", "bandwidth", "peaks", "achieved", "link", "pcie", "power"):
            if name == "peaks":
                yield from ((f"peak {precision}", peak) for precision, peak in self.peaks.items())
            elif (figure := getattr(self, name)) is not None:
                yield name, figure


class LinkSheet(Record):
    """One kind of link."""

    id: str
    name: str
    per: Literal["device", "port", "node"]
    """Whose rate it is."""
    rate: Rate
    note: str = ""


class Catalogue(Record):
    """Devices and links."""

    schema_version: Literal[1]
    sources: dict[str, Source]
    devices: tuple[DataSheet, ...]
    links: tuple[LinkSheet, ...]

    @model_validator(mode="after")
    def _names_mean_one_thing(self) -> Self:
        """Sources exist, and no name belongs to two devices."""
        figures = [(s.id, name, f) for s in self.devices for name, f in s.figures()]
        for key, name, figure in (*figures, *((k.id, "rate", k.rate) for k in self.links)):
            if figure.source not in self.sources:
                raise ValueError(f"{key}.{name}: source must be listed, got {figure.source!r}")
        names = [plain(link.id) for link in self.links]
        for sheet in self.devices:
            own = {plain(n) for n in (sheet.id, sheet.name, *sheet.reported, *sheet.aliases)}
            twice = own.intersection(names)
            if twice:
                raise ValueError(f"{sheet.id}: {min(twice)} must name one device, got two")
            names += own
        return self


def plain(name: str) -> str:
    """A device's name without case, blanks and hyphens."""
    return "".join(character for character in name.casefold() if character not in " -_()")


def read_catalogue(path: Path) -> Catalogue:
    """Read a catalogue in TOML; ``InvalidDocument`` if a figure lacks its unit or source, or names clash."""
    return checked(read_toml(path, what="catalogue"), Catalogue, where=path)
