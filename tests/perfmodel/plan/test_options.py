"""Ranked options against brute force, what a plan may not say, and plans of large models against their search."""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.answer.inferred import Training
from perfmodel.cost.inferred import LINKS_OF_FILE, on_links, open_inferred
from perfmodel.documents.plan import Option, PlanDocument, PlanFile, read_plan
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import COVERAGE_OF_RUNS, Gate
from perfmodel.engine.job import FailureCause, Job, best_interval_s, expected_elapsed_s
from perfmodel.errors import NotFeasible
from perfmodel.layout import Layout, parse_layout, scaled_layouts
from perfmodel.layout_search import Request, plan_parallelism
from perfmodel.machine import InferredMachine
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.plan.goodput import goodput
from perfmodel.plan.machines import Sources, _accuracy, read_sources
from perfmodel.plan.options import plan_options
from perfmodel.plan.steps import MOST_KNOTS, MeasuredSteps
from perfmodel.workload.transformer import NamedTransformer
from tests.existing import existing
from tests.perfmodel.asking import Asking
from tests.perfmodel.cost.large_samples import MODEL, document
from tests.perfmodel.plan.plans import LARGE, PLAN, REST, TODAY, plan_of, written
from tests.perfmodel.profiles import PROVENANCE, Machine, as_file, profile
from tests.perfmodel.report.samples import plain_validation

HOUR_S = 3600.0


def test_a_plan_shows_that_no_run_lay_inside(tmp_path: Path) -> None:
    gate = Gate(name=COVERAGE_OF_RUNS, unit="fraction", value=0.0, passed=False)
    told = plain_validation().model_copy(update={"coverage_of_runs": 0.0, "gates": (gate,)})
    option = plan_of(tmp_path).option[0].model_copy(update={"validation": "validation.json"})
    assert existing(_accuracy(option, told)).coverage == 0.0


@dataclass(frozen=True)
class Brute:
    """One candidate, one at a time, by the simulated step and the scalar closed form."""

    option: str
    devices: int
    micro_batch: int
    elapsed_s: float
    cost: float


def brute_force(plan: PlanFile, profiles: dict[str, MeasuredMachine]) -> list[Brute]:
    found = []
    for option in plan.option:
        predictor = Asking(profiles[option.name])
        for batch in option.batches:
            for count in option.device_counts:
                elapsed_s = simulated_end_s(plan, predictor, batch, count)
                found.append(
                    Brute(option.name, count, batch, elapsed_s, paid(option, count, elapsed_s))
                )
    return sorted(found, key=lambda entry: (entry.cost, entry.elapsed_s))


def simulated_end_s(plan: PlanFile, predictor: Asking, batch: int, count: int) -> float:
    [setting] = scaled_layouts([count], scaling="weak", batch=batch)
    step = predictor.step(predictor.workload("heavy"), setting)
    work_s = float(np.ceil(plan.work.total_samples / setting.global_batch)) * step.trace.step_s
    return expected_elapsed_s(job(plan, work_s, count))


def job(plan: PlanFile, work_s: float, count: int) -> Job:
    failures = existing(plan.failures)
    mtbf_s = failures.mtbf_device_hours * HOUR_S
    best_s = best_interval_s(write_s=failures.checkpoint_s, mtbf_s=mtbf_s / count)
    return Job(
        devices=count,
        work_s=work_s,
        checkpoint_interval_s=min(best_s, work_s),
        checkpoint_write_s=failures.checkpoint_s,
        causes=(FailureCause(name="any", mtbf_device_s=mtbf_s),),
        detection_s=failures.detection_s,
        restart_s=failures.restart_s or 0.0,
    )


def paid(option: Option, count: int, elapsed_s: float) -> float:
    watts = (option.power_per_device_w or 0) * option.pue
    energy = option.energy_price.value * watts / 1000 if option.energy_price else 0.0
    setup = option.setup_price.value if option.setup_price else 0.0
    return setup + elapsed_s / HOUR_S * count * (option.price.value + energy)


def test_the_ranking_is_that_of_brute_force_over_the_simulator(tmp_path: Path) -> None:
    """All 38 candidates, each simulated, the cheapest first; there is time for any of them."""
    text = PLAN.replace("budget = 5000\n", "").replace("power_kw = 20", "")
    plan = plan_of(tmp_path, text.replace("2026-12-21", "2030-01-01"))
    profiles = {name: pm.read_profile(tmp_path / f"{name}.json") for name in ("slow", "fast")}
    document = plan_options(plan, Sources(profiles=profiles), today=TODAY)
    assert document.num_candidates == 38
    assert document.num_feasible == 38
    feasible = brute_force(plan, profiles)
    assert len(document.ranked) == 10
    for ours, theirs in zip(document.ranked, feasible, strict=False):
        for name in ("option", "devices", "micro_batch"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.elapsed_s.nominal == pytest.approx(theirs.elapsed_s, rel=1e-9)
        assert ours.cost.nominal == pytest.approx(theirs.cost, rel=1e-9)
    best = {row.option: row for row in reversed(feasible)}
    for verdict in document.options:
        theirs = best[verdict.row.option]
        assert verdict.row.devices == theirs.devices
        assert verdict.row.cost.nominal == pytest.approx(theirs.cost, rel=1e-9)
    front = {
        (e.option, e.devices)
        for e in feasible
        if not any(o.cost < e.cost and o.elapsed_s < e.elapsed_s for o in feasible)
    }
    assert {(row.option, row.devices) for row in document.front} <= front
    assert document.front[-1] == document.ranked[0]


def test_the_chance_is_that_of_simulated_weeks(tmp_path: Path) -> None:
    """Without uncertainty about the step only failures are left, and they are simulated event by event."""
    plan = plan_of(tmp_path)
    sure = profile(Machine())
    document = plan_options(plan, Sources(profiles={"slow": sure, "fast": sure}), today=TODAY)
    row = document.ranked[0]
    simulated = goodput(
        job(plan, float(np.ceil(8e8 / row.global_batch)) * row.step_s.nominal, row.devices),
        replicas=400,
        deadline_s=30 * 86400.0,
    )
    assert simulated.deadline_probability == pytest.approx(row.deadline_probability, abs=0.05)
    assert simulated.elapsed_mean_s == pytest.approx(row.elapsed_s.nominal, rel=0.01)
    assert simulated.elapsed_s.p95 == pytest.approx(row.elapsed_s.p95, rel=0.02)
    assert row.expected_stops == pytest.approx(sum(simulated.stops_mean.values()), rel=0.1)


def test_prices_and_sizes_at_which_the_answer_changes(tmp_path: Path) -> None:
    """At its break-even price an option costs as much as the winner; one device fewer is too slow."""
    document = pm.plan_options(written(tmp_path), today=TODAY)
    winner = document.ranked[0].cost.nominal
    loser = next(entry for entry in document.options if entry.break_even_price is not None)
    old = {"slow": "0.5", "fast": "2.5"}[loser.row.option]
    text = PLAN.replace(f"value = {old}, unit", f"value = {loser.break_even_price}, unit")
    again = pm.plan_options(written(tmp_path, text), today=TODAY)
    assert again.ranked[0].cost.nominal == pytest.approx(winner, rel=1e-9)
    slow = next(entry for entry in document.options if entry.row.option == "slow")
    fewest = existing(slow.smallest_devices)
    assert fewest > 1
    for count, enough in ((fewest, True), (fewest - 1, False)):
        text = PLAN.replace("{ first = 1, last = 16 }", f"[{count}]").replace("budget = 5000\n", "")
        one = pm.plan_options(written(tmp_path, text), today=TODAY)
        row = next(entry.row for entry in one.options if entry.row.option == "slow")
        assert (row.deadline_probability >= 0.9) is enough


def test_the_tornado_of_the_winner(tmp_path: Path) -> None:
    document = pm.plan_options(written(tmp_path), today=TODAY)
    swings = [entry.high_cost - entry.low_cost for entry in document.tornado]
    assert swings == sorted(swings, reverse=True)
    assert {entry.assumption for entry in document.tornado} >= {"computing", "communication"}
    assert "minutes" in document.next_measurement


def test_the_power_limit_is_kept(tmp_path: Path) -> None:
    """1.2 x 500 W: 10 devices take 6 kW."""
    text = PLAN.replace("power_kw = 20", "power_kw = 6").replace("budget = 5000\n", "")
    document = pm.plan_options(written(tmp_path, text), today=TODAY)
    rows = [*document.ranked, *document.front]
    assert rows
    assert all(row.power_kw is not None and row.power_kw <= 6 for row in rows)


def test_between_knots_steps_are_read_closely() -> None:
    machine = profile(Machine(noise=(0.9, 1.0, 1.1, 1.3), residual=0.03, rank_spread=0.02))
    predictor = Asking(machine)
    workload = predictor.workload("heavy")
    table = MeasuredSteps(
        predictor.question(workload, Layout()),
        scaling="weak",
        batch=16,
        accumulation=1,
        counts=range(1, 2001),
    )
    asked = np.array([3, 37, 100, 555, 1234, 1999])
    read_s = table.step_s(asked)
    for row, count in zip(read_s, asked.tolist(), strict=True):
        exact_s = table.step(count).step_s
        assert row[0] == pytest.approx(exact_s[0], rel=0.003)
        # the errors of the model are drawn again for every setting: their size is what can agree
        assert np.log(row).std() == pytest.approx(np.log(exact_s).std(), rel=0.15)
    again_s = table.step_s(asked)
    np.testing.assert_allclose(again_s[2], table.step(100).step_s, rtol=1e-12)
    assert MOST_KNOTS < 60


def test_work_can_be_epochs_or_tokens(tmp_path: Path) -> None:
    for work in (
        "epochs = 4\nsamples_per_epoch = 2e8",
        "tokens = 1.6e12\ntokens_per_sample = 2000",
    ):
        plan = plan_of(tmp_path, PLAN.replace("samples = 8e8", work))
        assert plan.work.total_samples == pytest.approx(8e8)


def test_a_stale_price_is_said(tmp_path: Path) -> None:
    plan = written(tmp_path)
    for path in tmp_path.glob("*.json"):
        machine = ProfileDocument.read(path).machine
        made = PROVENANCE.model_copy(update={"created_utc": "2026-01-02T03:04:05+00:00"})
        as_file(machine, provenance=made).write(path)
    document = pm.plan_options(plan, today=dt.date(2026, 12, 15))
    assert sum("quoted" in warning for warning in document.warnings) == 4
    assert sum("calibrate again" in warning for warning in document.warnings) == 2


TRAINED = NamedTransformer(name="gpt-1.3b", shape=MODEL, sequence=1024)


def plan_file(folder: Path, text: str = LARGE) -> PlanFile:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return read_plan(path, today=TODAY)


def answer(folder: Path, text: str = LARGE) -> PlanDocument:
    plan = plan_file(folder, text)
    sources = Sources(
        profiles={option.name: document().machine for option in plan.option}, model=TRAINED
    )
    return plan_options(plan, sources, today=TODAY)


def test_a_free_layout_is_the_first_of_the_search_and_a_fixed_one_is_kept(tmp_path: Path) -> None:
    found = answer(tmp_path)
    assert found.num_candidates == 6
    rows = {(row.option, row.devices): row for row in found.ranked}
    for count in (4, 8, 16):
        training = Training(model=TRAINED, devices=count, devices_per_node=8, global_batch=64)
        searched = plan_parallelism(
            open_inferred(document().machine),
            Request(training=training, capacity_bytes=80 * 2**30, top=1),
        ).ranked[0]
        row = rows["free", count]
        assert row.layout == searched.layout
        assert row.step_s.nominal == pytest.approx(searched.step_s.nominal)
        # draws against quantiles of the distribution that they are drawn from
        assert np.log(row.step_s.p95 / searched.step_s.p95) == pytest.approx(0, abs=0.1)
        assert row.needed_bytes == pytest.approx(searched.needed_bytes)
        assert row.evidence == "inferred"
        fixed = rows["fixed", count]
        layout = parse_layout(existing(fixed.layout))
        assert (layout.tp, layout.pp, layout.micro_batch) == (2, 1, 2)
        assert (layout.dp, layout.global_batch) == (count // 2, 64)
        assert row.step_s.nominal <= fixed.step_s.nominal * (1 + 1e-9)
    steps = np.ceil(1e10 / 1024 / 64)
    best = found.ranked[0]
    assert best.elapsed_s.nominal == pytest.approx(steps * best.step_s.nominal)
    assert best.cost.nominal == pytest.approx(best.elapsed_s.nominal / 3600 * best.devices * 2.0)


NETWORKS = """
[work]
model = "gpt2-xl"
tokens = 1e9
scaling = "strong"

[limits]
deadline = 2027-12-21
"""


def test_the_network_of_an_option_moves_its_steps(tmp_path: Path) -> None:
    option = f"""
[[option]]
name = "NAME"
profile = "dgx-h100"
counts = [8, 16, 32]
batches = [64]
device_memory = "80GiB"
layout = "zero=3"
cluster = "8 nvlink4, 2 LINK"
price = {{ value = 2.0, unit = "per device-hour", {REST} }}
"""
    cheap, dear = (
        option.replace("NAME", name).replace("LINK", link)
        for name, link in (("cheap", "eth-25"), ("dear", "eth-400 x8"))
    )
    path = tmp_path / "plan.toml"
    path.write_text(NETWORKS + cheap + dear, encoding="utf-8")
    plan, sources = read_sources(read_plan(path, today=TODAY), path)
    found = plan_options(plan, sources, today=TODAY)
    rows = {(row.option, row.devices): row for row in found.ranked}
    assert {count for _, count in rows} == {8, 16}  # the cluster has no more
    assert rows["cheap", 8].step_s == rows["dear", 8].step_s  # one node: no link between nodes
    assert rows["cheap", 16].step_s.nominal > 2 * rows["dear", 16].step_s.nominal
    for name in ("cheap", "dear"):
        row, machine = rows[name, 16], sources.profiles[name]
        assert isinstance(machine, InferredMachine)
        linked = on_links(machine, sources.clusters[name], num_devices=16)
        predicted = pm.predict_large_model(linked, "gpt2-xl", str(row.layout)).points[0]
        # the closed form of a plan against the program of a prediction
        assert row.step_s.nominal == pytest.approx(predicted.step_s.nominal, rel=0.01)
    assert LINKS_OF_FILE in found.caveats


def test_what_does_not_fit_is_no_candidate_and_says_what_it_needs(tmp_path: Path) -> None:
    tight = answer(tmp_path, LARGE.replace('"80GiB"', '"8GiB"', 1))
    assert tight.num_too_large + tight.num_candidates + tight.num_skipped == 6
    assert tight.num_too_large > 0
    with pytest.raises(
        NotFeasible, match=r"no layout of gpt-1.3b fits into 1 GiB; the leanest needs"
    ):
        answer(tmp_path, LARGE.replace('"80GiB"', '"1GiB"'))
    with pytest.raises(NotFeasible, match="must divide the devices, got 16"):
        answer(
            tmp_path,
            LARGE[: LARGE.index("[[option]]")]
            + LARGE[LARGE.rindex("[[option]]") :].replace("tp=2", "tp=32"),
        )
