"""The page as one file, and what a wheel must hold for it."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import perfmodel.page
from perfmodel.documents.page import PageQuestion
from perfmodel.page.export import SCRIPTS, export_grid, export_html, page, question_of, start
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.page.sessions import NOISY, answers, layout_answers
from tests.perfmodel.profiles import as_file

ROOT = Path(__file__).resolve().parents[3]
STEP = PageQuestion(profile="here", workload="light", layout="dp=6", batch=16)


def held(html: str) -> dict[str, Any]:
    """The data of a file."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_file_holds_an_answer_for_every_place_of_its_sliders() -> None:
    html = export_html(answers(), STEP)
    data = held(html)
    grid = data["grid"]
    assert 6 in grid["devices"]
    assert grid["batches"] == [4, 16, 64]
    keys = {
        f"{devices}|{batch}|{bandwidth}"
        for devices in grid["devices"]
        for batch in grid["batches"]
        for bandwidth in grid["bandwidths"]
    }
    assert set(data["answers"]) == keys
    stored = data["answers"]["6|16|4x"]
    asked = STEP.model_copy(update={"changes": {"network.bandwidth": "4x"}})
    exact = answers().answer(asked)
    assert stored["step_s"]["nominal"] == pytest.approx(exact.step_s.nominal, rel=1e-5)
    curve = data["curves"][stored["curve_at"]]
    assert [point["devices"] for point in curve] == [
        point.devices for point in answers().detail(asked).curve
    ]
    assert len(data["curves"]) < len(keys)
    assert "connect-src 'none'" in html


def test_what_is_not_feasible_is_in_the_file_as_its_reason() -> None:
    question = STEP.model_copy(update={"scaling": "strong", "batch": 64, "layout": "dp=2"})
    data = held(export_html(answers(), question))
    assert "multiple of devices" in data["answers"]["1024|64|"]["error"]
    assert data["answers"]["64|64|"]["speedup"]["nominal"] > 0


def test_a_layout_moves_by_replicas() -> None:
    question = PageQuestion(profile="inferred", workload="gpt2", layout="dp=2 tp=2", batch=64)
    [profile] = layout_answers().catalogue.profiles
    grid = export_grid(profile, question)
    assert grid.devices[:3] == (2, 4, 8)
    assert grid.batches == (64,)


def test_hostile_names_stay_text() -> None:
    html = page(json.dumps({"name": "</script><script>alert(1)</script>@STYLE@"}), is_served=True)
    assert "</script><script>alert" not in html.html
    assert held(html.html)["name"] == "</script><script>alert(1)</script>@STYLE@"


def test_a_wheel_holds_every_file_of_the_page() -> None:
    folder = Path(perfmodel.page.__file__).parent / "static"
    names = {path.name for path in folder.iterdir()}
    assert names == {"page.html", "page.css", *SCRIPTS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["perfmodel"]
    missed = [
        name
        for name in names
        if not any(fnmatch(f"page/static/{name}", pattern) for pattern in patterns)
    ]
    assert missed == []
    needs = {re.split(r"[<>=]", need)[0] for need in project["project"]["dependencies"]}
    assert {"anyio", "starlette", "uvicorn"} <= needs


def test_questions_travel_behind_the_address() -> None:
    address = f"#{quote(STEP.model_dump_json())}"
    assert question_of(address) == STEP
    assert start(answers().catalogue).profile == "here"


def test_the_command_writes_one_file(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    as_file(NOISY).write(profile)
    out = tmp_path / "page.html"
    ask = STEP.model_copy(update={"profile": f"{tmp_path.name}/profile"}).model_dump_json()
    result = run("serve", "--profile", profile, "--export", out, "--ask", ask)
    assert result.exit_code == 0, result
    data = held(out.read_text(encoding="utf-8"))
    assert data["question"]["layout"] == "dp=6"
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    wrong = run("serve", "--profile", profile, "--export", out, "--ask", '{"layout": "dp=8"}')
    assert "--ask: " in complaint(wrong, 2)
    missing = run("serve", "--profile", tmp_path / "none.json")
    assert "cannot be read" in complaint(missing, 5)
    alone = run("serve", "--ask", "{}")
    assert "--ask: must come with --export" in complaint(alone, 2)
