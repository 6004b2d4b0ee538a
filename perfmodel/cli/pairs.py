"""Numbers and pairs of numbers as flags hold them."""

import math

from perfmodel.errors import UsageError


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers above zero, separated by commas.

    Raises
    ------
    UsageError
        If one is not.
    """
    return tuple(_number(flag, part) for part in text.split(",") if part.strip())


def pairs(flag: str, text: str) -> dict[float, float]:
    """``KEY=VALUE`` pairs of numbers above zero, separated by commas.

    Raises
    ------
    UsageError
        If one is not, or a key is named twice.
    """
    found: dict[float, float] = {}
    for part in (part for part in text.split(",") if part.strip()):
        key_text, equals, value_text = part.partition("=")
        if not equals:
            raise UsageError(f"{flag}: must look like 256=4.0,512=5.0, got {part.strip()!r}")
        key, value = _number(flag, key_text), _number(flag, value_text)
        if key in found:
            raise UsageError(f"{flag}: must name each batch once, got {key:g} twice")
        found[key] = value
    return found


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag}: numbers must be finite and > 0, got {text.strip()!r}")
    return value
