"""How fast the what-if page is in a real Chromium: ``python -m tests.benchmarks.bench_page``.

Prints JSON: first paint of a fresh page, and the time from a question to its drawn answer for moves of
each kind, none of which was asked before. It needs Chromium and playwright, and a quiet machine.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, sync_playwright

ROOT: Final = Path(__file__).resolve().parents[2]
PROFILE: Final = "docs/records/calibration/profile.json"
WORKLOAD: Final = "resnet18"
NUM_LOADS: Final = 7
NUM_MOVES: Final = 7
_DONE: Final = "body[data-answered]:not([data-asking])"
_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> int:
    """Serve the recorded profile, measure, print."""
    command = [*(sys.executable, "-m", "perfmodel", "serve", "--port", "0"), "--profile", PROFILE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.match(r"(http://\S+)", server.stdout.readline())
        assert found is not None
        try:
            result = measure(found[1])
        finally:
            server.terminate()
    sys.stdout.write(f"{json.dumps(result, indent=1)}\n")
    return 0


def measure(address: str) -> dict[str, Any]:
    """First paints, then moves."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        paints_ms = []
        for _ in range(NUM_LOADS):
            page = browser.new_context().new_page()
            opened(page, address)
            paints_ms.append(float(page.evaluate(_PAINT)))
            page.context.close()
        page = browser.new_page()
        opened(page, address)
        page.select_option("#workload", WORKLOAD)
        page.wait_for_selector(_DONE)
        moves = {name: _moves(page, name, key) for name, key in _MOVES.items()}
        browser.close()
    every = [move for samples in moves.values() for move in samples]
    return {
        "workload": WORKLOAD,
        "first_paint_ms": _summary(paints_ms),
        "update_ms": _summary(every),
        "update_ms_by_slider": {name: _summary(samples) for name, samples in moves.items()},
    }


def opened(page: Page, address: str) -> None:
    """Load the page and wait for its first answer."""
    page.goto(address)
    page.wait_for_selector(_DONE)


_MOVES: Final = {
    "devices": "ArrowRight",
    "batch": "ArrowLeft",
    "bandwidth": "ArrowRight",
    "latency": "ArrowLeft",
    "speed": "ArrowRight",
}


def _moves(page: Page, slider: str, key: str) -> list[float]:
    """Times of single steps of a slider, each of which asks something new. [ms]"""
    page.focus(f"#{slider}")
    samples = []
    for _ in range(NUM_MOVES):
        before = page.get_attribute(f"#{slider}", "aria-valuetext")
        page.keyboard.press(key)
        page.wait_for_selector(_DONE)
        if page.get_attribute(f"#{slider}", "aria-valuetext") != before:
            samples.append(float(page.get_attribute("body", "data-update-ms") or "nan"))
    return samples


def _summary(samples: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(samples), 1),
        "p95": round(statistics.quantiles(samples, n=20, method="inclusive")[-1], 1),
        "worst": round(max(samples), 1),
        "count": len(samples),
    }


if __name__ == "__main__":
    sys.exit(main())
