"""Options that several commands share, and texts of options as values; errors name the option."""

import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from perfmodel import checks
from perfmodel.documents.base import today_utc
from perfmodel.errors import UsageError, did_you_mean
from perfmodel.units import (
    MINUTE_S,
    Bytes,
    BytesPerSecond,
    Seconds,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

_Choice = TypeVar("_Choice", bound=str)
_Quantity = TypeVar("_Quantity", int, float)

Nodes: TypeAlias = Annotated[int | None, typer.Option(help="Nodes; start the command on each.")]
NodeRank: TypeAlias = Annotated[int | None, typer.Option(help="Rank of this node.")]
MasterAddress: TypeAlias = Annotated[str | None, typer.Option(help="Address of node 0.")]
MasterPort: TypeAlias = Annotated[int | None, typer.Option(help="Port on node 0.")]

Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted campaign in the folder.")
]
Patience: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Wait up to so long, in all, while other guests of the host have the processors: 30min."
    ),
]
OrderSeed: TypeAlias = Annotated[int, typer.Option(help="Seed of the order of runs.")]
Minutes: TypeAlias = Annotated[
    float | None, typer.Option(help="Stop after so long; continue with --resume.")
]
ProfileToJudge: TypeAlias = Annotated[Path, typer.Option(help="Profile to judge.")]


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter stood on the command line, whatever its value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_typed(context: typer.Context, excluded: Mapping[str, str], *, beside: str) -> None:
    """Refuse parameters that were typed and would be ignored beside an option.

    Parameters
    ----------
    excluded
        What to do instead, by parameter.

    Raises
    ------
    UsageError
        Naming the first of them.
    """
    for name, instead in excluded.items():
        if is_typed(context, name):
            flag, value = f"--{name.replace('_', '-')}", context.params[name]
            told = "both" if value is True else value
            raise UsageError(f"{flag}: excludes {beside}, got {told}; {instead}")


def limit_s(minutes: float | None) -> Seconds | None:
    """Time after which a campaign stops, of ``--minutes``. [s]

    Raises
    ------
    ValueError
        If it is not above zero.
    """
    if minutes is None:
        return None
    checks.positive("--minutes", minutes)
    return minutes * MINUTE_S


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def one_of(option: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    """One of a few words.

    Raises
    ------
    UsageError
        If it is another one.
    """
    for choice in choices:
        if choice == text:
            return choice
    near = did_you_mean(text, choices)
    raise UsageError(f"{option}: must be {' or '.join(choices)}, got {text!r}{near}")


def at_least_one(option: str, value: int) -> int:
    """A count of something that there must be.

    Raises
    ------
    UsageError
        If it is below 1.
    """
    if value < 1:
        raise UsageError(f"{option}: must be >= 1, got {value}")
    return value


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, separated by commas; at least one.

    Raises
    ------
    UsageError
        If one of them is not, or there is none.
    """
    try:
        found = tuple(int(part) for part in names(text))
    except ValueError:
        raise UsageError(
            f"{option}: must be whole numbers separated by commas, got {text!r}"
        ) from None
    if not found:
        raise UsageError(f"{option}: must name at least one count, got none")
    at_least_one(option, min(found))
    return found


def device_counts(text: str) -> tuple[int, ...]:
    """Counts in ascending order, each once."""
    return tuple(sorted(set(whole_numbers("--devices", text))))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers above zero, separated by commas.

    Raises
    ------
    UsageError
        If one is not.
    """
    return tuple(_number(option, part) for part in names(text))


def pairs(option: str, text: str) -> dict[float, float]:
    """``KEY=VALUE`` pairs of numbers above zero, separated by commas.

    Raises
    ------
    UsageError
        If one is not, or a key is named twice.
    """
    found: dict[float, float] = {}
    for part in names(text):
        key_text, equals, value_text = part.partition("=")
        if not equals:
            raise UsageError(f"{option}: must look like 256=4.0,512=5.0, got {part!r}")
        key, value = _number(option, key_text), _number(option, value_text)
        if key in found:
            raise UsageError(f"{option}: must name each batch once, got {key:g} twice")
        found[key] = value
    return found


def day(option: str, text: str) -> dt.date:
    """A day such as 2026-11-21; today if the text is empty.

    Raises
    ------
    UsageError
        If it is no day.
    """
    try:
        return dt.date.fromisoformat(text) if text else today_utc()
    except ValueError:
        raise UsageError(f"{option}: must look like 2026-11-21, got {text!r}") from None


def size_bytes(option: str, text: str) -> Bytes:
    """A size such as 80GiB. [B]

    Raises
    ------
    UsageError
        If the text has no known unit or is not above zero.
    """
    return _above_zero(option, text, parse_bytes)


def bandwidth_bytes_per_s(option: str, text: str) -> BytesPerSecond:
    """A bandwidth such as 25GB/s. [B/s]

    Raises
    ------
    UsageError
        If the text has no known unit or is not above zero.
    """
    return _above_zero(option, text, parse_bandwidth)


def duration_s(option: str, text: str) -> Seconds:
    """A duration such as 480ms. [s]

    Raises
    ------
    UsageError
        If the text has no known unit or is not above zero.
    """
    return _above_zero(option, text, parse_duration)


def patience_s(text: str | None) -> Seconds:
    """How long to wait for other guests of the host; not at all where nothing was said. [s]"""
    return 0.0 if text is None else duration_s("--patience", text)


def _above_zero(option: str, text: str, parse: Callable[[str], _Quantity]) -> _Quantity:
    try:
        found = parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if found <= 0:
        raise UsageError(f"{option}: must be > 0, got {text!r}")
    return found


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{option}: numbers must be finite and > 0, got {text.strip()!r}")
    return value
