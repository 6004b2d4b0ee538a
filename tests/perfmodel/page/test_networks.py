"""Clusters, links and devices of the page: the numbers of ``predict --cluster`` and ``whatif``."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.documents.page import StepQuestion
from perfmodel.documents.prediction import WhatIfDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.page.answers import Answers
from perfmodel.page.export import export_html
from perfmodel.page.machines import read_session
from tests.perfmodel.cli.command import runner
from tests.perfmodel.cost.test_rescale import calibrated
from tests.perfmodel.page.sessions import NOISY
from tests.perfmodel.profiles import as_file
from tests.perfmodel.traces import WORKLOAD, traced

CLUSTERS = Path(__file__).parents[3] / "docs/clusters"
ETHERNET = CLUSTERS / "ethernet.toml"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A calibrated machine, a traced workload and a cluster, as ``perfmodel serve`` reads them."""
    (tmp_path / "runs").mkdir()
    machine = replace(NOISY, operators=calibrated().operators)
    as_file(machine).write(tmp_path / "runs" / "profile.json")
    WorkloadDocument(workload=WORKLOAD, trace=traced()).write(tmp_path / "runs" / "traced.json")
    (tmp_path / "ethernet.toml").write_bytes(ETHERNET.read_bytes())
    monkeypatch.chdir(tmp_path)
    session = read_session(
        [Path("runs/profile.json")],
        [Path("runs/traced.json")],
        validation=None,
        budget=None,
        clusters=[Path("ethernet.toml")],
    )
    return Answers(session)


def asked(answers: Answers, **changes: object) -> StepQuestion:
    [profile] = answers.catalogue.profiles
    fields = {"kind": "step", "profile": profile.name, "workload": "heavy", "devices": 32}
    return StepQuestion.model_validate(fields | {"batch": 16} | changes)


def test_a_cluster_is_that_of_predict_and_ends_the_curve(served: Answers) -> None:
    answer = served.answer(asked(served, cluster="ethernet"))
    machine = pm.read_profile("runs/profile.json")
    counts = (1, 2, 4, 8, 16, 32)
    document = pm.predict(machine, "heavy", devices=counts, batch=16, cluster=ETHERNET)
    assert answer.step_s == document.points[-1].step_s
    assert [point.devices for point in answer.curve] == list(counts)
    assert [point.value for point in answer.curve] == [p.speedup for p in document.points]
    assert answer.contrast is not None
    assert any("cluster file" in caveat for caveat in answer.caveats)
    with pytest.raises(NotFeasible, match="at most 32"):
        served.answer(asked(served, cluster="ethernet", devices=64))


def test_the_command_names_the_file_and_prints_the_same(
    served: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"cluster.bandwidth": "400Gb/s", "network.link": "eth-100", "gradients": "bf16"}
    answer = served.answer(asked(served, cluster="ethernet", changes=changes))
    program, *words = shlex.split(answer.command)
    assert program == "perfmodel"
    assert "cluster=ethernet.toml" in words
    result = runner(monkeypatch, capsys)(*words, "--json")
    told = WhatIfDocument.model_validate_json(result.stdout).scenarios[-1]
    assert told.point.step_s == answer.step_s
    assert told.contrast == answer.contrast


def test_a_device_that_is_not_present_can_be_chosen_for_what_was_traced(served: Answers) -> None:
    changes = {"device": "h100-sxm5"}
    here = served.answer(asked(served, workload=WORKLOAD.name, devices=1))
    there = served.answer(asked(served, workload=WORKLOAD.name, devices=1, changes=changes))
    assert there.step_s.nominal < here.step_s.nominal
    assert there.evidence["compute"] == "assumed"
    entries = {entry.name: entry for entry in served.catalogue.profiles[0].workloads}
    assert entries[WORKLOAD.name].no_devices == ""
    assert "perfmodel trace" in entries["heavy"].no_devices
    with pytest.raises(UsageError, match="whole steps of another device cannot be scaled"):
        served.answer(asked(served, changes=changes))


def test_the_catalogue_of_the_page_holds_what_can_be_chosen(served: Answers) -> None:
    found = served.catalogue
    [cluster] = found.clusters
    assert (cluster.name, cluster.devices) == ("ethernet", 32)
    assert [tier.name for tier in cluster.tiers] == ["rack", "uplink"]
    assert {"nvlink4", "pcie5-x16", "eth-800"} <= {link.id for link in found.links}
    assert "h100-sxm5" in {device.id for device in found.devices}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "/etc/passwd"}, "cluster: must be one of ethernet"),
        ({"cluster": "ethernet.toml"}, "cluster: must be one of ethernet"),
        ({"changes": {"cluster": "ethernet.toml"}}, "cluster must be asked by its own field"),
        ({"changes": {"cluster": "/etc/passwd"}}, "cluster must be asked by its own field"),
        ({"changes": {"cluster.bandwidth": "1Gb/s"}}, "needs a cluster file"),
    ],
)
def test_no_file_can_be_named(served: Answers, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        served.answer(asked(served, **changes))


def test_a_file_to_send_keeps_the_cluster(served: Answers) -> None:
    text = export_html(served, asked(served, cluster="ethernet", batch=None))
    assert '"cluster":"ethernet"' in text
    assert str(Path.cwd()) not in text


def test_links_that_other_jobs_share_are_refused(tmp_path: Path) -> None:
    as_file(NOISY).write(tmp_path / "profile.json")
    shared = tmp_path / "shared.toml"
    text = ETHERNET.read_text(encoding="utf-8")
    shared.write_text(text + '\n[[traffic]]\ntier = "uplink"\njobs = 1\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"--cluster: cluster 2 racks .* must have no"):
        read_session(
            [tmp_path / "profile.json"], [], validation=None, budget=None, clusters=[shared]
        )
