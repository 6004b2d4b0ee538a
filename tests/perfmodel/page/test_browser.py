"""The page in a real Chromium: moved by mouse and by keyboard, its numbers those of the command line."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from perfmodel.documents.prediction import WhatIfDocument
from perfmodel.report import count_interval, duration_interval, interval
from perfmodel.statistics import Interval
from tests.accessibility import VIEWS, chromium, is_readable, needs_browser
from tests.existing import existing
from tests.perfmodel.cli.command import Run
from tests.perfmodel.cost.large_samples import document

ROOT: Final = Path(__file__).resolve().parents[3]
PROFILE: Final = "docs/records/calibration/profile.json"
WAIT_MS: Final = 30_000

pytestmark = needs_browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own process."""
    inferred = tmp_path_factory.mktemp("runs") / "inferred.json"
    document().write(inferred)
    files = f"--profile {PROFILE} --profile {inferred} --cluster docs/clusters/ethernet.toml"
    command = [sys.executable, "-m", "perfmodel", "serve", "--port", "0", *files.split()]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = existing(re.match(r"(http://127\.0\.0\.1:\d+/)", server.stdout.readline()))
        yield found[1]
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that complains of nothing and asks nobody but its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda asked: problems.extend(foreign(asked.url, address)))
    found.set_default_timeout(WAIT_MS)
    found.goto(address)
    settled(found)
    yield found
    context.close()
    assert problems == []


def foreign(url: str, address: str) -> list[str]:
    """The address of a request, if it goes anywhere else than to the server."""
    return [] if url.startswith((address, "data:", "blob:")) else [url]


def settled(page: Any) -> None:
    """Wait until the newest question is answered."""
    page.wait_for_selector("body[data-answered]:not([data-asking])")


def shown(page: Any, name: str) -> tuple[str, str]:
    """Middle and range of a main figure, without the unit of the page's own."""
    value = page.locator(f"#{name}-value").text_content()
    return value, page.locator(f"#{name} .range").text_content()


def same_as_the_command_line(page: Any, run: Run) -> None:
    """Figures are those that the command below the answer prints."""
    with contextlib.chdir(ROOT):
        told = run(*page.locator("#command").text_content().split()[1:], "--json")
    point = WhatIfDocument.of_text(told.stdout).scenarios[-1].point
    assert shown(page, "speedup") == tuple(interval(point.speedup).split("\n"))
    assert shown(page, "step") == tuple(duration_interval(point.step_s).split("\n"))
    middle, bounds = count_interval(point.samples_per_s).split("\n")
    value, bounds_shown = shown(page, "throughput")
    assert value.removesuffix("samples/s").strip() == middle
    assert bounds_shown == bounds


def test_numbers_are_those_of_the_command_line(page: Any, run: Run) -> None:
    page.select_option("#workload", "resnet18")
    page.select_option("#gradients", "bf16")
    page.fill("#devices-number", "12")
    settled(page)
    assert "--set gradients=bf16" in page.locator("#command").text_content()
    same_as_the_command_line(page, run)


def test_a_slider_follows_the_mouse(page: Any, run: Run) -> None:
    before = shown(page, "speedup")
    box = page.locator("#devices").bounding_box()
    middle = box["y"] + box["height"] / 2
    start = page.evaluate("devices => devices.value / devices.max", page.query_selector("#devices"))
    page.mouse.move(box["x"] + 8 + start * (box["width"] - 16), middle)
    page.mouse.down()
    for part in range(1, 11):
        page.mouse.move(box["x"] + box["width"] * (start + (0.6 - start) * part / 10), middle)
    page.mouse.up()
    settled(page)
    assert int(page.input_value("#devices-number")) > 64
    assert shown(page, "speedup") != before
    same_as_the_command_line(page, run)


def test_everything_is_reached_and_moved_by_keyboard(page: Any, run: Run) -> None:
    page.focus("#bandwidth")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert "--set network.bandwidth=2x" in page.locator("#command").text_content()
    assert page.locator("#contrast-value").text_content().endswith("x as fast")
    assert "2x" in page.get_attribute("#bandwidth", "aria-valuetext")
    same_as_the_command_line(page, run)
    page.focus("#profile")
    reached = {page.evaluate("document.activeElement.id")}
    for _ in range(28):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    controls = "workload devices batch latency speed precision link cluster capacity"
    assert set(controls.split()) <= reached


def test_links_and_clusters_are_chosen_from_lists(page: Any, run: Run) -> None:
    before = shown(page, "step")
    assert page.locator("#uplink-row").is_hidden()
    page.select_option("#cluster", "ethernet")
    settled(page)
    page.fill("#devices-number", "32")
    settled(page)
    page.select_option("#link", "eth-400")
    page.select_option("#uplink", "rack:100Gb/s")
    settled(page)
    command = page.locator("#command").text_content()
    assert "--set cluster=docs/clusters/ethernet.toml" in command
    assert "--set cluster.bandwidth=rack:100Gb/s" in command
    assert shown(page, "step") != before
    same_as_the_command_line(page, run)
    page.fill("#devices-number", "64")
    page.wait_for_selector("#problem:not([hidden])")
    assert "at most 32" in page.text_content("#problem")
    assert page.locator("#device").is_disabled()
    assert "perfmodel trace" in page.text_content("#device-hint")


def test_a_click_on_the_curve_chooses_its_devices(page: Any, run: Run) -> None:
    page.locator('circle[data-devices="64"]').click()
    settled(page)
    assert page.input_value("#devices-number") == "64"
    same_as_the_command_line(page, run)


def test_the_curve_is_drawn_as_efficiency_and_on_linear_axes(page: Any) -> None:
    """The band ends at the ideal; a line marks the devices that were measured."""
    drawn = "() => document.querySelector('#curve .{}').getBBox().{}"
    page.focus("#curve-measure")
    page.keyboard.press("ArrowDown")
    assert page.text_content("#curve-title") == "Efficiency over devices"
    assert page.text_content("#curve-readout").startswith(
        f"8 devices: {page.text_content('#efficiency-value')}"
    )
    ideal, band = (page.evaluate(drawn.format(name, "y")) for name in ("ideal", "band"))
    assert band >= ideal - 0.1
    page.select_option("#curve-axes", "linear")
    assert page.locator("#curve text", has_text="measured up to 2").count() == 1
    assert page.locator("#curve rect.beyond").count() == 1
    assert "links assumed: what it rests on" in page.text_content("#curve-readout")
    assert page.locator("#curve circle.dot").count() == 5


def test_what_is_not_feasible_is_said_and_mended(page: Any, run: Run) -> None:
    page.check("#strong")
    page.fill("#devices-number", "7")
    page.wait_for_selector("#problem:not([hidden])")
    assert "multiple of devices" in page.text_content("#problem")
    page.fill("#batch-number", "700")
    page.wait_for_selector("#problem", state="hidden")
    same_as_the_command_line(page, run)


_CONTROLS: Final = """() => Object.fromEntries(
    [...document.querySelectorAll('form input, form select, form output, form .hint')]
        .filter(each => each.offsetParent)
        .map((each, i) => [each.id || i, [each.value ?? each.textContent, each.max ?? '', each.disabled ?? false,
            each.getAttribute('aria-valuetext') ?? '', [...each.options ?? []].map(o => o.textContent).join()]]))"""
_ALL_MOVED: Final = """() => { for (const each of document.querySelectorAll('form input, form select')) {
    if (!each.offsetParent || each.disabled || each.id === 'profile' || each.id === 'workload') continue;
    if (each.type === 'range') each.value = each.max;
    else if (each.type === 'number') each.value = 17;
    else if (each.options) each.selectedIndex = each.options.length - 1;
    each.dispatchEvent(new Event('input')); each.dispatchEvent(new Event('change')); } }"""


def test_no_control_is_left_from_another_machine(page: Any, address: str) -> None:
    """Whatever was moved before: a machine shows the controls with which it opens."""
    page.select_option("#profile", "inferred")
    settled(page)
    other = page.evaluate(_CONTROLS)
    page.goto("about:blank")
    page.goto(address)
    settled(page)
    opened = page.evaluate(_CONTROLS)
    measured = page.input_value("#profile")
    page.evaluate(_ALL_MOVED)
    page.select_option("#profile", "inferred")
    settled(page)
    assert page.evaluate(_CONTROLS) == other
    page.evaluate(_ALL_MOVED)
    page.select_option("#profile", measured)
    settled(page)
    assert page.evaluate(_CONTROLS) == opened


def test_a_logged_speed_is_judged(page: Any) -> None:
    page.fill("#logged", "30")
    page.select_option("#logged-unit", "s")
    settled(page)
    assert page.text_content("#verdict").startswith("Slower than normal: a step of 30.0 s")
    assert "perfmodel diagnose lenet --profile" in page.text_content("#diagnosis-command")
    page.fill("#logged", "")
    settled(page)
    assert page.locator("#diagnosis").is_hidden()


def test_a_layout_is_chosen_by_its_parts(page: Any) -> None:
    page.select_option("#profile", "inferred")
    settled(page)
    assert page.locator("#bandwidth").is_hidden()
    assert page.input_value("#workload") == "llama2-7b"
    assert "zero=3" in page.locator("#command").text_content()
    page.select_option("#tp", "2")
    page.select_option("#pp", "2")
    settled(page)
    page.select_option("#curve-measure", "efficiency")
    assert float(re.findall(r"-([\d.]+)]", page.text_content("#curve-readout"))[0]) <= 100
    assert page.input_value("#zero") == "1"  # what a pipeline allows
    assert page.locator("#zero option:disabled").count() == 2
    assert "tp=2 pp=2" in page.locator("#command").text_content()
    assert "fits" in page.text_content("#memory-verdict")
    page.fill("#devices-number", "6")
    page.wait_for_selector("#problem:not([hidden])")
    assert "must divide the devices" in page.text_content("#problem")


def test_the_address_keeps_what_was_chosen(page: Any, browser: Any) -> None:
    page.fill("#devices-number", "24")
    page.fill("#capacity", "12")
    settled(page)
    other = browser.new_page()
    other.goto(page.url)
    settled(other)
    assert other.input_value("#devices-number") == "24"
    assert other.input_value("#capacity") == "12"
    assert shown(other, "step") == shown(page, "step")
    other.close()


def test_numbers_are_written_as_the_command_line_writes_them(browser: Any) -> None:
    """The script rounds and scales by the rules of ``report``, over fourteen decades."""
    middles = [10 ** (power / 37) for power in range(-260, 261)]
    edges = [1, 9.995, 99.95, 999.4, 999.5, 0.9995, 59.99, 60, 119.9, 120, 7200, 0.00099951]
    cases = [Interval(p5=0.83 * m, nominal=m, p95=1.37 * m) for m in (*middles, *edges)]
    source = (ROOT / "perfmodel/page/static/format.js").read_text(encoding="utf-8")
    script = """cases => {
        const text = ({value, unit, range}) => `${value}${unit && " " + unit}\n${range}`;
        return cases.map(c => [ranged(c), rangedDuration(c), rangedCount(c, "")].map(text));
    }"""
    page = browser.new_page()
    page.add_script_tag(content=source)
    written = page.evaluate(script, [asdict(case) for case in cases])
    page.close()
    assert written == [[interval(c), duration_interval(c), count_interval(c)] for c in cases]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_fits_and_can_be_read(browser: Any, address: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    settled(page)
    page.fill("#logged", "2")
    page.select_option("#gradients", "bf16")
    settled(page)
    is_readable(page, width=width)
    if width < 600:  # nothing of the form shows beside the answer that stays on top
        wide = "document.{}.getBoundingClientRect().width"
        assert page.evaluate(wide.format("getElementById('figures')")) == page.evaluate(
            wide.format("querySelector('form')")
        )
    page.select_option("#profile", "inferred")
    settled(page)
    page.fill("#devices-number", "9")
    settled(page)
    is_readable(page, width=width)
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert contrast_ratio(ground, ink) >= 7
    soft = page.evaluate("getComputedStyle(document.getElementById('setting')).color")
    assert contrast_ratio(ground, soft) >= 4.5
    assert (luminance(ground) < 0.2) == (scheme == "dark")
    context.close()


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast_ratio(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
