"""Plans of large models: the fastest layout that fits, against the search it came from."""

from pathlib import Path

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.answer.inferred import Training
from perfmodel.cost.inferred import LINKS_OF_FILE, on_links, open_inferred
from perfmodel.documents.plan import PlanDocument, PlanFile, read_plan
from perfmodel.errors import NotFeasible
from perfmodel.layout import parse_layout
from perfmodel.layout_search import Request, plan_parallelism
from perfmodel.machine import InferredMachine
from perfmodel.plan.machines import Sources, read_sources
from perfmodel.plan.options import plan_options
from perfmodel.workload.transformer import NamedTransformer
from tests.existing import existing
from tests.perfmodel.cost.large_samples import MODEL, document
from tests.perfmodel.plan.plans import LARGE, REST, TODAY

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
