"""Prices of a plan that are missing, unknown or of another currency."""

from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.errors import InvalidDocument
from tests.perfmodel.plan.plans import PLAN, TODAY, plan_of, written


def test_a_price_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    """Left out, named without a table, and named in a table of other names and currencies."""
    line = next(line for line in PLAN.splitlines() if line.startswith("price = { value = 0.5"))
    with pytest.raises(InvalidDocument, match=r"option\.0\.price"):
        plan_of(tmp_path, PLAN.replace(line, ""))
    named = written(tmp_path, PLAN.replace(line, 'price = "spot"'))
    with pytest.raises(InvalidDocument, match=r"got 'spot'; known names: none \(give --prices\)"):
        pm.plan_options(named, today=TODAY)
    table = tmp_path / "prices.csv"
    head = "name,value,unit,currency,date,region,term,source\n"
    row = "{},0.5,per device-hour,{},2026-11-01,Mars,none,made up\n"
    table.write_text(head + row.format("demand", "EUR"), encoding="utf-8")
    with pytest.raises(InvalidDocument, match="known names: demand"):
        pm.plan_options(named, prices=table, today=TODAY)
    table.write_text(head + row.format("spot", "USD"), encoding="utf-8")
    with pytest.raises(InvalidDocument, match="one currency, convert them first"):
        pm.plan_options(named, prices=table, today=TODAY)
    table.write_text(head + row.format("spot", "EUR"), encoding="utf-8")
    assert pm.plan_options(named, prices=table, today=TODAY).ranked
