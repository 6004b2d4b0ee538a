"""The pages say what the records and the sources say."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from perfmodel.documents import file_sha256
from perfmodel.documents.profile import CALIBRATED, ProfileDocument
from tests.benchmarks import gpu_report, virtual_report
from tests.benchmarks.record import ACCURACY, campaigns, table
from tests.benchmarks.virtual_report import RECORDS, ROOT
from tests.regression.cases import unpacked


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_table_of_accuracy_is_that_of_the_records() -> None:
    """``make record`` writes it."""
    text = ACCURACY.read_text(encoding="utf-8")
    assert virtual_report.with_table(text, table()) == text


@pytest.mark.parametrize(
    ("file", "part", "has_coverage"),
    [
        ("validation/validation.json", "summary", True),
        ("validation/validation.json", "speedup_summary", False),
        ("models/models-measured.json", "summary", True),
        ("models/models-curves.json", "summary", True),
        ("strategies/strategies.json", "summary", True),
    ],
)
def test_the_readme_quotes_the_worst_campaign_and_the_latest(
    file: str, part: str, *, has_coverage: bool
) -> None:
    found = [json.loads(path.read_bytes()) for path in campaigns(file)]
    worst = max(found, key=lambda of: of[part]["mape"])
    latest = max(found, key=lambda of: of["provenance"]["created_utc"])

    def cell(of: Any) -> str:
        errors = f"{100 * of[part]['mape']:.1f} %, {100 * of[part]['worst_absolute']:.1f} %"
        covered = [
            gate["value"] for gate in of["gates"] if has_coverage and "coverage" in gate["name"]
        ]
        return ", ".join([errors, *(f"{100 * value:.0f} %" for value in covered)])

    last = "the same" if latest is worst else cell(latest)
    assert f"| {cell(worst)} | {last} |" in page("README.md")


def test_the_table_of_virtual_gpus_is_that_of_their_record() -> None:
    """``python -m tests.benchmarks.virtual_report`` writes it."""
    text = virtual_report.PAGE.read_text(encoding="utf-8")
    assert virtual_report.written(text) == text


def test_the_table_of_real_gpus_is_that_of_their_records() -> None:
    """``python -m tests.benchmarks.gpu_report`` writes it."""
    text = gpu_report.PAGE.read_text(encoding="utf-8")
    assert gpu_report.written(text) == text
    for gpu, name in product(gpu_report.GPUS, ("steps", "models-measured", "models-curves")):
        content = (RECORDS / gpu / f"{name}.json").read_bytes()
        summary = json.loads(content)["summary"]
        found, median, _ = gpu_report.verdict(gpu, name)
        assert [found.mape, median, abs(found.worst)] == pytest.approx(
            [summary["mape"], summary["median_absolute"], summary["worst_absolute"]]
        )


def test_machines_of_real_gpus_name_their_records(tmp_path: Path) -> None:
    for gpu in gpu_report.GPUS:
        record = unpacked(RECORDS / gpu / "calibration.jsonl", tmp_path / f"{gpu}.jsonl")
        document = ProfileDocument.read(CALIBRATED / f"{gpu}.json")
        assert document.observations_sha256 == file_sha256(record)


def test_a_missed_gate_is_named() -> None:
    rows = [{"nominal": 1.07, "step_s": 1.0, "p5": 0.9, "p95": 1.1}] * 3
    gate = virtual_report.Gate(mape=0.08, worst=0.06, covered=(0.85, 0.97))
    assert virtual_report.summary("steps", rows, gate).missed == ("worst", "coverage")


def test_methods_show_the_model_as_it_stands() -> None:
    assert f"```py\n{page('perfmodel/model.py')}```\n" in page("docs/methods.md")


@pytest.mark.parametrize(("name", "most"), [("README.md", 120), ("DESIGN.md", 200)])
def test_pages_stay_short(name: str, most: int) -> None:
    assert len(page(name).splitlines()) <= most


def words_of(path: Path) -> int:
    """Words outside blocks of commands, code and what they print, and outside tables that commands write."""
    made = r"^```.*?^```$|^<!-- table: begin.*?^<!-- table: end -->$"
    prose = re.sub(made, "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return len(prose.split())


def test_no_page_of_the_site_has_more_than_900_words() -> None:
    counts = {path.name: words_of(path) for path in (ROOT / "docs").rglob("*.md")}
    assert {name: count for name, count in counts.items() if count > 900} == {}


def test_pictures_and_pages_that_are_linked_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "DESIGN.md", *(ROOT / "docs").glob("*.md")]
    missing = [
        f"{path.name}: {link}"
        for path in pages
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
        if "://" not in link and not (path.parent / link).exists()
    ]
    assert not missing


def test_records_stay_small() -> None:
    files = [path for path in RECORDS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
