"""Other links, clusters and devices as a what-if, against the commands that predict them directly."""

from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.cost.rescaling import rescaled_profile
from perfmodel.documents.hardware import LINK_SHARE, find_device, shipped_catalogue
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.machine import Evidence
from perfmodel.scenarios.fields import link_of, scenarios_of, usable_links
from tests.existing import existing
from tests.perfmodel.cost.test_rescale import calibrated
from tests.perfmodel.profiles import Machine, profile
from tests.perfmodel.scenarios import test_fields
from tests.perfmodel.scenarios.test_fields import scenario
from tests.perfmodel.traces import WORKLOAD, traced

ETHERNET = str(test_fields.ETHERNET)
DATA_CENTRES = str(test_fields.ETHERNET.with_name("two-data-centres.toml"))


def test_a_cluster_that_is_set_is_that_of_predict() -> None:
    machine = profile(Machine(noise=(0.9, 1.0, 1.1), relative_error=0.02))
    found = pm.whatif(machine, "heavy", {"cluster": ETHERNET}, devices=32, batch=16)
    [direct] = pm.predict(machine, "heavy", devices=(32,), batch=16, cluster=ETHERNET).points
    assert found.scenarios[1].point == direct
    assert any("links as in" in caveat for caveat in found.caveats)


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
