"""One file that a browser shows and a printer prints: for the person who signs."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from perfmodel.documents import Provenance
from perfmodel.documents.prediction import PredictedPoint, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine import Evidence
from perfmodel.report import (
    DEFINITIONS,
    Table,
    duration_interval,
    facts,
    interval,
    listed,
    number,
    one_line,
    percent,
    pictures,
    prediction,
    profile,
    scaling_words,
    validation,
    verdict,
)
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


class KeyNumber(NamedTuple):
    """One number, and the words that go with it."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What the person who signs reads first."""

    verdict: str
    state: str
    """``passed``, ``failed`` or ``unknown``."""
    numbers: tuple[KeyNumber, ...]
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


_GROUNDS: Final = {
    Evidence.MEASURED: "this setting ran on this machine",
    Evidence.INTERPOLATED: "it lies between settings that ran on this machine",
    Evidence.EXTRAPOLATED: "it lies beyond what ran on this machine",
    Evidence.ASSUMED: "part of it was assumed, not measured",
}


def headline(
    machine: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    judged: ValidationDocument | None,
) -> Headline:
    """The report in plain words."""
    words, state = verdict(judged), "unknown"
    if judged is not None and judged.profile_digest != machine.digest:
        words = "NOT VALIDATED: the validation at hand judged another profile"
    elif judged is not None:
        state = "passed" if judged.passed else "failed"
    largest = {
        found.digest: max(found.points, key=lambda point: point.setting.world_size, default=None)
        for found in predictions
    }
    return Headline(
        verdict=words,
        state=state,
        numbers=(_speedup(predictions, largest), *_accuracy(judged)),
        sentences=(
            *(_sentence(found, largest[found.digest]) for found in predictions),
            *_error_sentences(judged),
        ),
        warnings=(
            *_mismatches(machine, predictions, judged),
            *dict.fromkeys(caveat for entry in predictions for caveat in entry.caveats),
        ),
    )


def _speedup(
    predictions: Sequence[PredictionDocument], largest: Mapping[str, PredictedPoint | None]
) -> KeyNumber:
    for found in predictions:
        point = largest[found.digest]
        if point is not None and point.speedup is not None:
            middle, ends = interval(point.speedup).split("\n")
            bounds = ends.strip("[]").replace("-", " to ")
            return KeyNumber(
                f"Speed-up on {point.setting.world_size} devices",
                f"{middle} x",
                f"90 % interval {bounds}; {found.workload}, {scaling_words(found)}",
            )
    return KeyNumber("Speed-up", "-", "nothing was predicted")


def _sentence(found: PredictionDocument, point: PredictedPoint | None) -> str:
    if point is None:
        return f"{found.workload}: no number of devices was asked for."
    return (
        f"{found.workload}, {scaling_words(found)}: {point.setting.world_size} devices should "
        f"process {one_line(interval(point.speedup))} times as many samples per second as one, "
        f"{point.setting.local_batch} per device and step, in steps of "
        f"{one_line(duration_interval(point.step_s))}; {_GROUNDS[point.weakest_evidence]}."
    )


def _largest_run(judged: ValidationDocument) -> int:
    return max(entry.setting.world_size for entry in judged.settings)


def _accuracy(judged: ValidationDocument | None) -> tuple[KeyNumber, KeyNumber]:
    if judged is None:
        return (
            KeyNumber("Typical error", "unknown", "no fresh runs were made"),
            KeyNumber("Intervals kept", "unknown", "promised: 90 %"),
        )
    summary, floor, runs = judged.summary, judged.noise_floor, judged.settings
    beside = f"; repeating a run differs by {percent(floor.mape)}" if floor else ""
    covered = sum(entry.is_covered for entry in runs)
    return (
        KeyNumber(
            "Typical error of a step time",
            percent(summary.mape),
            f"over {summary.num_settings} fresh runs on at most {_largest_run(judged)} "
            f"devices{beside}",
        ),
        KeyNumber(
            "Intervals kept",
            percent(judged.coverage),
            f"{covered} of {len(runs)} fresh runs lay inside; promised: 90 %",
        ),
    )


def _error_sentences(judged: ValidationDocument | None) -> Iterator[str]:
    if judged is None:
        yield "Nobody has checked these predictions: run the validation before relying on them."
        return
    summary = judged.summary
    yield (
        f"On fresh runs that calibration had not seen, predictions were "
        f"{'too slow' if summary.bias > 0 else 'too fast'} by {percent(abs(summary.bias))} on "
        f"average (bias) and off by {percent(summary.mape)} typically (MAPE); the worst was "
        f"off by {percent(summary.worst_absolute)}."
    )
    yield (
        f"No fresh run used more than {_largest_run(judged)} devices: how wrong predictions "
        "for more are has not been checked."
    )
    if judged.noise_floor is not None:
        yield (
            f"Simply repeating a calibrated run differs by {percent(judged.noise_floor.mape)}: no "
            "model could do much better than that here."
        )


def _mismatches(
    machine: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    judged: ValidationDocument | None,
) -> Iterator[str]:
    if judged is not None and judged.profile_digest != machine.digest:
        yield "The validation judged another profile than the one shown here."
    for found in predictions:
        if found.profile_digest != machine.digest:
            yield f"The prediction of {found.workload} rests on another profile."
        elif judged is not None and found.validation_digest not in (None, judged.digest):
            yield f"The prediction of {found.workload} rests on another validation."


def report_html(
    document: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    judged: ValidationDocument | None,
) -> str:
    """A report as one self-contained file: no network, no scripts, escaped throughout.

    Results of another profile are marked as such; without a validation the report says so at the top.
    """
    machine = document.machine
    return template("report.html.j2").render(
        head=headline(document, predictions=predictions, judged=judged),
        measured=_filled(document, profile.machine_table) + _filled(machine, *_MEASURED),
        measured_pictures=pictures.measured_pictures(machine),
        predicted=[(entry.workload, _filled(entry, *_PREDICTED)) for entry in predictions],
        predicted_pictures=pictures.predicted_pictures(predictions),
        wrong=_filled(judged, *_WRONG) if judged else [],
        wrong_pictures=pictures.judged_pictures(judged) if judged else [],
        device_name=machine.device_name,
        is_validated=judged is not None,
        undetermined=machine.undetermined,
        sources=list(_sources(document, predictions, judged)),
        environment=facts(
            "Environment, as the calibration found it", _flat("", machine.environment), name="Fact"
        ),
        definitions=DEFINITIONS,
    )


_MEASURED: Final = (
    profile.workloads_table,
    profile.steps_table,
    profile.collectives_table,
    profile.overlaps_table,
    profile.rates_table,
    profile.ddp_table,
)
_PREDICTED: Final = (
    prediction.prediction_table,
    prediction.measured_table,
    prediction.breakdown_table,
    prediction.evidence_table,
)
_WRONG: Final = (
    validation.errors_table,
    validation.gates_table,
    validation.steps_table,
    validation.speedups_table,
    validation.repeats_table,
)


def _filled(document: _Shown, *tables: Callable[[_Shown], Table]) -> list[Table]:
    """Tables of a document that have something to show."""
    return [shown for table in tables if (shown := table(document)).rows]


def _sources(
    machine: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    judged: ValidationDocument | None,
) -> Iterator[Table]:
    raw = {"SHA-256 of the raw observations": machine.observations_sha256}
    yield _source("Profile", machine.provenance, {"Digest": machine.digest, **raw})
    for found in predictions:
        digests = {
            "Digest": found.digest,
            "Rests on profile": found.profile_digest,
            "Rests on validation": found.validation_digest or "none",
        }
        title = f"Prediction: {found.workload}, {found.scaling} scaling"
        yield _source(title, found.provenance, digests)
    if judged is not None:
        digests = {
            "Digest": judged.digest,
            "Rests on profile": judged.profile_digest,
            "SHA-256 of the raw observations": judged.observations_sha256,
        }
        yield _source("Validation", judged.provenance, digests)


def _source(title: str, provenance: Provenance, digests: dict[str, str]) -> Table:
    known = {
        **digests,
        "Made": provenance.created_utc,
        "Command": shlex.join(provenance.command_line),
        "Git commit": provenance.git_commit or "not recorded",
        "Seed": str(provenance.seed),
        "Host fingerprint": provenance.host_fingerprint,
        "Versions": listed(f"{name} {text}" for name, text in provenance.versions.items()),
    }
    return facts(title, known.items())


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), entry)
    else:
        yield path, "none" if value in (None, [], {}) else str(value)
