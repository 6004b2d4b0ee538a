"""Predictions on disk before the first run that they judge; a continued campaign keeps them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from calibrate.campaign import PLAN, read_plan, write_plan
from perfmodel.documents.testbed import PredictedStep
from perfmodel.documents.verdicts import PredictedStrategy
from perfmodel.errors import InvalidDocument, UsageError, why


class Named(Protocol):
    """What is predicted; its name is that of its prediction."""

    @property
    def name(self) -> str:
        """Unique in a campaign."""


_Setting = TypeVar("_Setting", bound=Named)
_Predicted = TypeVar("_Predicted", PredictedStep, PredictedStrategy)


def predict_once(
    folder: Path,
    settings: Sequence[_Setting],
    predict: Callable[[_Setting], _Predicted],
    *,
    kind: type[_Predicted],
    options: Mapping[str, object],
    terms: Mapping[str, object],
) -> dict[str, _Predicted]:
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
    predicted = {setting.name: predict(setting) for setting in settings}
    rows = [entry.model_dump() for entry in predicted.values()]
    write_plan(folder, {**options, **terms, "predicted": rows})
    return predicted


def _read(
    folder: Path, kind: type[_Predicted], *, names: set[str], options: Mapping[str, object]
) -> dict[str, _Predicted]:
    raw, path = read_plan(folder), folder / PLAN
    try:
        entries = [kind.model_validate(entry) for entry in raw["predicted"]]
        earlier = ", ".join(f"{option} {raw[option]}" for option in options)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidDocument(f"{path}: plan cannot be read: {why(error)}") from error
    predicted = {entry.name: entry for entry in entries}
    if set(predicted) != names:
        flags = " and ".join(f"--{option}" for option in options)
        raise UsageError(
            f"{flags}: must be as in {path} ({earlier}), and the settings those of this version; "
            "repeat them, or choose another folder"
        )
    return predicted
