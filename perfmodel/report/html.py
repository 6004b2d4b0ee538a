"""One file that a browser shows and a printer prints: for the person who signs."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.files import leaves
from perfmodel.report import (
    DEFINITIONS,
    Table,
    duration_interval,
    facts,
    interval,
    number,
    one_line,
    percent,
    prediction,
    profile,
    scaling_words,
    validation,
    verdict,
)
from perfmodel.report.figures import Picture, judged_pictures, predicted_pictures
from perfmodel.units import format_bytes, format_duration

_Shown = TypeVar("_Shown")
#: How a number is shown.
KINDS: Final[Mapping[str, Callable[[Any], str]]] = {
    "money": lambda value: f"{value:,.0f}" if abs(value) >= 100 else number(value),
    "price": lambda value: f"{value:.4g}",
    "duration": format_duration,
    "percent": percent,
    "count": lambda value: f"{value:,.{0 if math.isclose(value, round(value)) else 1}f}",
    "ratio": number,
    "bytes": format_bytes,
    "date": str,
    "text": str,
}


class Entry(NamedTuple):
    """One number that a page shows."""

    place: int
    path: str
    """Keys and positions in the JSON of the document, joined by dots."""
    exact: str
    origin: str
    """Words: where it comes from."""
    anchor: str
    """Id of the row of the page that tells more; empty if there is none."""


class LinkedNumbers:
    """Shows values of a document as JSON has it, and remembers which.

    ``origin`` gives, for a path, where its value comes from, and the id of a row that tells more.
    """

    def __init__(self, values: Any, origin: Callable[[str], tuple[str, str]]) -> None:
        self._values, self._origin = values, origin
        self.entries: dict[str, Entry] = {}
        """What was shown so far, by path, in that order."""

    def value(self, path: str) -> Any:
        """What stands at a path."""
        found = self._values
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def show(self, path: str, kind: str) -> Markup:
        """The value at a path as a link to its row among the sources."""
        value = self.value(path)
        if path not in self.entries:
            place = len(self.entries) + 1
            self.entries[path] = Entry(place, path, str(value), *self._origin(path))
        return Markup('<a class="n {}" href="#n{}" data-path="{}">{}</a>').format(
            kind, self.entries[path].place, path, KINDS[kind](value)
        )

    def interval(self, path: str, kind: str) -> Markup:
        """The value and its 90 % interval."""
        middle, low, high = (self.show(f"{path}.{name}", kind) for name in ("nominal", "p5", "p95"))
        return Markup('{} <span class="range">[{}&thinsp;&ndash;&thinsp;{}]</span>').format(
            middle, low, high
        )


def template(name: str) -> Template:
    """A template of this package: what is put in is escaped, what is missing is an error."""
    environment = Environment(
        loader=PackageLoader("perfmodel.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


#: How the template of a report writes quantities.
_WRITERS: Final = {
    "duration_interval": duration_interval,
    "interval": interval,
    "one_line": one_line,
    "percent": percent,
    "scaling_words": scaling_words,
}


def report_html(
    document: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    judged: ValidationDocument | None,
) -> tuple[str, list[Picture]]:
    """A report as one self-contained file, and its pictures: no network, no scripts, escaped throughout.

    Results of another profile are marked as such; without a validation the report says so at the top.
    """
    words, state = verdict(judged), "unknown"
    if judged is not None and judged.profile_digest != document.digest:
        words = "NOT VALIDATED: the validation at hand judged another profile"
    elif judged is not None:
        state = "passed" if judged.passed else "failed"
    drawn = {
        "predicted": predicted_pictures(predictions),
        "wrong": judged_pictures(judged) if judged else [],
    }
    machine = document.machine
    page = template("report.html.j2").render(
        _WRITERS,
        verdict=words,
        state=state,
        largest=[
            (each, max(each.points, key=lambda point: point.setting.world_size, default=None))
            for each in predictions
        ],
        document=document,
        judged=judged,
        pictures=drawn,
        measured=[
            *_filled(machine, *_MEASURED),
            facts("Environment, as the calibration found it", leaves(machine.environment)),
        ],
        predicted=[(entry.workload, _filled(entry, *_PREDICTED)) for entry in predictions],
        wrong=_filled(judged, *_WRONG) if judged else [],
        sources=[
            profile.profile_table(document),
            _source("Profile", document),
            *(_source(f"Prediction: {e.workload}, {e.scaling} scaling", e) for e in predictions),
            *([_source("Validation", judged)] if judged else []),
        ],
        definitions=DEFINITIONS,
    )
    return page, [picture for pictures in drawn.values() for picture in pictures]


_MEASURED: Final = (profile.workloads_table, profile.steps_table, profile.rates_table)
_PREDICTED: Final = (
    prediction.prediction_table,
    prediction.measured_table,
    prediction.breakdown_table,
    prediction.evidence_table,
)
_WRONG: Final = (
    validation.summary_table,
    validation.steps_table,
    validation.speedups_table,
    validation.repeats_table,
)


def _filled(document: _Shown, *tables: Callable[[_Shown], Table]) -> list[Table]:
    """Tables of a document that have something to show."""
    return [shown for table in tables if (shown := table(document)).rows]


def _source(
    title: str, document: ProfileDocument | PredictionDocument | ValidationDocument
) -> Table:
    """Digests of a document and of what it rests on, and who made it."""
    digests = {name: value for name, value in document if name.endswith(("_digest", "_sha256"))}
    made = document.provenance.model_dump(mode="json")
    made["command_line"] = shlex.join(document.provenance.command_line)
    return facts(title, leaves({"digest": document.digest, **digests, **made}))
