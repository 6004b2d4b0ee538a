"""perfmodel cost: what it prints, and what it refuses."""

import json
from pathlib import Path

from perfmodel.documents.budget import CostDocument
from perfmodel.errors import EXIT_OK
from tests.perfmodel.cli.command import Run
from tests.perfmodel.plan.budgets import budget_text, written


def test_the_table_names_the_crossover_and_every_price(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, budget_text())
    result = run("cost", path, "--today", "2027-01-01")
    assert result.exit_code == EXIT_OK
    for words in (
        "from 44.4 %",
        "up to 94.5 %",
        "never",
        "78,925",
        "warning: rent.spot: quoted 61",
    ):
        assert words in result.stdout
    assert result.stdout.count("made up") == 8 + 8
    assert max(map(len, result.stdout.splitlines()[:8])) <= 80


def test_json_is_a_document(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, budget_text())
    result = run("cost", path, "--today", "2026-11-21", "--json")
    document = CostDocument.model_validate(json.loads(result.stdout))
    assert document.warnings == ()
    assert document.options[0].cost.name == "spot"
