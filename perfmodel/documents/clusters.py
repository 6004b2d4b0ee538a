"""Clusters: a file of tiers, or tiers in words such as ``"8 nvlink3, 8 eth-100 x4"``."""

import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from perfmodel.documents import Record, Text, checked, read_toml
from perfmodel.documents.hardware import BANDWIDTH, LINK_SHARE, shipped_catalogue, written
from perfmodel.errors import InvalidDocument, UsageError, did_you_mean
from perfmodel.machine import DEVICE, NODE, Cluster, Tier, chained
from perfmodel.statistics import NonNegative, Share
from perfmodel.units import parse_bandwidth, parse_duration


class TierEntry(Record):
    """One tier, as ``Tier``; rates are of one link, each way."""

    name: Text
    of: Text = DEVICE
    count: PositiveInt
    link_bytes_per_s: Annotated[PositiveFloat, BANDWIDTH] = Field(alias="bandwidth")
    latency_s: Annotated[NonNegative, written(parse_duration, "5us")] = Field(alias="latency")
    links: PositiveInt = 1
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    in_switch_reduction: Share = 0.0
    source: Text


class ClusterFile(Record):
    """A cluster as it is written."""

    schema_version: Literal[1]
    name: Text
    devices: PositiveInt
    """Of all tiers together: a check of their counts."""
    tier: Annotated[tuple[TierEntry, ...], Field(min_length=1)]


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file in TOML; ``InvalidDocument`` if it breaks a rule or does not add up."""
    file = checked(read_toml(path, what="cluster file"), ClusterFile, where=path)
    try:
        tiers = chained(Tier(**entry.model_dump()) for entry in file.tier)
        found = Cluster(name=file.name, tiers=tiers)
    except ValueError as error:
        raise InvalidDocument(f"{path}: {error}; correct the file") from error
    if found.num_devices != file.devices:
        counts = " x ".join(str(tier.count) for tier in tiers)
        raise InvalidDocument(
            f"{path}: devices must be the product of all counts ({counts} = {found.num_devices}), "
            f"got {file.devices}; correct the file"
        )
    return found


#: PCIe 4.0 x16 as copies reach it. [B/s]
PCIE_BYTES_PER_S: Final = 27e9
#: Steps of NCCL's simple protocol over NVLink, PCIe and the network (src/graph/tuning.cc). [s]
NVLINK_S: Final = 3.4e-6
PCIE_S: Final = 5.7e-6
NETWORK_S: Final = 14e-6
#: Members, the link of each, and how many of them: ``8 eth-100 x4``.
_TIER: Final = re.compile(r"(?P<count>[0-9]{1,7}) +(?P<link>[^\s,]+)(?: +x(?P<links>[0-9]{1,3}))?")
_MOST_TIERS: Final = 3
#: Stands for the links between nodes that were measured.
MEASURED: Final = "measured"
#: First letters of a link's name tell what it crosses.
_LATENCY_S: Final = {"nvlink": NVLINK_S, "xgmi": NVLINK_S, "pcie": PCIE_S}


def open_cluster(
    named: str | PathLike[str], *, folder: Path = Path(), measured: Tier | None = None
) -> Cluster:
    """The cluster of a file, or of tiers in words, from the inside out.

    A link is one of ``perfmodel devices --links``, at the share of its data sheet that collectives reach, or
    a rate, taken as it is. Latencies are those of NCCL's tuner for that kind of link. Names of files start at
    ``folder``.

    ``measured``: Links between nodes of the calibrated machine, which ``measured`` names: ``"4 nvlink3, 8 measured"``.

    Raises ``InvalidDocument`` if the file breaks a rule; ``UsageError`` if it is none and no links by name.
    """
    path, words = folder / named, [part.strip() for part in str(named).split(",")]
    matches = [match for match in map(_TIER.fullmatch, words) if match]
    if path.exists() or (len(matches) < len(words) and path.suffix == ".toml"):
        return read_cluster(path)
    if len(matches) < len(words):
        raise UsageError(
            f"--cluster: must be a file, or links by name such as '8 nvlink3, 8 eth-100', got {str(named)!r}"
        )
    if len(matches) > _MOST_TIERS:
        raise UsageError(
            f"--cluster: must have at most {_MOST_TIERS} tiers, got {len(matches)}; write a cluster file"
        )
    tiers: list[Tier] = []
    for match, name in zip(matches, (NODE, "fabric", "spine"), strict=False):
        reached_s = sum(tier.latency_s for tier in tiers)
        kinds = (s for kind, s in _LATENCY_S.items() if match["link"].startswith(kind))
        latency_s = next(kinds, NETWORK_S)
        is_measured = match["link"] == MEASURED
        if is_measured:
            link = _measured(measured, is_between_nodes=len(tiers) == 1)
            rate, latency_s, source = link.link_bytes_per_s, link.latency_s, link.source
        else:
            rate, source = _rate(match["link"])
        tiers.append(
            Tier(
                name=name,
                of=tiers[-1].name if tiers else DEVICE,
                count=_at_least_one(match["count"], words),
                links=_at_least_one(match["links"] or "1", words),
                link_bytes_per_s=rate,
                latency_s=max(0.0, latency_s - reached_s),
                source=source,
                as_measured=is_measured,
            )
        )
    return Cluster(name=", ".join(words), tiers=tuple(tiers))


def _measured(known: Tier | None, *, is_between_nodes: bool) -> Tier:
    if not is_between_nodes:
        raise UsageError(
            f"--cluster: {MEASURED!r} must be the second tier, the links between nodes, as in "
            "'4 nvlink3, 8 measured'; name a link or a rate for the others"
        )
    if known is None:
        raise UsageError(
            f"--cluster: {MEASURED!r} must come with a profile of several nodes, in which one rank of each "
            "was measured; name a link or a rate"
        )
    return known


def _at_least_one(text: str, words: list[str]) -> int:
    if int(text) < 1:
        raise UsageError(f"--cluster: counts must be at least 1, got {', '.join(words)!r}")
    return int(text)


def _rate(link: str) -> tuple[float, str]:
    """Bytes per second of a link by its name or rate, and where they are from."""
    known = {each.id: each for each in shipped_catalogue().links}
    if link in known:
        rate = LINK_SHARE * known[link].rate.bytes_per_s
        return rate, f"{LINK_SHARE:.0%} of {known[link].name}"
    try:
        return parse_bandwidth(link), "given"
    except ValueError as error:
        raise UsageError(
            f"--cluster: must be a file, or tiers such as '8 nvlink3, 8 eth-100' with links of perfmodel devices "
            f"--links or rates such as 100Gb/s, got {link!r}{did_you_mean(link, known)}"
        ) from error
