"""What each field of a what-if does, against machines that really are so; scenarios side by side."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.answer import Question, timed_workload
from perfmodel.answer.answer import Forecast, answer
from perfmodel.cost.rescaling import rescaled_profile
from perfmodel.documents.hardware import LINK_SHARE, find_device, open_cluster, shipped_catalogue
from perfmodel.documents.profile import InferredDocument, ProfileDocument, shipped_machines
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import CalibrationUnavailable, UsageError, WrongArgument
from perfmodel.explanation import ChangeKind, explain
from perfmodel.layout import parse_layout
from perfmodel.machine import UNCERTAINTY_OF_FILE, Cluster, Evidence, Tier
from perfmodel.models import read_model
from perfmodel.scenarios import Scenario, compare_scenarios, contrast_of_draws
from perfmodel.scenarios.fields import FIELDS, changed, link_of, scenarios_of, usable_links
from perfmodel.statistics import unpaired
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.cost.test_network import node_of_h100
from tests.perfmodel.cost.test_rescale import calibrated
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.traces import WORKLOAD, traced

ETHERNET = str(ROOT / "docs" / "clusters" / "ethernet.toml")
DATA_CENTRES = str(ROOT / "docs" / "clusters" / "two-data-centres.toml")


def scenario(machine: Machine, workload: str = "heavy", **request: object) -> Scenario:
    document = profile(machine)
    entry = existing(document.workload(workload))
    asked = {"world_sizes": (8,), "scaling": "weak", "batch": 16, **request}
    return Scenario(
        question=Question(machine=document, workload=entry, num_draws=2),
        request=Forecast(**asked),  # type: ignore[arg-type]
    )


def step_s(scenario: Scenario) -> float:
    """Nominal step of a scenario. [s]"""
    return float(answer(scenario.questions()[1]).step_s[0])


@given(
    latency_s=st.floats(1e-6, 1e-2), bytes_per_s=st.floats(1e7, 1e11), devices=st.integers(2, 300)
)
def test_a_network_that_is_set_is_as_one_that_was_measured(
    latency_s: float, bytes_per_s: float, devices: int
) -> None:
    was = scenario(Machine(), world_sizes=(devices,))
    link = link_of(was.machine)
    assert link.latency_s == pytest.approx(1e-4, rel=0.01)
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    now = changed(
        was, {"network.latency": f"{latency_s}s", "network.bandwidth": f"{bytes_per_s}B/s"}
    )
    set_link = link_of(now.machine)
    assert set_link.latency_s == pytest.approx(latency_s)
    assert set_link.bytes_per_s == pytest.approx(bytes_per_s)
    # the synthetic latency holds the bytes of the shortest message; the split does not
    least_s = 128 / bytes_per_s
    if latency_s > 1e-5 + least_s:
        truth = Machine(latency_s=latency_s - least_s, s_per_byte=1 / bytes_per_s)
        expected_s = step_s(scenario(truth, world_sizes=(devices,)))
        assert step_s(now) == pytest.approx(expected_s, rel=1e-3)


def test_factors_are_of_what_was_measured() -> None:
    was = scenario(Machine())
    doubled = link_of(changed(was, {"network.bandwidth": "2x"}).machine)
    assert doubled.bytes_per_s == pytest.approx(2 * link_of(was.machine).bytes_per_s)
    assert doubled.latency_s == link_of(was.machine).latency_s
    same = changed(was, {"network.bandwidth": "1x", "network.latency": "1x", "device.speed": "1x"})
    assert step_s(same) == pytest.approx(step_s(was), rel=1e-12)


def test_a_tier_as_measured_counts_until_it_is_changed() -> None:
    was = scenario(Machine())
    machine = dataclasses.replace(was.machine, between_nodes=was.machine.collectives, num_nodes=4)
    joined = changed(was.asking(machine=machine), {"cluster": "2 10GB/s, 4 measured"})
    tier = existing(joined.question.cluster).tiers[-1]
    assert tier.as_measured
    assert tier.link_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    faster = changed(joined, {"cluster.bandwidth": "100GB/s"})
    assert not existing(faster.question.cluster).tiers[-1].as_measured
    assert step_s(faster) < step_s(joined)


def test_a_faster_device_leaves_the_input_as_it_is() -> None:
    """0.2 ms."""
    was = scenario(Machine(), world_sizes=(1,))
    found_s = step_s(changed(was, {"device.speed": "2x"}))
    assert found_s - 0.0002 == pytest.approx((step_s(was) - 0.0002) / 2)


@pytest.mark.parametrize("cluster", [None, open_cluster(ETHERNET)])
def test_gradients_in_16_bit_gain_what_explain_says(cluster: Cluster | None) -> None:
    """On the links of a cluster, too."""
    was = scenario(Machine(s_per_byte=1e-7), world_sizes=(32,)).asking(cluster=cluster)
    found = explain(was.questions()[1])
    [gain_s] = [c.gain_s for c in found.changes if c.kind is ChangeKind.COMPRESSION]
    assert gain_s > 0.001
    assert step_s(was) - step_s(changed(was, {"gradients": "bf16"})) == pytest.approx(gain_s)


@pytest.mark.parametrize("share", [0.0, 1.5, math.nan])
def test_gradients_are_sent_in_part_or_as_they_are(share: float) -> None:
    with pytest.raises(WrongArgument, match=f"^gradient_share must be > 0 and <= 1, got {share}$"):
        scenario(Machine()).asking(gradient_share=share)


def test_nobody_waits_for_ranks_that_are_alike() -> None:
    noisy = scenario(Machine(noise=(0.8, 1.0, 1.0, 1.3), rank_spread=0.1))
    quiet = scenario(Machine())
    assert step_s(noisy) > 1.1 * step_s(quiet)
    assert step_s(changed(noisy, {"ranks.noise": "0x"})) == pytest.approx(step_s(quiet))


def test_the_question_is_changed_too() -> None:
    was = scenario(Machine())
    edits = {"devices": "64", "batch": "4", "accumulation": "2", "bucket_cap": "5MiB"}
    now = changed(was, edits | {"loader.samples_per_s": "100", "workload": "light"})
    layout = now.questions()[1].layout
    assert now.question.workload_name == "light"
    assert (layout.world_size, layout.micro_batch) == (64, 4)
    assert (layout.accumulation, layout.bucket_cap_mb) == (2, 5.0)
    assert step_s(now) == pytest.approx(8 / 100)


def test_precision_needs_kernels_in_both_types_and_on_a_gpu_another_recipe() -> None:
    was = scenario(Machine())
    with pytest.raises(CalibrationUnavailable, match="fp32 and in bf16"):
        changed(was, {"precision": "bf16"})
    asked = was.asking(machine=dataclasses.replace(was.machine, device_kind="cuda"))
    with pytest.raises(UsageError, match="trace the model with --precision"):
        changed(asked, {"precision": "bf16"})


def test_several_values_are_scenarios_side_by_side() -> None:
    was = scenario(Machine())
    found = scenarios_of(was, ["devices=2,4", "network.bandwidth=1x,2x"])
    assert [entry.name for entry in found] == [
        "as it is",
        "devices=2, network.bandwidth=1x",
        "devices=2, network.bandwidth=2x",
        "devices=4, network.bandwidth=1x",
        "devices=4, network.bandwidth=2x",
    ]
    assert math.isclose(step_s(found[1]), step_s(changed(was, {"devices": "2"})))


def cluster() -> Cluster:
    node = Tier(name="node", of="device", count=8, link_bytes_per_s=1e10, latency_s=1e-6)
    outer = Tier(name="fabric", of="node", count=8, link_bytes_per_s=1e9, latency_s=1e-5)
    return Cluster(name="made up", tiers=(node, outer))


def test_every_field_has_its_example() -> None:
    was = scenario(Machine()).asking(cluster=cluster())
    for entry in FIELDS:
        example = entry.example.split(" or ")[0]
        # these name a file, kernels or operators that the synthetic machine lacks
        if entry.name not in ("workload", "precision", "device", "cluster"):
            now = changed(was, {entry.name: example})
            assert dict(now.changes) == {entry.name: example}
            assert dataclasses.replace(now, changes={}) != was


def test_the_cluster_of_the_question_is_that_of_every_scenario_but_where_it_is_taken_away() -> None:
    machine = profile(Machine())
    changes = ({"gradients": "bf16"}, {"cluster": "none"})
    first, halved, ring = pm.whatif(
        machine, "heavy", *changes, devices=32, batch=16, cluster=ETHERNET
    ).scenarios
    assert first.point.bottleneck_link is not None
    assert halved.point.bottleneck_link is not None
    assert ring.point.bottleneck_link is None


def test_a_faster_uplink_is_what_its_file_would_say(tmp_path: Path) -> None:
    """100 Gb/s at an uplink that had 94, by hand in the file and by ``--set``."""
    text = Path(ETHERNET).read_text(encoding="utf-8")
    mended = tmp_path / "mended.toml"
    mended.write_text(
        text.replace('"94Gb/s"', '"10Gb/s"').replace("links = 4", "links = 1"), encoding="utf-8"
    )
    machine = profile(Machine(s_per_byte=1e-10, latency_s=1e-5))
    changes = {"cluster.bandwidth": "10Gb/s", "cluster.links": "1"}
    _, slow = pm.whatif(machine, "heavy", changes, devices=32, cluster=ETHERNET).scenarios
    [by_file] = pm.whatif(machine, "heavy", devices=32, cluster=mended).scenarios
    assert slow.point.step_s == by_file.point.step_s
    named = {"cluster.bandwidth": "uplink:10Gb/s", "cluster.links": "uplink:1"}
    _, same = pm.whatif(machine, "heavy", named, devices=32, cluster=ETHERNET).scenarios
    assert same.point.step_s == slow.point.step_s


def test_a_network_between_usual_nodes_is_set_as_that_of_a_cluster() -> None:
    """A rate that is typed is as sure as a file's."""
    was = scenario(Machine(), world_sizes=(16,)).asking(machine=node_of_h100())
    slower = changed(was, {"cluster.bandwidth": "1Gb/s"})
    fabric = existing(slower.questions()[1].cluster).tiers[-1]
    assert (fabric.link_bytes_per_s, fabric.log_error) == (1e9 / 8, UNCERTAINTY_OF_FILE)
    assert step_s(slower) > step_s(was)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, True),
        ({"cluster": "none"}, True),
        ({"devices": "8"}, False),
        ({"cluster": "8 nvlink4, 8 eth-400"}, False),
    ],
)
def test_links_that_are_set_inside_nodes_alone_are_named(
    other: dict[str, str], *, says: bool
) -> None:
    was = scenario(Machine(), world_sizes=(16,)).asking(machine=node_of_h100())
    remarks = changed(was, {"network.bandwidth": "4x", **other}).remarks
    assert any("--set cluster.bandwidth" in each for each in remarks) == says


def test_a_faster_line_is_never_slower() -> None:
    machine = profile(Machine(s_per_byte=1e-11, latency_s=1e-5))
    rates = [{"cluster.bandwidth": f"wan:{rate}Gb/s"} for rate in (0.1, 1, 10, 100, 400, 800)]
    _, *found = pm.whatif(machine, "heavy", *rates, devices=64, cluster=DATA_CENTRES).scenarios
    steps_s = [entry.point.step_s.nominal for entry in found]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] > 2 * steps_s[-1]


def test_a_link_of_the_catalogue_carries_its_share_and_says_so() -> None:
    """400 GbE is 50 GB/s by its name."""
    base = scenario(Machine())
    _, now = scenarios_of(base, ["network.link=eth-400"])
    assert link_of(now.machine).bytes_per_s == pytest.approx(LINK_SHARE * 50e9)
    assert link_of(now.machine).latency_s == link_of(base.machine).latency_s
    [remark] = now.remarks
    assert "is assumed to reach 40 GB/s, 80 % of its data sheet" in remark
    assert "communication" in now.assumed
    found = pm.whatif(base.machine, "heavy", {"network.link": "nvlink4"})
    assert found.scenarios[1].point.evidence["communication"] is Evidence.ASSUMED


def test_a_device_that_is_not_present_is_that_of_predict() -> None:
    catalogue, machine = shipped_catalogue(), calibrated()
    traced_file = WorkloadDocument(workload=WORKLOAD, trace=traced())
    here, there = pm.whatif(
        machine, traced_file, {"device": "h100-sxm"}, devices=1, batch=64
    ).scenarios
    scaled = rescaled_profile(machine, find_device("h100-sxm", catalogue), catalogue)
    [direct] = pm.predict(scaled, traced_file, devices=(1,), batch=64).points
    assert there.point.step_s == direct.step_s
    assert there.point.step_s.nominal < here.point.step_s.nominal
    assert there.point.evidence["compute"] is Evidence.ASSUMED
    assert "H100" in there.device_name
    contrast = existing(there.contrast)
    assert contrast.throughput_ratio.p95 > 1.5 * contrast.throughput_ratio.p5


def test_links_of_a_whole_node_are_not_those_of_a_device() -> None:
    known = {link.id for link in usable_links()}
    assert {"nvlink4", "pcie4-x16", "eth-100", "eth-200", "eth-400", "eth-800"} <= known
    assert "efa-v2-p5" not in known


NOISY = profile(Machine(noise=(0.9, 1.0, 1.1, 1.2), residual=0.05, relative_error=0.05))


def test_the_same_scenario_differs_by_nothing() -> None:
    _, same = pm.whatif(NOISY, "heavy", {"devices": "8"}, devices=8).scenarios
    contrast = existing(same.contrast)
    assert contrast.throughput_ratio.p5 == contrast.throughput_ratio.p95 == 1
    assert contrast.step_difference_s.p95 == contrast.probability_faster == 0


def test_a_difference_is_less_uncertain_than_its_sides() -> None:
    """Errors of what was not changed cancel: the device is twice as fast whatever it is."""
    before, after = pm.whatif(NOISY, "heavy", {"device.speed": "2x"}, devices=1).scenarios
    contrast = existing(after.contrast)
    ratio, step = contrast.throughput_ratio, before.point.step_s
    assert ratio.p95 / ratio.p5 < 1.002
    assert step.p95 / step.p5 > 1.05
    assert contrast.probability_faster == 1
    assert after.point.evidence["compute"] is Evidence.ASSUMED


def test_changed_causes_come_from_explain() -> None:
    before, after = pm.whatif(NOISY, "heavy", {"ranks.noise": "0x"}, devices=16).scenarios
    assert before.lost_s["stragglers"] > 0
    assert "stragglers" not in after.lost_s
    explained = pm.explain(NOISY, "heavy", devices=16)
    assert before.lost_s == {loss.cause.value: loss.lost_s for loss in explained.losses}


def test_unpaired_draws_keep_their_nominal_and_lose_their_order() -> None:
    draws = np.random.default_rng(1).standard_normal(5000)
    first, other = unpaired(draws, draws[:4000], seed="x")
    assert len(first) == len(other) == 4000
    assert first[0] == other[0] == draws[0]
    assert abs(np.corrcoef(first[1:], other[1:])[0, 1]) < 0.06
    assert sorted(other) == sorted(draws[:4000])


def test_rounding_makes_nothing_faster() -> None:
    """The last bit of a sum differs from processor to processor."""
    before_s = np.array([0.1, 0.1, 0.1, 0.1, 0.1])
    after_s = before_s * np.array([1.0, 1 - 2e-16, 1 + 2e-16, 0.99, 1.01])
    found = contrast_of_draws(before_s, after_s, batches=1.0)
    assert found.probability_faster == 0.25


def test_every_layout_is_that_of_predict() -> None:
    path = ROOT / "perfmodel/documents/machines/runs/dgx-h100.json"
    question = Question(
        machine=InferredDocument.read(path).machine,
        workload=read_model("llama2-7b", sequence=None),
        layout=parse_layout("dp=64 zero=1 micro_batch=1 accumulation=16"),
        capacity_bytes=80 * 2**30,
    )
    was = Scenario(question=question)
    found = compare_scenarios(scenarios_of(was, ["tp=2,4", "micro_batch=2"])).scenarios
    direct = answer(question.at(parse_layout(found[1].point.layout)))
    assert found[1].point.step_s == direct.step
    large = [existing(entry.point.large_model) for entry in found]
    ratio = existing(found[1].contrast).throughput_ratio.nominal
    assert ratio == pytest.approx(large[1].tokens_per_s.nominal / large[0].tokens_per_s.nominal)


def test_one_process_is_compared_without_losses() -> None:
    """Nobody takes DataParallel apart; beside it losses of DDP would seem to appear or to vanish."""
    machine = ProfileDocument.read(shipped_machines()["titan-rtx"]).machine
    question = Question(
        machine=machine,
        workload=timed_workload(machine, WORKLOAD, trace=traced()),
        layout=parse_layout("dp=2 micro_batch=16 one_process=yes"),
        cluster=open_cluster("2 pcie3-x16"),
    )
    layouts = {
        "micro_batch=32": "micro_batch=32 one_process=yes",
        "one_process=no": "micro_batch=16",
    }
    for change, layout in layouts.items():
        found = compare_scenarios(scenarios_of(Scenario(question=question), [change])).scenarios
        assert [each.lost_s for each in found] == [{}, {}]
        assert found[1].point.step_s == answer(question.at(parse_layout(f"dp=2 {layout}"))).step
