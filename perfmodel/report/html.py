"""One file that a browser shows and a printer prints: for the person who signs."""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from perfmodel.documents.base import Provenance
from perfmodel.documents.prediction import PredictedPoint, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.machine.evidence import Evidence
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.report import figures
from perfmodel.report import prediction as prediction_grids
from perfmodel.report import profile as profile_grids
from perfmodel.report import validation as validation_grids
from perfmodel.report.wording import (
    DEFINITIONS,
    Grid,
    duration_interval,
    grid,
    interval,
    listed,
    number,
    one_line,
    percent,
    scaling_words,
    verdict,
)
from perfmodel.units import format_bytes, format_duration


def money(value: float) -> str:
    """Text such as ``12,345``; three significant digits below 100."""
    return f"{value:,.0f}" if abs(value) >= 100 else number(value)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isclose(value, round(value)) else f"{value:,.1f}"


#: How a number is shown.
KINDS: Final[Mapping[str, Callable[[Any], str]]] = {
    "money": money,
    "price": lambda value: f"{value:.4g}",
    "duration": format_duration,
    "percent": percent,
    "count": _count,
    "ratio": number,
    "bytes": format_bytes,
    "date": str,
    "text": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
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
    """Shows values of a document, and remembers which.

    Parameters
    ----------
    values
        The document as JSON has it.
    origin
        From a path to where its value comes from, and the id of a row that tells more.
    """

    def __init__(self, values: Any, origin: Callable[[str], tuple[str, str]]) -> None:
        self._values, self._origin = values, origin
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        """What was shown so far, in that order."""
        return list(self._entries.values())

    def value(self, path: str) -> Any:
        """What stands at a path."""
        found = self._values
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def show(self, path: str, kind: str) -> Markup:
        """The value at a path as a link to its row among the sources."""
        value = self.value(path)
        if path not in self._entries:
            origin, anchor = self._origin(path)
            self._entries[path] = Entry(
                place=len(self._entries) + 1,
                path=path,
                exact=str(value),
                origin=origin,
                anchor=anchor,
            )
        entry = self._entries[path]
        return Markup('<a class="n {}" href="#n{}" data-path="{}">{}</a>').format(
            kind, entry.place, path, KINDS[kind](value)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNumber:
    """One number, and the words that go with it."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What the person who signs reads first."""

    verdict: str
    state: Literal["passed", "failed", "unknown"]
    numbers: tuple[KeyNumber, ...]
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


def headline(
    profile: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Headline:
    """Sum up a report in plain words."""
    words = verdict(validation)
    state: Literal["passed", "failed", "unknown"] = "unknown"
    if validation is not None and validation.profile_digest != profile.digest:
        words = "NOT VALIDATED: the validation at hand judged another profile"
    elif validation is not None:
        state = "passed" if validation.passed else "failed"
    return Headline(
        verdict=words,
        state=state,
        numbers=(_speedup(predictions), _error(validation), _coverage(validation)),
        sentences=(*map(_prediction_sentence, predictions), *_error_sentences(validation)),
        warnings=(
            *_mismatches(profile, predictions, validation),
            *dict.fromkeys(caveat for entry in predictions for caveat in entry.caveats),
        ),
    )


def _largest(prediction: PredictionDocument) -> PredictedPoint | None:
    return max(prediction.points, key=lambda point: point.setting.world_size, default=None)


def _speedup(predictions: Sequence[PredictionDocument]) -> KeyNumber:
    prediction = next((entry for entry in predictions if entry.points), None)
    point = _largest(prediction) if prediction else None
    if prediction is None or point is None:
        return KeyNumber(name="Speed-up", value="-", meaning="nothing was predicted")
    low, high = (number(bound, like=point.speedup.nominal) for bound in _ends(point))
    which = f"{prediction.workload}, {scaling_words(prediction)}"
    return KeyNumber(
        name=f"Speed-up on {point.setting.world_size} devices",
        value=f"{number(point.speedup.nominal)} x",
        meaning=f"90 % interval {low} to {high}; {which}",
    )


def _ends(point: PredictedPoint) -> tuple[float, float]:
    return point.speedup.p5, point.speedup.p95


def _error(validation: ValidationDocument | None) -> KeyNumber:
    if validation is None:
        return KeyNumber(name="Typical error", value="unknown", meaning="no fresh runs were made")
    summary, floor = validation.summary, validation.noise_floor
    beside = f"; repeating a run differs by {percent(floor.mape)}" if floor else ""
    return KeyNumber(
        name="Typical error of a step time",
        value=percent(summary.mape),
        meaning=f"over {summary.num_settings} fresh runs on at most {_largest_run(validation)} "
        f"devices{beside}",
    )


def _largest_run(validation: ValidationDocument) -> int:
    return max(entry.setting.world_size for entry in validation.settings)


def _coverage(validation: ValidationDocument | None) -> KeyNumber:
    if validation is None:
        return KeyNumber(name="Intervals kept", value="unknown", meaning="promised: 90 %")
    covered = sum(entry.is_covered for entry in validation.settings)
    return KeyNumber(
        name="Intervals kept",
        value=percent(validation.coverage),
        meaning=f"{covered} of {len(validation.settings)} fresh runs lay inside; promised: 90 %",
    )


def _prediction_sentence(prediction: PredictionDocument) -> str:
    point = _largest(prediction)
    if point is None:
        return f"{prediction.workload}: no number of devices was asked for."
    setting = point.setting
    grounds = {
        Evidence.MEASURED: "this setting ran on this machine",
        Evidence.INTERPOLATED: "it lies between settings that ran on this machine",
        Evidence.EXTRAPOLATED: "it lies beyond what ran on this machine",
        Evidence.ASSUMED: "part of it was assumed, not measured",
    }[point.weakest_evidence]
    return (
        f"{prediction.workload}, {scaling_words(prediction)}: {setting.world_size} devices should "
        f"process {one_line(interval(point.speedup))} times as many samples per second as one, "
        f"{setting.local_batch} per device and step, in steps of "
        f"{one_line(duration_interval(point.step_s))}; {grounds}."
    )


def _error_sentences(validation: ValidationDocument | None) -> Iterator[str]:
    if validation is None:
        yield "Nobody has checked these predictions: run the validation before relying on them."
        return
    summary = validation.summary
    direction = "too slow" if summary.bias > 0 else "too fast"
    yield (
        f"On fresh runs that calibration had not seen, predictions were {direction} by "
        f"{percent(abs(summary.bias))} on average (bias) and off by {percent(summary.mape)} "
        f"typically (MAPE), at the machine speed of the calibration; the worst was off by "
        f"{percent(summary.worst_absolute)}. As the clock showed it, without that correction: "
        f"bias {percent(validation.summary_raw.bias, signed=True)}, "
        f"MAPE {percent(validation.summary_raw.mape)}."
    )
    yield (
        f"No fresh run used more than {_largest_run(validation)} devices: how wrong predictions "
        "for more are has not been checked."
    )
    if validation.noise_floor is not None:
        yield (
            "Simply repeating a calibrated run differs by "
            f"{percent(validation.noise_floor.mape)}: no model could do much better than that here."
        )


def _mismatches(
    profile: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Iterator[str]:
    if validation is not None and validation.profile_digest != profile.digest:
        yield "The validation judged another profile than the one shown here."
    for prediction in predictions:
        if prediction.profile_digest != profile.digest:
            yield f"The prediction of {prediction.workload} rests on another profile."
        elif validation is not None and prediction.validation_digest not in (
            None,
            validation.digest,
        ):
            yield f"The prediction of {prediction.workload} rests on another validation."


_ID: Final = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An inlined figure and what it shows."""

    svg: str
    caption: str


def report_html(
    profile: ProfileDocument,
    *,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> str:
    """Render a report in one self-contained file: no network, no scripts, escaped throughout.

    Parameters
    ----------
    profile
        The calibration that all else rests on; a result of another profile is marked as such.
    predictions
        In the order in which they are shown; may be empty.
    validation
        ``None`` if nothing was checked: the report then says so at the top.
    """
    return template("report.html.j2").render(
        head=headline(profile, predictions=predictions, validation=validation),
        measured=_measured(profile),
        measured_pictures=_machine_pictures(profile.machine),
        predicted=[table for entry in predictions for table in _predicted(entry)],
        predicted_pictures=list(_prediction_pictures(predictions)),
        wrong=_wrong(validation) if validation else [],
        wrong_pictures=_validation_pictures(validation) if validation else [],
        device_name=profile.machine.device_name,
        is_validated=validation is not None,
        undetermined=profile.machine.undetermined,
        sources=list(_sources(profile, predictions, validation)),
        environment=_environment_grid(profile.machine),
        definitions=DEFINITIONS,
    )


def _filled(*grids: Grid) -> list[Grid]:
    """Tables that have something to show."""
    return [table for table in grids if table.rows]


def _measured(document: ProfileDocument) -> list[Grid]:
    profile = document.machine
    return _filled(
        profile_grids.machine_grid(document),
        profile_grids.workload_grid(profile),
        profile_grids.steps_grid(profile),
        profile_grids.collective_grid(profile),
        profile_grids.overlap_grid(profile),
        profile_grids.rates_grid(profile),
        profile_grids.ddp_grid(profile),
    )


def _predicted(prediction: PredictionDocument) -> list[Grid]:
    return _filled(
        prediction_grids.prediction_grid(prediction),
        prediction_grids.measured_grid(prediction),
        prediction_grids.breakdown_grid(prediction),
        prediction_grids.evidence_grid(prediction),
    )


def _wrong(validation: ValidationDocument) -> list[Grid]:
    return _filled(
        validation_grids.summary_grid(validation),
        validation_grids.gates_grid(validation),
        validation_grids.validation_grid(validation),
        validation_grids.speedup_grid(validation),
        validation_grids.repeats_grid(validation),
    )


def _machine_pictures(profile: MeasuredMachine) -> list[Picture]:
    return [
        Picture(
            svg=inline_svg(figures.compute_figure(profile), prefix="compute", title="Compute time"),
            caption="Time of each phase of a micro-step as measured; n is the number of ranks at "
            "work, thin lines are the host issuing work.",
        ),
        Picture(
            svg=inline_svg(
                figures.collective_figure(profile), prefix="collective", title="Collectives"
            ),
            caption="Each collective alone on the machine, as measured.",
        ),
    ]


def _prediction_pictures(predictions: Sequence[PredictionDocument]) -> Iterator[Picture]:
    if predictions:
        yield Picture(
            svg=inline_svg(figures.speedup_figure(predictions), prefix="speedup", title="Speed-up"),
            caption="Lines: predicted (nominal). Bands: 90 % of outcomes should lie inside. Diamonds: "
            "real runs. Dashed grey: perfect scaling.",
        )
    for position, prediction in enumerate(predictions):
        yield Picture(
            svg=inline_svg(
                figures.breakdown_figure(prediction),
                prefix=f"breakdown{position}",
                title=f"Breakdown of a step of {prediction.workload}",
            ),
            caption="Where the predicted step goes; hatched: communication that is not "
            "hidden, and DDP's own work on buckets.",
        )


def _validation_pictures(validation: ValidationDocument) -> list[Picture]:
    return [
        Picture(
            svg=inline_svg(
                figures.parity_figure(validation), prefix="parity", title="Predicted and measured"
            ),
            caption="Each point is a fresh run that calibration had not seen; on the line, "
            "prediction and run agree; the grey band is 6 % to either side.",
        ),
        Picture(
            svg=inline_svg(
                figures.error_figure(validation), prefix="error", title="Error of each setting"
            ),
            caption="A bar that crosses zero: the interval held the measured time.",
        ),
    ]


def inline_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Text of a figure for the body of a page; its ids start with the prefix, so none clash."""
    text = figures.figure_bytes(figure, format="svg").decode()
    text = _ID.sub(rf"\g<1>{prefix}-", text[text.index("<svg") :])
    safe = re.sub(r"[^\w .-]", "", title)
    return text.replace("<svg ", f'<svg role="img" aria-label="{safe}" ', 1)


def _sources(
    profile: ProfileDocument,
    predictions: Sequence[PredictionDocument],
    validation: ValidationDocument | None,
) -> Iterator[Grid]:
    raw = {"SHA-256 of the raw observations": profile.observations_sha256}
    yield _source("Profile", profile.provenance, {"Digest": profile.digest, **raw})
    for prediction in predictions:
        digests = {
            "Digest": prediction.digest,
            "Rests on profile": prediction.profile_digest,
            "Rests on validation": prediction.validation_digest or "none",
        }
        title = f"Prediction: {prediction.workload}, {prediction.scaling} scaling"
        yield _source(title, prediction.provenance, digests)
    if validation is not None:
        digests = {
            "Digest": validation.digest,
            "Rests on profile": validation.profile_digest,
            "SHA-256 of the raw observations": validation.observations_sha256,
        }
        yield _source("Validation", validation.provenance, digests)


def _source(title: str, provenance: Provenance, digests: dict[str, str]) -> Grid:
    facts = {
        **digests,
        "Made": provenance.created_utc,
        "Command": shlex.join(provenance.command_line),
        "Git commit": provenance.git_commit or "not recorded",
        "Seed": str(provenance.seed),
        "Host fingerprint": provenance.host_fingerprint,
        "Versions": listed(f"{name} {text}" for name, text in provenance.versions.items()),
    }
    return grid(title, text=("What", "Value"), rows=facts.items())


def _environment_grid(profile: MeasuredMachine) -> Grid:
    rows = _flat("", profile.environment)
    return grid("Environment, as the calibration found it", text=("Fact", "Value"), rows=rows)


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), entry)
    else:
        yield path, "none" if value in (None, [], {}) else str(value)
