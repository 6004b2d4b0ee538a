"""Many courses of one job, and published jobs."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.documents.budget import Budget, YearlyCost, read_budget
from perfmodel.engine.job import FailureCause, Job, expected_elapsed_s
from perfmodel.plan.goodput import buying_pays, compare_costs, goodput
from tests.perfmodel.plan.budgets import TODAY, written

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

#: Llama 3 405B: 419 unexpected stops of 16,384 GPUs in 54 days [Llama team, arXiv 2407.21783, table 5].
#: Write, detection and restart are not published: these are assumptions.
LLAMA_3 = Job(
    devices=16_384,
    work_s=50.4 * DAY_S,
    checkpoint_interval_s=465.0,
    checkpoint_write_s=10.0,
    causes=(FailureCause(name="any", mtbf_device_s=16_384 * 54 * DAY_S / 419),),
    detection_s=120.0,
    restart_s=180.0,
)
#: BLOOM: 384 GPUs, a GPU fails every week or so, 40 s of writing, at most 3 h between checkpoints
#: [bigscience, chronicles of the 176B training].
BLOOM = Job(
    devices=384,
    work_s=100 * DAY_S,
    checkpoint_interval_s=3 * HOUR_S,
    checkpoint_write_s=40.0,
    causes=(FailureCause(name="gpu", mtbf_device_s=384 * 7 * DAY_S),),
)


def test_llama_3_stops_as_often_as_published_and_trains_nine_tenths_of_the_time() -> None:
    document = goodput(LLAMA_3, replicas=60, mtbf_stops=419)
    assert document.elapsed_s.nominal / DAY_S == pytest.approx(54, rel=0.01)
    assert document.unplanned_stops.nominal == pytest.approx(419, rel=0.02)
    assert document.unplanned_stops.p5 < 419 < document.unplanned_stops.p95
    assert document.effective_fraction.p5 > 0.9
    assert document.elapsed_mean_s == pytest.approx(expected_elapsed_s(LLAMA_3), rel=0.02)


def test_bloom_saves_at_almost_no_cost_and_loses_half_an_interval_per_failure() -> None:
    document = goodput(BLOOM, replicas=100)
    stops = document.stops_mean["gpu"]
    assert stops == pytest.approx(document.elapsed_mean_s / (7 * DAY_S), rel=0.1)
    assert document.spent_mean_s["lost"] / stops == pytest.approx(1.5 * HOUR_S, rel=0.1)
    assert document.spent_mean_s["checkpoint"] / document.elapsed_mean_s < 0.004
    assert document.effective_fraction.nominal > 0.98


def test_the_uncertainty_of_the_rate_widens_the_answer() -> None:
    sure, unsure = (goodput(LLAMA_3, replicas=60, mtbf_stops=n).elapsed_s for n in (None, 5))
    assert unsure.p95 - unsure.p5 > 2 * (sure.p95 - sure.p5)


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
