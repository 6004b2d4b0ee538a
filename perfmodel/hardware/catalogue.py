"""The catalogue that comes with perfmodel, and devices by name."""

import difflib
import functools
import re
from pathlib import Path
from typing import Final

from perfmodel.documents.catalogue import Catalogue, DataSheet, LinkSheet, plain, read_catalogue
from perfmodel.errors import UsageError

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
    return next((sheet for sheet in catalogue.devices if wanted in _names(sheet)), None)


def find_device(text: str, catalogue: Catalogue, *, flag: str = "--device") -> DataSheet:
    """The device that a user names, by identifier, data-sheet name or what the driver reports.

    Raises
    ------
    UsageError
        If no device has the name: with all that it may mean, or the nearest ones. A part of a name is
        never taken for a device: PCIe cards and SXM modules of one name differ by up to a factor 2.
    """
    found = sheet_named(text, catalogue)
    if found is not None:
        return found
    candidates = [sheet.id for sheet in catalogue.devices if _words(text) <= _all_words(sheet)]
    if _words(text) and candidates:
        raise UsageError(f"{flag}: {text!r} may mean {', '.join(candidates)}; name one of them")
    identifiers = {plain(name): sheet.id for sheet in catalogue.devices for name in _names(sheet)}
    near = difflib.get_close_matches(plain(text), identifiers, n=3, cutoff=0.6)
    meant = ", ".join(dict.fromkeys(identifiers[name] for name in near))
    hint = f"did you mean {meant}? Otherwise see" if near else "see"
    raise UsageError(f"{flag}: must be in the catalogue, got {text!r}; {hint} perfmodel devices")


def host_link(sheet: DataSheet, catalogue: Catalogue) -> LinkSheet | None:
    """The link to the host, if the catalogue knows it."""
    if sheet.pcie is None:
        return None
    wanted = f"pcie{sheet.pcie.generation}-x16"
    return next((link for link in catalogue.links if link.id == wanted), None)


def host_link_bytes_per_s(sheet: DataSheet, catalogue: Catalogue) -> float | None:
    """What copies between host and device are assumed to reach, one direction. [B/s]"""
    link = host_link(sheet, catalogue)
    return None if link is None else link.rate.bytes_per_s * LINK_SHARE


def _names(sheet: DataSheet) -> set[str]:
    return {plain(name) for name in (sheet.id, sheet.name, *sheet.reported, *sheet.aliases)}


def _words(text: str) -> set[str]:
    """Parts of a name, vendors left out: they tell nothing apart."""
    vendors = {"nvidia", "tesla", "geforce", "amd", "instinct", "gpu"}
    return set(re.findall(r"[a-z0-9]+", text.casefold())) - vendors


def _all_words(sheet: DataSheet) -> set[str]:
    """Words of every name, and the letters of those that end in a number (sxm of sxm4, 80 of 80gb)."""
    words = {
        word
        for name in (sheet.id, sheet.name, *sheet.reported, *sheet.aliases)
        for word in _words(name)
    }
    return words | {part for word in words for part in re.findall(r"^[a-z]+|^\d+", word)}
