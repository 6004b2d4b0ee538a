"""A cluster as a person writes it down: tiers with their sources, overrides, other traffic."""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from perfmodel.documents.base import Record, Share, Text, checked, read_toml
from perfmodel.errors import InvalidDocument
from perfmodel.topology.cluster import (
    DEVICE,
    Cluster,
    SlowDevice,
    SlowLink,
    Tier,
    Traffic,
    chained,
)
from perfmodel.units import parse_bandwidth, parse_duration

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
