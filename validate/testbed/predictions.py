"""Predictions on disk before the first run that they judge; a continued campaign keeps them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from calibrate.campaign import PLAN, read_plan, write_plan
from perfmodel.documents.testbed import ForetoldStep
from perfmodel.documents.verdicts import ForetoldStrategy
from perfmodel.errors import InvalidDocument, UsageError, why


class Named(Protocol):
    """What is predicted; its name is that of its prediction."""

    @property
    def name(self) -> str:
        """Unique in a campaign."""


_Setting = TypeVar("_Setting", bound=Named)
_Foretold = TypeVar("_Foretold", ForetoldStep, ForetoldStrategy)


def foretell_once(
    folder: Path,
    settings: Sequence[_Setting],
    foretell: Callable[[_Setting], _Foretold],
    *,
    kind: type[_Foretold],
    options: Mapping[str, object],
    terms: Mapping[str, object],
) -> dict[str, _Foretold]:
    """Predictions by name: those of an earlier start, or new ones, written before the first run.

    Parameters
    ----------
    options
        What the user chose that decides on the settings, by the names of the flags.
    terms
        What stands beside the predictions: gates, and the law that they follow.

    Raises
    ------
    InvalidDocument
        If the plan of an earlier start cannot be read.
    UsageError
        If it was made for other settings.
    """
    if (folder / PLAN).exists():
        return _read(folder, kind, names={setting.name for setting in settings}, options=options)
    foretold = {setting.name: foretell(setting) for setting in settings}
    predicted = [entry.model_dump() for entry in foretold.values()]
    write_plan(folder, {**options, **terms, "predicted": predicted})
    return foretold


def _read(
    folder: Path, kind: type[_Foretold], *, names: set[str], options: Mapping[str, object]
) -> dict[str, _Foretold]:
    raw, path = read_plan(folder), folder / PLAN
    try:
        entries = [kind.model_validate(entry) for entry in raw["predicted"]]
        earlier = ", ".join(f"{option} {raw[option]}" for option in options)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    foretold = {entry.name: entry for entry in entries}
    if set(foretold) != names:
        flags = " and ".join(f"--{option}" for option in options)
        raise UsageError(
            f"{flags}: must be as in {path} ({earlier}), and the settings those of this version; "
            "repeat them, or choose another folder"
        )
    return foretold
