"""The catalogue: data sheets of devices and links, every figure with its unit and its source."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from perfmodel.documents.base import Record, checked, read_toml
from perfmodel.units import parse_bandwidth, parse_bytes, parse_flop_rate, parse_power

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
