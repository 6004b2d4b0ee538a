"""A cluster as a person writes it down: tiers with their sources, overrides, other traffic."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from perfmodel.bounds import Share
from perfmodel.documents.base import Record, Text, checked, read_toml
from perfmodel.errors import InvalidDocument
from perfmodel.machine.cluster import DEVICE, Cluster, SlowDevice, SlowLink, Tier, Traffic, chained
from perfmodel.units import (
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flop_rate,
    parse_power,
)

CLUSTER_VERSION: Final = 1


def _bandwidth(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("a bandwidth must be text with a unit, such as 400Gb/s")  # noqa: TRY004 - pydantic
    return parse_bandwidth(value)


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("a latency must be text with a unit, such as 5us")  # noqa: TRY004 - pydantic
    return parse_duration(value)


_Bandwidth = Annotated[float, BeforeValidator(_bandwidth)]
_Duration = Annotated[float, BeforeValidator(_duration)]


class TierEntry(Record):
    """One tier; see ``topology.cluster.Tier``."""

    name: Text
    of: Text = DEVICE
    count: PositiveInt
    bandwidth: Annotated[_Bandwidth, Field(gt=0)]
    """Of one link, each way."""
    latency: Annotated[_Duration, Field(ge=0)]
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
    factor: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        of_link = self.tier is not None and self.member is not None
        of_any = self.tier is not None or self.member is not None
        if of_link == (self.device is not None) or of_link != of_any:
            raise ValueError("an override must name a device, or a tier and a member")
        return self


class TrafficEntry(Record):
    """What else a tier carries; one of the two."""

    tier: Text
    bandwidth: _Bandwidth | None = None
    """A steady stream on the links of every member."""
    jobs: PositiveInt | None = None
    """Jobs like the predicted one on the same links; at most ``topology.cluster.MOST_JOBS``."""

    @model_validator(mode="after")
    def _says_one(self) -> Self:
        if (self.bandwidth is None) == (self.jobs is None):
            raise ValueError("traffic must give a bandwidth or a number of jobs")
        return self


class ClusterFile(Record):
    """The file as it is written."""

    schema_version: Literal[1]
    name: Text
    devices: PositiveInt
    """Of all tiers together: a check of their counts."""
    tier: Annotated[tuple[TierEntry, ...], Field(min_length=1)]
    override: tuple[Override, ...] = ()
    traffic: tuple[TrafficEntry, ...] = ()

    def cluster(self) -> Cluster:
        """The cluster it describes.

        Raises
        ------
        ValueError
            If it does not add up.
        """
        tiers = chained(
            Tier(
                name=entry.name,
                of=entry.of,
                count=entry.count,
                link_bytes_per_s=entry.bandwidth,
                latency_s=entry.latency,
                links=entry.links,
                oversubscription=entry.oversubscription,
                in_switch_reduction=entry.in_switch_reduction,
                source=entry.source,
            )
            for entry in self.tier
        )
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
    """Read a cluster file in TOML.

    Raises
    ------
    InvalidDocument
        If the file cannot be read, a key is unknown or missing, a rate is zero or has no unit, or the
        tiers do not add up.
    """
    file = checked(read_toml(path, what="cluster file"), ClusterFile, where=path)
    try:
        return file.cluster()
    except ValueError as error:
        raise InvalidDocument(f"{path}: {error}; correct the file") from error


def cluster_text(cluster: Cluster, *, comments: tuple[str, ...] = ()) -> str:
    """TOML that ``read_cluster`` reads back; for importers."""
    lines = [f"# {comment}" for comment in comments]
    lines += [
        f"schema_version = {CLUSTER_VERSION}",
        f"name = {_quoted(cluster.name)}",
        f"devices = {cluster.num_devices}",
    ]
    for tier in cluster.tiers:
        lines += [
            "",
            "[[tier]]",
            f"name = {_quoted(tier.name)}",
            f"of = {_quoted(tier.of)}",
            f"count = {tier.count}",
            f"bandwidth = {_quoted(f'{tier.link_bytes_per_s / 1e9:.6g}GB/s')}",
            f"latency = {_quoted(f'{tier.latency_s * 1e6:.6g}us')}",
            f"links = {tier.links}",
            f"oversubscription = {tier.oversubscription:.6g}",
            f"in_switch_reduction = {tier.in_switch_reduction:.6g}",
            f"source = {_quoted(tier.source)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are also TOML's."""
    return json.dumps(text)


Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]


def _written(parse: Callable[[str], float]) -> BeforeValidator:
    """A quantity as text with its unit; a bare number has none and is refused."""

    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise ValueError(f"must be text with a unit, got {value!r}")  # noqa: TRY004 - pydantic
        return parse(value)

    return BeforeValidator(read)


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

    size_bytes: Annotated[PositiveInt, _written(parse_bytes)] = Field(alias="value")


class Rate(Figure):
    """Bytes per second, links in one direction."""

    bytes_per_s: Annotated[PositiveFloat, _written(parse_bandwidth)] = Field(alias="value")


class Peak(Figure):
    """Arithmetic."""

    flop_per_s: Annotated[PositiveFloat, _written(parse_flop_rate)] = Field(alias="value")


class Power(Figure):
    """Power limit."""

    power_w: Annotated[PositiveFloat, _written(parse_power)] = Field(alias="value")


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
        for name in ("memory", "bandwidth"):
            yield from self._present(name)
        for precision, peak in self.peaks.items():
            yield f"peak {precision}", peak
        for name in ("achieved", "link", "pcie", "power"):
            yield from self._present(name)

    def _present(self, name: str) -> Iterator[tuple[str, Figure]]:
        figure = getattr(self, name)
        if figure is not None:
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

    current_version: ClassVar[int] = 1

    schema_version: Literal[1]
    sources: dict[str, Source]
    devices: tuple[DataSheet, ...]
    links: tuple[LinkSheet, ...]

    @model_validator(mode="after")
    def _names_mean_one_thing(self) -> Self:
        """Sources exist, and no name belongs to two devices."""
        for sheet in self.devices:
            for name, figure in sheet.figures():
                self._refuse_unknown(f"{sheet.id}.{name}", figure)
        for link in self.links:
            self._refuse_unknown(f"{link.id}.rate", link.rate)
        names = [plain(link.id) for link in self.links]
        for sheet in self.devices:
            own = {plain(n) for n in (sheet.id, sheet.name, *sheet.reported, *sheet.aliases)}
            twice = own.intersection(names)
            if twice:
                raise ValueError(f"{sheet.id}: {min(twice)} must name one device, got two")
            names += own
        return self

    def _refuse_unknown(self, where: str, figure: Figure) -> None:
        if figure.source not in self.sources:
            raise ValueError(f"{where}: source must be listed, got {figure.source!r}")


def plain(name: str) -> str:
    """A device's name without case, blanks and hyphens."""
    return "".join(character for character in name.casefold() if character not in " -_()")


def read_catalogue(path: Path) -> Catalogue:
    """Read a catalogue in TOML.

    Raises
    ------
    InvalidDocument
        If the file cannot be read, a figure lacks its unit or source, a key is unknown, or two devices
        share a name.
    """
    return checked(read_toml(path, what="catalogue"), Catalogue, where=path)
