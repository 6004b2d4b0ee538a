"""Errors that a user can act on; each knows the exit code that the command line documents.

The text of every error follows one pattern: where, which rule, which value, what to do.
A wrong argument inside the library is a ``ValueError``, from a guard ``check_...`` a ``WrongArgument``; our own
broken invariants are ``assert``. NaN fails every guard.
"""

import difflib
import json
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, ClassVar, Final

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FEASIBLE: Final = 3
EXIT_OUT_OF_TOLERANCE: Final = 4
EXIT_CALIBRATION: Final = 5
EXIT_INTERRUPTED: Final = 130

#: Letters of a name that tell it from others, and names that a message proposes.
_LEAST_HELD: Final = 3
_MOST_NAMED: Final = 3


#: Said of an edited file where a command takes one.
UNSEALED: Final = ", --unsealed takes it as it is"


class PerfModelError(Exception):
    """Something that the user can mend; the message is one line."""

    exit_code: ClassVar[int] = EXIT_FAILURE


class UsageError(PerfModelError):
    """An argument makes no sense, or names something that does not exist."""

    exit_code = EXIT_USAGE


class UntraceableModel(UsageError):
    """A model cannot be traced: its code raises, or asks for values that only a real run has."""


class InvalidDocument(PerfModelError):
    """A file is truncated, from another schema version, or breaks a rule of its schema."""


class IncomparableRuns(PerfModelError):
    """Observations of different systems would be merged."""


class MeasurementFailed(PerfModelError):
    """Workers crashed, never ended or could not start; what was measured before is kept."""


class NotFeasible(PerfModelError):
    """No configuration satisfies the request."""

    exit_code = EXIT_NOT_FEASIBLE


class OutOfTolerance(PerfModelError):
    """A validation gate failed."""

    exit_code = EXIT_OUT_OF_TOLERANCE


class CalibrationUnavailable(PerfModelError):
    """The profile is missing, unreadable, stale, or describes another machine."""

    exit_code = EXIT_CALIBRATION


class Interrupted(PerfModelError):
    """The user stopped a measurement; what was measured is kept."""

    exit_code = EXIT_INTERRUPTED


def why(error: Exception) -> str:
    """Why a file cannot be read, without Python's numbers and without its name once more."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        said = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        return f"it is no JSON ({said}, line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text ({error.reason} at byte {error.start})"
    return str(error)


def described(error: BaseException) -> str:
    """What the code of a user raised, in one line; its text may raise, too."""
    try:
        text = " ".join(str(error).split()).rstrip(".")
    except BaseException:  # noqa: BLE001 - whatever that code raises
        text = ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@contextmanager
def reading(path: object, what: str) -> Iterator[None]:
    """Raise ``InvalidDocument`` that says of a file why it cannot be read, and what it should be."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"{path}: {what} cannot be read: {why(error)}") from error


def printable(text: str) -> str:
    """Text for a terminal: control characters of names and files are spelt out, not obeyed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """End of a message: the known names that hold a typed one, or else the nearest; or nothing."""
    names = {name.lower(): name for name in known}
    typed = text.lower()
    near = [name for name in names if len(typed) >= _LEAST_HELD and typed in name]
    near = [names[name] for name in near or difflib.get_close_matches(typed, names, n=1)]
    return f"; did you mean {' or '.join(near[:_MOST_NAMED])}?" if near else ""


def refuse_unknown(where: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is none of those known.

    Raises ``UsageError`` with all of them, and the nearest.
    """
    if name not in known:
        raise UsageError(
            f"{where}: must be one of {', '.join(known) or 'none'}, got {name!r}"
            f"{did_you_mean(name, known)}"
        )


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


def check_positive(name: str, value: float) -> None:
    """Refuse zero, negative and non-finite values."""
    if not (math.isfinite(value) and value > 0):
        raise WrongArgument(name, f"must be finite and > 0, got {value}")


def check_non_negative(name: str, value: float) -> None:
    """Refuse negative and non-finite values."""
    if not (math.isfinite(value) and value >= 0):
        raise WrongArgument(name, f"must be finite and >= 0, got {value}")


def check_fraction(name: str, value: float) -> None:
    """Refuse values outside (0, 1]."""
    if not 0 < value <= 1:
        raise WrongArgument(name, f"must be > 0 and <= 1, got {value}")


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Refuse values below a minimum."""
    if not value >= minimum:
        raise WrongArgument(name, f"must be >= {minimum}, got {value}")


def check_within(name: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse integers below a minimum or above a maximum."""
    check_at_least(name, value, minimum)
    if value > maximum:
        raise WrongArgument(name, f"must be <= {maximum:,}, got {value}")


#: A whole number that an argument may be.
_LARGEST: Final = 10**18


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Refuse objects of other classes."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise WrongArgument(name, f"must be a {names}, got {brief(value)}")


def fit_numbers(made: Any, kind: type[int] | type[float], *fields: str) -> None:
    """Make numbers in a new data class Python's own, as NumPy's are not; text and truth values are refused."""
    for name in fields:
        value, abstract = getattr(made, name), Integral if kind is int else Real
        is_huge = isinstance(value, int) and abs(value) > _LARGEST
        if is_huge or isinstance(value, bool) or not isinstance(value, abstract):
            what = "whole number" if kind is int else "number"
            raise WrongArgument(name, f"must be a {what} up to {_LARGEST:.0e}, got {brief(value)}")
        object.__setattr__(made, name, kind(getattr(made, name)))


def brief(value: object) -> str:
    """A value in one short line, whatever its code raises."""
    try:
        return reprlib.repr(value).replace("\n", " ")
    except BaseException:  # noqa: BLE001 - code of a user
        return f"a {type(value).__name__}"
