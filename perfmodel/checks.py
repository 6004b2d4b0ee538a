"""Small named guards; each raises ``ValueError`` with the name, the rule and the value.

NaN fails every guard, because every comparison is written so that NaN is on the failing side.
"""

import math


def finite(name: str, value: float) -> None:
    """Refuse NaN and infinities."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def positive(name: str, value: float) -> None:
    """Refuse zero, negative and non-finite values."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def non_negative(name: str, value: float) -> None:
    """Refuse negative and non-finite values."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value}")


def fraction(name: str, value: float) -> None:
    """Refuse values outside (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be > 0 and <= 1, got {value}")


def at_least(name: str, value: int, minimum: int) -> None:
    """Refuse integers below a minimum."""
    if not value >= minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")


def within(name: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse integers below a minimum or above a maximum."""
    at_least(name, value, minimum)
    if value > maximum:
        raise ValueError(f"{name} must be <= {maximum:,}, got {value}")
