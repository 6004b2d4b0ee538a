"""SI units: aliases that name what a float means, and the only place where prefixes and bits exist.

Inside the program every quantity is a plain float or int in SI units and its name ends in the unit
(``_s``, ``_bytes``, ``_flop``, ``_bytes_per_s``, ``_flop_per_s``). Text with prefixes is read and
written here alone: ``k M G T P`` are powers of 1000, ``Ki Mi Gi Ti Pi`` powers of 1024, ``b`` is a
bit and ``B`` a byte.
"""

import math
import re
from typing import Final, TypeAlias

Seconds: TypeAlias = float
Bytes: TypeAlias = int
Flop: TypeAlias = float
BytesPerSecond: TypeAlias = float
FlopPerSecond: TypeAlias = float

PREFIXES: Final[dict[str, float]] = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}
#: Of a whole number; no quantity here has more.
MOST_DIGITS: Final = 30
#: Of one list that a user types. Each count of devices of a deep model takes tens of milliseconds.
MOST_ENTRIES: Final = 128
KIB: Final[Bytes] = 2**10
MIB: Final[Bytes] = 2**20
GIB: Final[Bytes] = 2**30
#: One Mbit in bytes.
MBIT: Final = 125_000.0
KILOWATT_W: Final = 1000.0
MINUTE_S: Final = 60.0
HOUR_S: Final = 60 * MINUTE_S
DAY_S: Final = 24 * HOUR_S
_SECONDS: Final[dict[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": MINUTE_S,
    "h": HOUR_S,
    "d": DAY_S,
}
_QUANTITY: Final = re.compile(
    r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)"
)


def decimal(text: str) -> float:
    """A number as programs write it: ASCII digits, no separators."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"must be a number, got {text.strip()!r}")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text.strip()!r}") from None


def whole(text: str) -> int:
    """A whole number as programs write it: ASCII digits, no separators."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"must have at most {MOST_DIGITS} digits, got {len(text):,}")
    try:
        if text.isascii() and not {"_", "+"} & set(text):
            return int(text)
    except ValueError:
        pass
    raise ValueError(f"must be a whole number, got {text!r}")


def _split(text: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise ValueError(f"quantity must look like {example!r}, got {text!r}")
    return float(match[1]), match[2]


def _quantity(text: str, example: str, base_units: dict[str, float]) -> float:
    number, unit = _split(text, example)
    for base, factor in base_units.items():
        prefix = unit.removesuffix(base)
        if unit.endswith(base) and prefix in PREFIXES:
            return number * PREFIXES[prefix] * factor
    raise ValueError(
        f"unit of {text!r} must end in {' or '.join(base_units)}, such as {example}, got {unit!r}"
    )


def parse_bytes(text: str) -> Bytes:
    """Size in bytes of text such as ``25MiB`` or ``1.5GB``."""
    return round(_quantity(text, "25MiB", {"B": 1.0}))


def parse_bandwidth(text: str) -> BytesPerSecond:
    """Bandwidth in bytes per second, one direction, of text such as ``400Gb/s`` or ``50GB/s``."""
    return _quantity(text, "400Gb/s", {"B/s": 1.0, "b/s": 1 / 8, "bit/s": 1 / 8})


def parse_flop_rate(text: str) -> FlopPerSecond:
    """Rate in FLOP per second of text such as ``989TFLOP/s``."""
    return _quantity(text, "989TFLOP/s", {"FLOP/s": 1.0})


def parse_power(text: str) -> float:
    """Power in watts of text such as ``700W`` or ``1.2kW``."""
    return _quantity(text, "700W", {"W": 1.0})


def parse_duration(text: str) -> Seconds:
    """Duration in seconds of text such as ``10us`` or ``2.5 ms``."""
    number, unit = _split(text, "10us")
    if unit not in _SECONDS:
        raise ValueError(f"unit of {text!r} must be one of {', '.join(_SECONDS)}, got {unit!r}")
    return number * _SECONDS[unit]


def parse_factor(text: str) -> float | None:
    """Factor of text such as ``2x`` or ``0.5x``; None if it does not end in ``x``."""
    number, unit = _split(text, "2x")
    return number if unit == "x" else None


def parse_number(text: str) -> float:
    """Plain number > 0 without a unit."""
    number, unit = _split(text, "2000")
    if unit or not number > 0:
        raise ValueError(f"number must be > 0 and have no unit, got {text!r}")
    return number


def parse_share(text: str) -> float:
    """Plain number from 0 to 1 without a unit."""
    number, unit = _split(text, "0.5")
    if unit or not 0 <= number <= 1:
        raise ValueError(f"number must be 0 to 1 and have no unit, got {text!r}")
    return number


def parse_count(text: str) -> int:
    """Whole number >= 1 without a unit."""
    if not text.isascii() or not text.isdigit() or (found := whole(text)) < 1:
        raise ValueError(f"number must be whole and >= 1, got {text!r}")
    return found


def _significant(value: float) -> str:
    # 999.5 would round up to "1e+03"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def format_duration(seconds: Seconds) -> str:
    """Text such as ``12.3 ms``, three significant digits."""
    if seconds == 0:
        return "0 s"
    for unit in ("d", "h", "min", "s", "ms", "us"):
        if abs(seconds) >= _SECONDS[unit] * (1 if unit not in ("d", "h", "min") else 2):
            return f"{_significant(seconds / _SECONDS[unit])} {unit}"
    return f"{_significant(seconds / 1e-9)} ns"


def format_bytes(size_bytes: float) -> str:
    """Text such as ``25 MiB``, binary prefixes, three significant digits."""
    for prefix in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if abs(size_bytes) >= PREFIXES[prefix]:
            return f"{_significant(size_bytes / PREFIXES[prefix])} {prefix}B"
    return f"{_significant(size_bytes)} B"


def format_rate(per_second: float, unit: str) -> str:
    """Text such as ``12.3 GB/s``, decimal prefixes, three significant digits."""
    return f"{_decimal(per_second, unit)}/s"


def format_flop(flop: Flop) -> str:
    """Text such as ``12.3 GFLOP``, decimal prefixes, three significant digits."""
    return _decimal(flop, "FLOP")


def _decimal(value: float, unit: str) -> str:
    for prefix in ("P", "T", "G", "M", "k"):
        if abs(value) >= PREFIXES[prefix]:
            return f"{_significant(value / PREFIXES[prefix])} {prefix}{unit}"
    return f"{_significant(value)} {unit}"
