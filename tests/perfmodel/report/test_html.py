"""The report: one file, no network, escaped, complete, with an answer at the top."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from perfmodel.report import figures
from perfmodel.report.html import report_html
from tests.perfmodel.report.samples import (
    PROVENANCE,
    plain_prediction,
    plain_profile,
    plain_validation,
)

VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADING = ("src", "href", "xlink:href", "data", "action", "srcset")
SECTIONS = {"verdict", "predicted", "wrong", "measured", "sources", "definitions"}


class Reader(HTMLParser):
    """Ids, attributes, text and linked numbers of a page; refuses tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sections: set[str] = set()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.numbers: list[tuple[str, str, str]] = []
        """Text, path and target."""
        self._link: dict[str, str | None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self._link = values if tag == "a" and "data-path" in values else {}
        if tag not in VOID:
            self.open.append(tag)
        if found := values.get("id"):
            self.ids.append(found)
            self.sections |= {found} if tag == "section" else set()
        self.loads += [values[name] or "" for name in LOADING if name in values]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._link:
            self.numbers.append((data, str(self._link["data-path"]), str(self._link["href"])))
            self._link = {}


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def loads_and_runs_nothing(page: str) -> None:
    reader = read(page)
    assert all(load.startswith("#") for load in reader.loads)
    assert reader.tags.isdisjoint({"script", "iframe", "link", "img", "object", "embed"})
    assert re.findall(r"url\((?!#)|@import", page) == []
    assert "default-src 'none'" in page
    assert "@media print" in page
    assert len(reader.ids) == len(set(reader.ids))


@pytest.fixture(scope="module")
def page() -> str:
    predictions = [plain_prediction(), plain_prediction(workload="lenet", scaling="strong")]
    return report_html(plain_profile(), predictions=predictions, judged=plain_validation())[0]


def test_page_loads_nothing_and_runs_nothing(page: str) -> None:
    reader = read(page)
    assert reader.sections == SECTIONS
    loads_and_runs_nothing(page)


def test_every_reference_is_met(page: str) -> None:
    targets = re.findall(r'(?:href="|url\()#([^")]+)', page)
    assert targets
    assert set(targets) <= set(read(page).ids)


def test_top_says_verdict_and_three_numbers(page: str) -> None:
    words = " ".join(read(page[: page.index("</header>")] + "</header></body></html>").words)
    for text in ("PASSED: 2 of 2 gates held", "53.6 x", "50.9 to 56.2", "3.1 %", "50.0 %"):
        assert text in words
    assert "too fast by 1.4 % on average" in words
    assert "Beyond what ran on this machine." in words
    assert "No fresh run used more than 2 devices" in words
    assert "beyond the 2 that were measured" in words


def test_every_number_and_its_source_is_there(page: str) -> None:
    words = " ".join(read(page).words)
    prediction, profile, validation = plain_prediction(), plain_profile(), plain_validation()
    for text in (
        *(profile.digest, prediction.digest, validation.digest),
        *(profile.observations_sha256, validation.observations_sha256),
        *(PROVENANCE.command_line[2], str(PROVENANCE.git_commit), PROVENANCE.host_fingerprint),
        *("torch 2.9.0", "cpu.model", "6 rounds", "5.0 % on 1 rank", "+2.1 %", "99.9 GFLOP/s"),
        *("-1.4 %", "8.8 %", "131 ms", "132 ms", "1.84", "+1.6 %", "2,097,152"),
        *("never overlapped", "Weak scaling", "Exposed communication", "Evidence: assumed"),
        *("[121-133]", "[0.95-1.05]"),
    ):
        assert text in words, text


def test_hostile_names_are_escaped_everywhere() -> None:
    name = "<script>alert(1)</script>&\"'"
    page, _ = report_html(
        plain_profile(workloads=(name,), device_name=name),
        predictions=[plain_prediction(workload=name)],
        judged=plain_validation(workloads=(name,)),
    )
    reader = read(page)
    assert "script" not in reader.tags
    assert "<script>alert(1)</script>" in "".join(reader.words)


@pytest.fixture
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and tells nothing of the words."""
    monkeypatch.setattr(figures, "figure_bytes", lambda *_, **__: b"<svg ></svg>")


@pytest.mark.usefixtures("_without_pictures")
def test_without_validation_the_page_says_that_nobody_checked() -> None:
    page, _ = report_html(plain_profile(), predictions=[], judged=None)
    assert "NOT VALIDATED" in page
    assert "Nobody has checked" in page
    assert "Nothing was predicted." in page
    assert 'class="box unknown"' in page
    assert read(page).sections == SECTIONS


def top(**changes: Any) -> tuple[str, list[str]]:
    """Class and verdict of the box on top, then its warnings."""
    asked: dict[str, Any] = {"predictions": [plain_prediction()], "judged": plain_validation()}
    asked |= changes
    page, _ = report_html(asked.pop("document", plain_profile()), **asked)
    [found] = re.findall(r'class="box (\w+)" id="verdict">\n<p class="verdict">(.*?)</p>', page)
    [box] = re.findall(r'<ul class="warnings">(.*?)</ul>', page, flags=re.DOTALL)
    return ": ".join(found), re.findall("<li>(.*?)</li>", box)


@pytest.mark.usefixtures("_without_pictures")
def test_results_of_another_profile_are_marked() -> None:
    assert top()[1] == list(plain_prediction().caveats)
    found, warnings = top(document=plain_profile(device_name="another"))
    assert found == "unknown: NOT VALIDATED: the validation at hand judged another profile"
    assert warnings[:2] == [
        "The validation judged another profile than the one shown here.",
        "The prediction of resnet18 rests on another profile.",
    ]
    judged = plain_prediction().model_copy(update={"validation_digest": "0" * 64})
    found, warnings = top(predictions=[judged], judged=plain_validation(passed=False))
    assert found == "failed: FAILED: 1 of 2 gates missed (coverage)"
    assert warnings[0] == "The prediction of resnet18 rests on another validation."


def test_answer_and_plots_come_first_and_tables_are_folded(page: str) -> None:
    order = [page.index(f'id="{name}"') for name in ("verdict", "predicted", "wrong", "sources")]
    assert order == sorted(order)
    open_parts = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert "<table" not in open_parts
    assert open_parts.count("<svg") >= 3
    assert "prefers-color-scheme: dark" in page
