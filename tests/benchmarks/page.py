"""How soon the what-if page paints and follows a slider: ``python -m tests.benchmarks.page`` prints the rows.

In a real Chromium, by the clock on the wall, which neighbours disturb.
"""

import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

from tests.accessibility import chromium

SERVED: Final = {
    "machines that ship": ("--profile", "dgx-a100"),
    "a measured machine": ("--profile", "docs/records/calibration/profile.json"),
}
#: First paint and what follows a slider. [ms]
MOST_MS: Final = {"first paint": 500, "update": 150}
_SLIDERS: Final = ("devices", "batch", "bandwidth")
#: To every place of a slider and back: milliseconds until the figures, and until the curve.
_MOVED: Final = """async id => {
    const frame = () => new Promise(requestAnimationFrame);
    const [slider, body, found] = [document.getElementById(id), document.body.dataset, []];
    const places = Array.from({ length: Number(slider.max) + 1 }, (_, i) => i);
    for (const place of [...places, ...places.reverse()].slice(1, 25)) {
        delete body.updateMs;
        const start = performance.now();
        slider.value = place;
        slider.dispatchEvent(new Event('input'));
        while (!body.updateMs) await frame();
        const figures = performance.now() - start;
        while ('asking' in body) await frame();
        found.push([figures, performance.now() - start]);
    }
    return found;
}"""
_PAINTED: Final = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """Address of a server of its own process."""
    command = [sys.executable, "-m", "perfmodel", "serve", "--port", "0", *options]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.match(r"(http://\S+/)", server.stdout.readline())
        assert found is not None
        yield found[1]
        server.terminate()


def rows() -> list[str]:
    """A paragraph and a table in Markdown."""
    lines = [
        (
            "The what-if page in Chromium (`python -m tests.benchmarks.page`). Times by the clock on the wall, "
            f"from the start of a request or the move of a slider; load average {os.getloadavg()[0]:.0f} on "
            f"{os.cpu_count()} cores. Targets: first paint {MOST_MS['first paint']} ms, figures "
            f"{MOST_MS['update']} ms."
        ),
        "",
        "| page | server sends it | first paint | slider | figures, median | p90 | curve too | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, options in SERVED.items():
        with served(options) as address, chromium() as browser:
            start = time.monotonic()
            with urllib.request.urlopen(address) as reply:  # noqa: S310 - our own server
                reply.read()
            sent_ms = 1e3 * (time.monotonic() - start)
            painted_ms = statistics.median(_painted_ms(browser, address) for _ in range(5))
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(address)
            page.wait_for_selector("body[data-answered]:not([data-asking])")
            for slider in _SLIDERS:
                pairs = page.evaluate(_MOVED, slider)
                figures = sorted(pair[0] for pair in pairs)
                median_ms = statistics.median(figures)
                is_kept = painted_ms <= MOST_MS["first paint"] and median_ms <= MOST_MS["update"]
                lines.append(
                    f"| {name} | {sent_ms:.0f} ms | {painted_ms:.0f} ms | {slider} | {median_ms:.0f} ms | "
                    f"{figures[len(figures) * 9 // 10]:.0f} ms | "
                    f"{statistics.median(pair[1] for pair in pairs):.0f} ms | "
                    f"{'kept' if is_kept else '**missed**'} |"
                )
    return lines


def _painted_ms(browser: Any, address: str) -> float:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("body[data-answered]")
    found = float(page.evaluate(_PAINTED))
    page.close()
    return found


if __name__ == "__main__":
    for line in rows():
        typer.echo(line)
