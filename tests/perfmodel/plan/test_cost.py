"""Money, by hand."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.documents.budget import Budget, YearlyCost, read_budget
from perfmodel.plan.goodput import buying_pays, compare_costs
from tests.perfmodel.plan.budgets import TODAY, written


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return read_budget(written(tmp_path), today=TODAY)


lines = st.builds(
    YearlyCost, name=st.just("x"), fixed=st.floats(0, 1e6), per_utilisation=st.floats(0, 1e6)
)


@given(buy=lines, rent=lines, utilisation=st.floats(0, 1))
def test_buying_pays_exactly_where_it_costs_no_more(
    buy: YearlyCost, rent: YearlyCost, utilisation: float
) -> None:
    pays = buying_pays(buy, rent)
    is_inside = pays is not None and pays.at_least <= utilisation <= pays.at_most
    margin = 1e-9 * (buy.at(1) + rent.at(1))
    if buy.at(utilisation) < rent.at(utilisation) - margin:
        assert is_inside
    if buy.at(utilisation) > rent.at(utilisation) + margin:
        assert not is_inside


def test_a_price_goes_stale_after_thirty_days(budget: Budget) -> None:
    """Quoted on the 1st of November: 30 days old on the 1st of December."""
    fresh = compare_costs(budget, today=dt.date(2026, 12, 1))
    [invented] = fresh.warnings
    assert invented.startswith("PRICES ARE INVENTED (8 of 8)")
    stale = compare_costs(budget, today=dt.date(2026, 12, 2))
    assert len(stale.warnings) == 9
    assert stale.warnings[1].startswith("buy.device_price: quoted 31 days ago (2026-11-01)")
