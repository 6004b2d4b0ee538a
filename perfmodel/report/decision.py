"""The answer to a plan as a page for the person who signs."""

import shlex
from collections.abc import Callable
from typing import Any, Final

from perfmodel.documents.budget import invented_prices
from perfmodel.documents.plan import PlanDocument
from perfmodel.report import DEFINITIONS
from perfmodel.report.figures import Picture, front_figure, tornado_figure
from perfmodel.report.html import LinkedNumbers, template
from perfmodel.report.plan import more_money_lines

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
