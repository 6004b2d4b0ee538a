"""Hardware: data sheets of devices and links, in one catalogue; clusters of devices.

A cluster is read from a file or from ``"8 nvlink3, 8 eth-100 x4"``.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from perfmodel.documents import FirstVersion, Record, Text, checked, read_toml
from perfmodel.errors import InvalidDocument, UsageError, did_you_mean
from perfmodel.machine import DEVICE, NODE, Cluster, Tier, chained
from perfmodel.statistics import NonNegative, Share
from perfmodel.units import (
    Bytes,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flop_rate,
    parse_power,
)


def written(parse: Callable[[str], float], example: str) -> BeforeValidator:
    """A quantity as text with its unit; a bare number has none and is refused."""

    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise ValueError(f"must be text with a unit, such as {example}")  # noqa: TRY004 - pydantic
        return parse(value)

    return BeforeValidator(read)


BANDWIDTH: Final = written(parse_bandwidth, "400Gb/s")


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

    size_bytes: Annotated[PositiveInt, written(parse_bytes, "80GB")] = Field(alias="value")


class Rate(Figure):
    """Bytes per second, links in one direction."""

    bytes_per_s: Annotated[PositiveFloat, BANDWIDTH] = Field(alias="value")


class Peak(Figure):
    """Arithmetic."""

    flop_per_s: Annotated[PositiveFloat, written(parse_flop_rate, "989TFLOP/s")] = Field(
        alias="value"
    )


class Power(Figure):
    """Power limit."""

    power_w: Annotated[PositiveFloat, written(parse_power, "700W")] = Field(alias="value")


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

    @property
    def names(self) -> tuple[str, ...]:
        """All by which a user may call it."""
        return (self.id, self.name, *self.reported, *self.aliases)

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

    schema_version: FirstVersion
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
            own = {plain(name) for name in sheet.names}
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


_SHIPPED: Final = Path(__file__).with_name("catalogue.toml")
#: Share of a link's rate that copies are assumed to reach (8 H200: 87 and 88 % of PCIe 5).
LINK_SHARE: Final = 0.8


@functools.cache
def shipped_catalogue() -> Catalogue:
    """The data sheets that come with perfmodel."""
    return read_catalogue(_SHIPPED)


def sheet_named(text: str, catalogue: Catalogue) -> DataSheet | None:
    """The device of exactly this name, whatever its case, blanks and hyphens."""
    wanted = plain(text)
    return next((s for s in catalogue.devices if wanted in map(plain, s.names)), None)


def is_called(sheet: DataSheet, text: str) -> bool:
    """Whether a short name such as ``h100`` may mean a device.

    It may have words of any name, and the letters of those that end in a number (sxm of sxm4, 80 of 80gb).
    """
    words = {word for name in sheet.names for word in _words(name)}
    parts = {part for word in words for part in re.findall(r"^[a-z]+|^\d+", word)}
    return _words(text) <= words | parts


def most_memory_bytes(name: str, catalogue: Catalogue) -> Bytes | None:
    """Memory of a device; of a short name such as ``A100`` the largest that it may mean. [B]"""
    exact = sheet_named(name, catalogue)
    meant = [exact] if exact else [s for s in catalogue.devices if is_called(s, name)]
    return max((sheet.memory.size_bytes for sheet in meant), default=None)


def find_device(text: str, catalogue: Catalogue, *, flag: str = "--device") -> DataSheet:
    """The device that a user names, by identifier, data-sheet name or what the driver reports."""
    found = sheet_named(text, catalogue)
    if found is not None:
        return found
    candidates = [sheet.id for sheet in catalogue.devices if is_called(sheet, text)]
    if _words(text) and candidates:
        raise UsageError(f"{flag}: {text!r} may mean {', '.join(candidates)}; name one of them")
    identifiers = {plain(name): sheet.id for sheet in catalogue.devices for name in sheet.names}
    near = difflib.get_close_matches(plain(text), identifiers, n=3, cutoff=0.6)
    meant = ", ".join(dict.fromkeys(identifiers[name] for name in near))
    hint = f"did you mean {meant}? Otherwise see" if near else "see"
    raise UsageError(
        f"{flag}: must be in the catalogue, got {text!r}; {hint} perfmodel devices, or measure one that you "
        "have: perfmodel calibrate"
    )


def host_link_bytes_per_s(sheet: DataSheet, catalogue: Catalogue) -> float | None:
    """What copies between host and device are assumed to reach, one direction. [B/s]"""
    wanted = None if sheet.pcie is None else f"pcie{sheet.pcie.generation}-x16"
    rates = (link.rate.bytes_per_s for link in catalogue.links if link.id == wanted)
    return next((LINK_SHARE * rate for rate in rates), None)


def _words(text: str) -> set[str]:
    """Parts of a name, vendors left out: they tell nothing apart."""
    vendors = {"nvidia", "tesla", "geforce", "amd", "instinct", "gpu"}
    return set(re.findall(r"[a-z0-9]+", text.casefold())) - vendors


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

    schema_version: FirstVersion
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
