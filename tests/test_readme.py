"""The table of accuracy says what the records say."""

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def recorded(name: str) -> Any:
    return json.loads((DOCS / "records" / name).read_text(encoding="utf-8"))


def row(judge: str) -> list[str]:
    """MAPE, worst and coverage of a judge."""
    lines = (DOCS / "accuracy.md").read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith(f"| {judge} |")]
    assert len(found) == 1, judge
    return [cell.strip() for cell in found[0].split("|")][3:6]


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def test_held_out_settings() -> None:
    found = recorded("validation/validation.json")
    errors = found["summary"]
    figures = [percent(errors["mape"]), percent(errors["worst_absolute"])]
    assert row("steps") == [*figures, percent(found["coverage"], 0)]


@pytest.mark.parametrize(
    ("judge", "record", "groups", "group"),
    [
        ("4 to 16 ranks, shaped links, plain", "testbed/testbed.json", "groups", "plain"),
        ("FSDP2, ZeRO, TP, PP over gloo", "strategies/strategies.json", "families", "all"),
    ],
)
def test_testbed(judge: str, record: str, groups: str, group: str) -> None:
    (found,) = [entry for entry in recorded(record)[groups] if entry["name"] == group]
    errors = found["summary"]
    figures = [percent(errors["mape"]), percent(errors["worst_absolute"])]
    assert row(judge) == [*figures, percent(found["coverage"], 0)]
