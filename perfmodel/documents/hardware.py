"""The catalogue of data sheets: devices and links as their vendors describe them, found by name."""

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from perfmodel.documents import Record, checked, read_toml
from perfmodel.errors import UsageError
from perfmodel.units import Bytes, parse_bandwidth, parse_bytes, parse_flop_rate, parse_power


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
