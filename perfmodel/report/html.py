"""Pages for the person who signs, each one file that a browser shows and a printer prints: a report, a decision."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from perfmodel.documents.budget import invented_prices
from perfmodel.documents.plan import PlanDocument
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
    table,
    validation,
)
from perfmodel.report.figures import (
    Picture,
    front_figure,
    judged_pictures,
    predicted_pictures,
    tornado_figure,
)
from perfmodel.report.plan import more_money_lines
from perfmodel.report.validation import verdict
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
_WRONG: Final[tuple[Callable[[ValidationDocument], Table], ...]] = (
    lambda judged: table(
        "Errors, and gates of before the run",
        validation.summary_lines(judged),
        {"<In words": str},
    ),
    validation.steps_table,
    validation.speedups_table,
    validation.repeats_table,
)


def _filled(document: _Shown, *tables: Callable[[_Shown], Table]) -> list[Table]:
    """Tables of a document that have something to show."""
    return [shown for of in tables if (shown := of(document)).rows]


def _source(
    title: str, document: ProfileDocument | PredictionDocument | ValidationDocument
) -> Table:
    """Digests of a document and of what it rests on, and who made it."""
    digests = {name: value for name, value in document if name.endswith(("_digest", "_sha256"))}
    made = document.provenance.model_dump(mode="json")
    made["command_line"] = shlex.join(document.provenance.command_line)
    return facts(title, leaves({"digest": document.digest, **digests, **made}))


# The answer to a plan.

#: Words that the page does without.
_UNSAID: Final = ("Exposed communication", "Error", "Noise floor", "algbw", "busbw")
_LAYOUT: Final = (
    "How the model is spread over the devices, for the engineers who run it: dp copies of the model, each "
    "over tp x pp x cp devices; zero divides what the copies hold alike; accumulation counts passes per step; "
    "recompute saves memory for time. It needs no decision: the fastest one that fits was taken, unless the "
    "plan fixes it."
)
_MOST_SWINGS: Final = 3
_MOST_CAVEATS: Final = 4
#: Warnings, and options that lost, on the first page.
_MOST_NAMED: Final = 3


def decision_html(document: PlanDocument) -> str:
    """Render the answer to a plan in one self-contained file: no network, no scripts, escaped throughout.

    Every number is read from the document and links to a row that gives its place there, its exact
    value and where it comes from.
    """
    numbers = LinkedNumbers(document.model_dump(mode="json"), _origins(document))
    definitions = {word: text for word, text in DEFINITIONS.items() if word not in _UNSAID}
    if document.plan.work.model is not None:
        definitions |= {"Layout": _LAYOUT}
    return template("decision.html.j2").render(
        document=document,
        plan=document.plan,
        first=document.options[0],
        rivals=document.options[1:],
        n=numbers.show,
        interval=numbers.interval,
        numbers=numbers,
        is_feasible=bool(document.ranked),
        most_swings=_MOST_SWINGS,
        most_caveats=_MOST_CAVEATS,
        most_named=_MOST_NAMED,
        machine_of=_machine_places(document),
        winner_option=[option.name for option in document.plan.option].index(
            document.options[0].row.option
        ),
        prices=[(place, *rest) for place, rest in enumerate(_prices(document))],
        pictures=[
            Picture(
                "front",
                front_figure(document),
                "Time and cost",
                "Ranked candidates, the front between time and cost, and the best of every option; "
                "the cross is the 90 % interval of the first one.",
            ),
            Picture(
                "tornado",
                tornado_figure(document),
                "Sensitivity",
                "Failure rates by a factor of 2, prices by 10 %; all else over the range that holds "
                "90 % of its uncertainty.",
            ),
        ],
        command=shlex.join(document.command_line),
        digest=document.digest,
        banners=invented_prices(document.plan.prices()),
        offers=more_money_lines(document) if document.ranked else (),
        devices={name: machine.device for name, machine in document.machine_of.items()},
        definitions=definitions,
    )


def _machine_places(document: PlanDocument) -> dict[str, int]:
    """Place of its machine, by option."""
    return {name: document.machines.index(machine) for name, machine in document.machine_of.items()}


def _prices(document: PlanDocument) -> list[tuple[str, str, str]]:
    """Option, which price, and the path of it in the document."""
    return [
        (option.name, key, f"plan.option.{place}.{key}")
        for place, option in enumerate(document.plan.option)
        for key in ("price", "energy_price", "setup_price")
        if getattr(option, key) is not None
    ]


def _origins(document: PlanDocument) -> Callable[[str], tuple[str, str]]:
    """Where the value at a path comes from, and the id of the row that tells more."""
    places = _machine_places(document)
    prices = {path: place for place, (_, _, path) in enumerate(_prices(document))}

    def origin(path: str) -> tuple[str, str]:
        keys = path.split(".")
        if keys[0] == "plan":
            stem = ".".join(keys[:4])
            if stem in prices:
                return "price in the plan file, with its source", f"price-{prices[stem]}"
            return f"the plan file, {'.'.join(keys[1:])}", ""
        if keys[0] == "machines":
            return "the profile, or its validation", f"machine-{keys[1]}"
        if keys[0] in {"ranked", "front", "options"}:
            found: Any = getattr(document, keys[0])[int(keys[1])]
            row = found.row if keys[0] == "options" else found
            last = "a candidate of the plan" if keys[-1] in _CANDIDATE else "computed from the row"
            words = next((text for part, text in _ROW_ORIGINS.items() if part in path), last)
            return words, f"machine-{places[row.option]}"
        first = document.options[0].row.option
        return _OTHERS.get(keys[0], "counted by the planner"), f"machine-{places[first]}"

    return origin


_OTHERS: Final = {"tornado": "the plan computed again with one assumption at its end"}
_CANDIDATE: Final = frozenset({"devices", "micro_batch"})
#: Part of the path of a value of a row to its origin; the first that fits.
_ROW_ORIGINS: Final = {
    ".cost.": "predicted time x devices x the prices of the option",
    ".elapsed_s.": "predicted step x steps, with the stops of the failure model",
    ".step_s.": "predicted from the profile",
    "reason": "compared with the first, or with the limits",
    "probability": "share of the draws of the prediction",
    "break_even": "price at which its cost is that of the first",
    "smallest_devices": "fewest devices whose chance to be in time is enough",
    "end": "start of the plan + predicted time",
}
