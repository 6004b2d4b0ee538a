"""A page in a real Chromium: wide and narrow, light and dark, judged by axe-core."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

CHROMIUM: Final = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
#: Width of the window and the scheme of colours; styles ask for one of them at a time, so that each stands once.
VIEWS: Final = ((1280, "light"), (390, "dark"))
needs_browser: Final = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test skips without playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM)
        yield found
        found.close()


def fits(page: Any, *, width: int) -> None:
    """Nothing scrolls sideways."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def is_readable(page: Any, *, width: int, without: Sequence[str] = ()) -> None:
    """Nothing scrolls sideways, and axe-core finds no violation; ``without``: parts of it, as CSS selects them."""
    fits(page, width=width)
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe.Axe().axe_script)
    # Lists of what passes are long, and what a page loads is its own affair.
    options = {"resultTypes": ["violations"], "preload": False}
    parts = {"exclude": [[each] for each in without]} if without else "document"
    script = f"axe.run({parts}, {json.dumps(options)})"
    found = page.evaluate(script)["violations"]
    told = [(each["id"], [node["target"] for node in each["nodes"]][:5]) for each in found]
    assert told == []
