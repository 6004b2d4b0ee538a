"""The documentation as a site: it builds without a warning, and needs no network to be read."""

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from tests.accessibility import CHROMIUM, VIEWS, chromium, is_readable

pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
pytestmark = pytest.mark.long
ROOT: Final = Path(__file__).resolve().parents[1]
_FETCHED: Final = re.compile(
    r'<(?:script|img|iframe)[^>]*?\ssrc="?([^"\s>]+)|<link[^>]*?\shref="?([^"\s>]+)'
)
_LINK: Final = re.compile(r'<a[^>]*?\shref="?([^"\s>#]+)')
#: Two thirds of every page, and the same on all of them: judged on the first.
_FRAME: Final = (".md-header", ".md-sidebar", ".md-footer")
#: What is a page's own, in the frame of the page that is open; the theme's script then treats it as after loading.
_SHOWN: Final = """async html => {
    const other = new DOMParser().parseFromString(html, "text/html");
    for (const own of [".md-content", "[data-md-component=skip]"])
        document.querySelector(own).replaceWith(document.adoptNode(other.querySelector(own)));
    window.document$.next(document);
    await new Promise(done => setTimeout(() => requestAnimationFrame(done), 50));
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "-", "-d", str(folder)]
    with (ROOT / "docs" / "mkdocs.yml").open(encoding="utf-8") as config:
        built = subprocess.run(
            command, check=False, cwd=ROOT, stdin=config, capture_output=True, text=True
        )
    assert built.returncode == 0, built.stderr
    return folder


def test_links_and_pictures_resolve_inside_the_site(site: Path) -> None:
    missing = [
        f"{page.relative_to(site)}: {link}"
        for page in site.rglob("*.html")
        if page.name != "404.html"
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / unquote(link)).exists()
    ]
    assert not missing


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for script, sheet in _FETCHED.findall(page.read_text(encoding="utf-8")):
            assert "://" not in script + sheet, page
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\(\s*[\"']?(?:https?:)?//", sheets)


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """A GPU user's ten minutes come first."""
    start = (site / "index.html").read_text(encoding="utf-8")
    assert start.index("your-gpu.html") < start.index("tutorial.html")
    named = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named] == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
def test_every_page_is_readable_and_asks_no_network(site: Path) -> None:
    """Each in one view, desktop or phone; neighbours in different ones."""
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    with chromium() as browser:
        for start, (width, scheme) in enumerate(VIEWS):
            size = {"width": width, "height": 844}
            context = browser.new_context(viewport=size, color_scheme=scheme)
            page = context.new_page()
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            first, *others = pages[start :: len(VIEWS)]
            page.goto(first.as_uri())
            is_readable(page, width=width)
            for path in others:
                page.evaluate(_SHOWN, path.read_text(encoding="utf-8"))
                with suppress(AssertionError):
                    is_readable(page, width=width, without=_FRAME)
                    continue
                # Loaded again, it is as users see it.
                page.goto(path.as_uri())
                is_readable(page, width=width, without=_FRAME)
            assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
            context.close()
