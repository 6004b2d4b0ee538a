"""Both HTML reports in a real Chromium: no sideways scroll, no violation, an answer on the first screen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.report.html import decision_html, report_html
from tests.accessibility import VIEWS, chromium, fits, is_readable, needs_browser
from tests.perfmodel.plan.plans import TODAY, written
from tests.perfmodel.report.samples import plain_prediction, plain_profile, plain_validation

pytestmark = needs_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    report, _ = report_html(
        plain_profile(),
        predictions=[plain_prediction(workload=name) for name in ("a", "b", "c", "d")],
        judged=plain_validation(),
    )
    decision = decision_html(pm.plan_options(written(folder), today=TODAY))
    found = {"report": folder / "report.html", "decision": folder / "decision.html"}
    for name, text in (("report", report), ("decision", decision)):
        found[name].write_text(text, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["report", "decision"])
def test_it_is_readable(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.goto(pages[name].as_uri())
    # Open, a page shows all that it shows closed: one view tells whether closing does harm.
    if (width, scheme) == VIEWS[0]:
        is_readable(page, width=width)
    fits(page, width=width)
    assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 844
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    is_readable(page, width=width)
    context.close()
