"""Money, by hand."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.documents.budget import Budget, CostDocument, YearlyCost, read_budget
from perfmodel.errors import InvalidDocument
from perfmodel.plan.cost import buying_pays, compare_costs
from tests.existing import existing
from tests.perfmodel.plan.budgets import DEVICE, REST, TODAY, budget_text, written


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return read_budget(written(tmp_path, budget_text()), today=TODAY)


@pytest.fixture
def answer(budget: Budget) -> CostDocument:
    return compare_costs(budget, today=TODAY)


def test_what_owning_costs(answer: CostDocument) -> None:
    """11 devices of 20,000 and a network of 10,000: 230,000; 80 % of it over 4 years: 46,000 a year.

    Ten devices at 1 kW and a PUE of 1.5 for 8,760 h at 0.2: 26,280, a quarter of it when idle.
    """
    items = answer.items
    assert items.capital == pytest.approx(230_000)
    assert items.depreciation == pytest.approx(46_000)
    assert items.idle_energy == pytest.approx(6570)
    assert items.working_energy == pytest.approx(19_710)
    assert items.staff == 5000
    assert items.upkeep == pytest.approx(11_500)


def test_what_every_way_costs_a_year_at_half_utilisation(answer: CostDocument) -> None:
    """Buying 69,070 + 19,710 / 2; on demand 43,800 h * 2; spot 54,750 h * 0.8; reserved 87,600 h.

    Renting pays 100 for egress on top.
    """
    yearly = {option.cost.name: option.yearly for option in answer.options}
    assert yearly == pytest.approx(
        {"buy": 78_925, "on demand": 87_700, "spot": 43_900, "reserved": 87_700}
    )
    assert [option.cost.name for option in answer.options][:2] == ["spot", "buy"]
    hourly = {option.cost.name: option.per_useful_device_hour for option in answer.options}
    assert hourly["buy"] == pytest.approx(78_925 / 43_800)


def test_where_buying_starts_to_pay(answer: CostDocument) -> None:
    """On demand: 69,070 + 19,710 u = 100 + 175,200 u; reserved: 69,070 + 19,710 u <= 87,700.

    Spot costs 100 + 87,600 u, at full use 87,700, where buying costs 88,780: never.
    """
    pays = {option.cost.name: option.buying_pays for option in answer.options}
    on_demand, reserved = (existing(pays[name]) for name in ("on demand", "reserved"))
    assert on_demand.at_least == pytest.approx(68_970 / 155_490)
    assert on_demand.at_most == 1
    assert reserved.at_least == 0
    assert reserved.at_most == pytest.approx(18_630 / 19_710)
    assert pays["spot"] is None


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (budget_text(device=DEVICE.replace("EUR", "USD")), "all prices must be in one currency"),
        (budget_text(device=DEVICE.replace("20000", "-1")), "buy.device_price.value: Input should"),
        (budget_text(device=DEVICE.replace("per device", "once")), "must be per device, got once"),
        (
            budget_text(rest=REST.replace("2026-11-01", "2026-11-22")),
            "date must not be after 2026-11-21, got 2026-11-22",
        ),
        (budget_text().replace("pue = 1.5", "pue = 0.9"), "buy.pue: Input should"),
        (budget_text().replace("pue = 1.5", "pue = 1.5\nwine = 3"), "buy.wine: unknown key"),
        (budget_text().replace("effective_fraction = 0.8", ""), "of spot devices must be given"),
        ("utilisation = ", "budget cannot be read"),
    ],
)
def test_a_wrong_budget_names_place_rule_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidDocument, match=message) as caught:
        read_budget(written(tmp_path, text), today=TODAY)
    assert "budget.toml" in str(caught.value)
