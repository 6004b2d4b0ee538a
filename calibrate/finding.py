"""One thing that the doctor noticed."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact that bears on a measurement.

    Attributes
    ----------
    severity
        ``ok`` is fine, ``warn`` widens the doubt, ``bad`` makes numbers that mislead.
    what
        The fact, with its value.
    why
        How it spoils a measurement; empty if it does not.
    advice
        What to do; empty if there is nothing to do.
    """

    severity: Severity
    what: str
    why: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        if self.severity != "ok" and not (self.why and self.advice):
            raise ValueError(f"why and advice must be given with {self.severity!r}, got neither")


def ok(what: str) -> Finding:
    """Report what was checked and is fine."""
    return Finding(severity="ok", what=what)


def warn(what: str, *, why: str, advice: str) -> Finding:
    """Report what widens the doubt."""
    return Finding(severity="warn", what=what, why=why, advice=advice)


def bad(what: str, *, why: str, advice: str) -> Finding:
    """Report what makes numbers misleading."""
    return Finding(severity="bad", what=what, why=why, advice=advice)
