"""Errors that a user can act on; each knows the exit code that the command line documents.

The text of every error follows one pattern: where, which rule, which value, what to do.
A wrong argument inside the library is a ``ValueError``, from a guard ``check_...`` a ``WrongArgument``; our own
broken invariants are ``assert``. NaN fails every guard.
"""

import dataclasses
import datetime as dt
import difflib
import functools
import inspect
import json
import math
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

#: A whole number from 0 on; plain ``int`` of an argument counts something, from 1 on.
Natural: TypeAlias = Annotated[int, "from 0 on"]
_Function = TypeVar("_Function", bound=Callable[..., Any])

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


#: Characters of a name or path, entries of a list, and a whole number that an argument may have.
_MOST_CHARACTERS: Final = 4096
_MOST_GIVEN: Final = 10**6
_LARGEST: Final = 10**18


def checks_arguments(*, but: Collection[str] = ()) -> Callable[[_Function], _Function]:
    """A decorator that refuses by name what does not fit a parameter's annotation, before anything is computed.

    ``but``: Parameters that the function itself checks.
    """

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*given: object, **named: object) -> Any:
            bound = signature.bind(*given, **named)
            for name in bound.arguments.keys() - but:
                parameter, value = signature.parameters[name], bound.arguments[name]
                kind: Any = parameter.annotation
                if parameter.kind is parameter.VAR_POSITIONAL:
                    bound.arguments[name] = tuple(fitted(name, each, kind) for each in value)
                elif parameter.kind is not parameter.VAR_KEYWORD:
                    bound.arguments[name] = fitted(name, value, kind)
            return function(*bound.args, **bound.kwargs)

        return cast("_Function", run)

    return decorated


def fit_fields(made: Any) -> None:
    """The same of the fields of a new data class."""
    for field in dataclasses.fields(made):
        object.__setattr__(
            made, field.name, fitted(field.name, getattr(made, field.name), field.type)
        )


def fitted(name: str, value: object, kind: Any) -> Any:
    """An argument as its annotation says; numbers of NumPy become Python's.

    Raises ``WrongArgument`` if it is of another kind. Whole numbers count something: they are 1 or more.
    """
    kinds = list(_alternatives(kind))
    for one in kinds:
        with suppress(TypeError, ValueError, OverflowError):
            found = _as_kind(value, one)
            break
    else:
        words = dict.fromkeys(_in_words(one) for one in kinds if one is not NoneType)
        raise WrongArgument(name, f"must be {' or '.join(words)}, got {brief(value)}")
    if one in (int, Natural):
        least = 1 if one is int else 0
        if not least <= found <= _LARGEST:
            rule = f">= {least}" if found < least else f"<= {_LARGEST:.0e}"
            raise WrongArgument(name, f"must be {rule}, got {brief(value)}")
    return found


def brief(value: object) -> str:
    """A value in one short line, whatever its code raises."""
    try:
        return reprlib.repr(value).replace("\n", " ")
    except BaseException:  # noqa: BLE001 - code of a user
        return f"a {type(value).__name__}"


def _alternatives(kind: Any) -> Iterator[Any]:
    origin = get_origin(kind)
    if kind is None or isinstance(kind, str):  # a name that only checkers of types know
        yield NoneType if kind is None else Any
    elif origin in (Union, UnionType) or (origin is Annotated and kind != Natural):
        for one in get_args(kind)[: None if origin is not Annotated else 1]:
            yield from _alternatives(one)
    else:
        yield kind


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    # an array of one number is none; text is none either
    if isinstance(value, bool | str | bytes) or hasattr(value, "__len__"):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # the latter is NumPy's
        raise TypeError
    return bool(value)


def _path(value: Any) -> Any:
    text = os.fspath(value)
    if not isinstance(text, str) or len(text) >= _MOST_CHARACTERS or "\0" in text:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(_path(value))


def _day(value: Any) -> dt.date:
    if isinstance(value, dt.datetime):
        return value.date()
    if not isinstance(value, dt.date):
        raise TypeError
    return value


def _sequence(value: Any, inner: Any) -> tuple[Any, ...]:
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or len(value) > _MOST_GIVEN
    ):
        raise TypeError
    return tuple(fitted("", each, inner) for each in value)


def _mapping(value: Any, key: Any, inner: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {fitted("", name, key): fitted("", each, inner) for name, each in value.items()}


#: Reads a value of a kind, and how the kind is called.
_KINDS: Final[Mapping[Any, tuple[Callable[[Any], Any], str]]] = {
    int: (_whole, "a whole number"),
    Natural: (_whole, "a whole number"),
    float: (_number, "a number"),
    bool: (_flag, "True or False"),
    str: (_text, "a text"),
    os.PathLike: (_path, "a path"),
    Path: (lambda value: Path(_path(value)), "a path"),
    dt.date: (_day, "a date"),
}


_LISTS: Final = (Sequence, tuple)


def _as_kind(value: object, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    outer = kind if origin is None or kind in _KINDS else origin
    if outer in _KINDS:
        return _KINDS[outer][0](value)
    if outer in _LISTS:
        return _sequence(value, inner[0])
    if outer is Mapping:
        return _mapping(value, *inner)
    fits = (
        value in inner
        if outer is Literal
        else callable(value)
        if outer is Callable
        else kind is Any or isinstance(value, outer)
    )
    if not fits:
        raise TypeError
    return value


def _in_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    outer = kind if origin is None or kind in _KINDS else origin
    if outer is Literal:
        return " or ".join(map(repr, inner))
    if outer in _LISTS or outer is Mapping:
        words = " or ".join(dict.fromkeys(map(_in_words, _alternatives(inner[0]))))
        return f"a mapping by {words}" if outer is Mapping else f"a list, each {words}"
    return _KINDS[outer][1] if outer in _KINDS else f"a {getattr(outer, '__name__', outer)}"
