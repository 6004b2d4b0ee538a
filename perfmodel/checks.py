"""Small named guards; each raises ``WrongArgument`` with the name, the rule and the value.

NaN fails every guard, because every comparison is written so that NaN is on the failing side.
"""

import math


class WrongArgument(ValueError):
    """An argument of that name breaks a rule.

    Told apart from every other ``ValueError``, so that the command line can name the flag that the
    argument came from.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.name} {self.problem}"


def positive(name: str, value: float) -> None:
    """Refuse zero, negative and non-finite values."""
    if not (math.isfinite(value) and value > 0):
        raise WrongArgument(name, f"must be finite and > 0, got {value}")


def non_negative(name: str, value: float) -> None:
    """Refuse negative and non-finite values."""
    if not (math.isfinite(value) and value >= 0):
        raise WrongArgument(name, f"must be finite and >= 0, got {value}")


def fraction(name: str, value: float) -> None:
    """Refuse values outside (0, 1]."""
    if not 0 < value <= 1:
        raise WrongArgument(name, f"must be > 0 and <= 1, got {value}")


def at_least(name: str, value: float, minimum: float) -> None:
    """Refuse values below a minimum."""
    if not value >= minimum:
        raise WrongArgument(name, f"must be >= {minimum}, got {value}")


def within(name: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse integers below a minimum or above a maximum."""
    at_least(name, value, minimum)
    if value > maximum:
        raise WrongArgument(name, f"must be <= {maximum:,}, got {value}")
