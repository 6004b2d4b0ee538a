"""The report on a plan: every figure in its text is the figure in the JSON, and nothing is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.documents.plan import PlanDocument
from perfmodel.report.html import decision_html
from perfmodel.units import PREFIXES
from tests.perfmodel.plan.plans import PLAN, TODAY, written
from tests.perfmodel.report.test_html import loads_and_runs_nothing, read

UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "%": 0.01}
BYTES = {f"{prefix}B": factor for prefix, factor in PREFIXES.items()}


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list) else values[key]
    return values


def agrees(text: str, value: object) -> bool:
    """Whether a shown number is the value, within half of its last digit, in the unit it shows."""
    if isinstance(value, str):
        return text == value
    assert isinstance(value, int | float)
    match = re.fullmatch(r"(-?[\d,]*\.?\d+(?:e[+-]\d+)?)\s*(\S*)", text)
    assert match is not None, text
    digits = match[1].replace(",", "")
    factor = (UNITS | BYTES | {"": 1.0})[match[2]]
    mantissa, _, exponent = digits.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(float(digits) * factor - value) <= 0.5001 * 10.0**-decimals * factor


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> PlanDocument:
    return pm.plan_options(written(tmp_path_factory.mktemp("plan")), today=TODAY)


@pytest.fixture(scope="module")
def page(document: PlanDocument) -> str:
    return decision_html(document)


def test_the_figures_of_the_text_are_those_of_the_json(page: str, document: PlanDocument) -> None:
    values = json.loads(document.model_dump_json())
    found = read(page)
    assert len(found.numbers) > 100
    for text, path, target in found.numbers:
        assert agrees(text, at(values, path)), (text, path, at(values, path))
        assert target.removeprefix("#") in found.ids


def test_no_number_of_the_first_page_stands_without_its_source(page: str) -> None:
    """Outside links and the planner's own sentences there are no digits but 90 %, 95 % and 1 of 20."""
    first = page[page.index('id="recommendation"') : page.index('id="basis"')]
    own = r'<li><strong>.*?</strong></li>|<p class="offer">.*?</p>'
    first = re.sub(own, "", first, flags=re.DOTALL)
    bare = re.sub(r"<a .*?</a>|<[^>]*>", "", first, flags=re.DOTALL)
    bare = re.sub(r"90&nbsp;%|95&nbsp;%|1 of 20", "", bare)
    assert re.findall(r"\d[\d.,]*", bare) == []


def test_the_page_is_balanced_and_loads_nothing(page: str) -> None:
    reader = read(page)
    assert {"recommendation", "risk", "basis", "change", "others", "options", "sources"} <= (
        reader.sections
    )
    loads_and_runs_nothing(page)


def test_what_is_not_feasible_is_said_at_the_top(tmp_path: Path) -> None:
    text = PLAN.replace("2026-12-21", "2026-11-22").replace('name = "slow"', 'name = "<b>slow"')
    page = decision_html(pm.plan_options(written(tmp_path, text), today=TODAY))
    read(page)
    assert "Not feasible: no candidate keeps all limits" in page
    assert "Recommendation" not in page
    assert "<b>slow" not in page
