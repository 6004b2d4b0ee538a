"""The page's numbers are those of the command line, and its extras follow by hand."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.documents.workload import WorkloadDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.models import SHIPPED_TRACES
from perfmodel.page import LoggedSpeed, PageQuestion, read_machines, typed, unmeasured_machines
from perfmodel.page.answers import Answers
from perfmodel.page.server import start
from tests.benchmarks.shipped_traces import MACHINES
from tests.benchmarks.shipped_traces import traced as retraced
from tests.existing import existing
from tests.perfmodel.cli.command import Run
from tests.perfmodel.cli.test_trace_command import document as traced
from tests.perfmodel.cost.large_samples import document
from tests.perfmodel.cost.test_rescale import calibrated
from tests.perfmodel.page.sessions import NOISY, answers, layout_answers
from tests.perfmodel.profiles import as_file
from tests.perfmodel.traces import WORKLOAD
from tests.perfmodel.traces import traced as traced_step

CLUSTERS = Path(__file__).parents[3] / "docs/clusters"
ETHERNET = CLUSTERS / "ethernet.toml"


def asked(**changes: object) -> PageQuestion:
    fields = {"profile": "here", "workload": "heavy", "layout": "dp=8", "batch": 16}
    return PageQuestion.model_validate(fields | changes)


def test_an_answer_is_that_of_whatif() -> None:
    changes = {"network.bandwidth": "0.25x", "gradients": "bf16"}
    [before, after] = pm.whatif(NOISY, "heavy", changes, devices=8, batch=16).scenarios
    answer, point = answers().answer(asked(changes=changes)), after.point
    for name in ("step_s", "speedup", "exposed_comm_s", "evidence"):
        assert answer[name] == getattr(point, name)
    assert answer["throughput"] == point.samples_per_s
    assert answer["breakdown_s"] == {c.value: s for c, s in point.breakdown_s.items()}
    assert answer["contrast"] == after.contrast
    assert answer["step_s"] != before.point.step_s


def test_strong_scaling_leaves_out_what_cannot_be_split() -> None:
    detail = answers().detail(asked(layout="dp=2", batch=8, scaling="strong"))
    assert [point["devices"] for point in detail["curve"]] == [1, 2, 4, 8]
    with pytest.raises(NotFeasible, match="multiple of devices"):
        answers().answer(asked(layout="dp=3", batch=8, scaling="strong"))


def test_a_layout_is_answered_as_predict_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document().write(tmp_path / "inferred.json")
    monkeypatch.chdir(tmp_path)
    question = PageQuestion(
        profile="inferred",
        workload="gpt2-xl",
        layout="dp=4 tp=5 pp=2 zero=1",
        batch=64,
        capacity_bytes=80 * 2**30,
    )
    answer = layout_answers().answer(question)
    result = run(*shlex.split(answer["command"])[1:], "--json")
    [told] = PredictionDocument.of_text(result.stdout).points
    large = existing(told.large_model)
    assert (answer["step_s"], answer["throughput"]) == (told.step_s, large.tokens_per_s)
    assert answer["efficiency"] == large.mfu
    memory = existing(answer["memory"])
    assert memory["fit_probability"] == told.fit_probability
    assert sum(memory["parts_bytes"].values()) == pytest.approx(memory["needed_bytes"])
    curve = layout_answers().detail(question)["curve"]
    [here] = [point for point in curve if point["devices"] == 40]
    assert here["value"].nominal == pytest.approx(answer["throughput"].nominal)


def test_memory_is_that_of_the_memory_command(run: Run, tmp_path: Path) -> None:
    profile, workload = tmp_path / "profile.json", tmp_path / "light.json"
    as_file(NOISY).write(profile)
    traced().write(workload)
    machines = read_machines([profile], [str(workload)], validation=None)
    [name] = machines
    changes = {"profile": name, "workload": "light", "layout": "dp=2", "batch": 8}
    answer = Answers(machines).answer(asked(**changes, capacity_bytes=2**30))
    words = ("--workload", workload, "--device-memory", "1GiB", "--micro-batch", 8, "--devices", 2)
    told = json.loads(run("memory", *words, "--json").stdout)
    memory = existing(answer["memory"])
    assert memory["verdict"] == "fits"
    for name in ("needed_bytes", "verdict", "fit_probability"):
        assert memory[name] == told[name]
    assert sum(memory["parts_bytes"].values()) == memory["needed_bytes"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workload": "nobody"}, "workload: must be one of"),
        ({"profile": "../../etc/passwd"}, "profile: must be one of here, got"),
        ({"changes": {"workload": "/etc/hosts.json"}}, "workload must be asked by its own field"),
        ({"changes": {"devices": "3"}}, "devices must be asked by its own field"),
        ({"changes": {"network.speed": "2x"}}, "no field is named"),
        ({"layout": "dp=many"}, "dp must be a whole number"),
        ({"layout": f"dp={2**21}"}, "dp x tp x pp x cp must be <= 1,048,576"),
        ({"layout": "dp=4 tp=2"}, "must be dp=DEVICES on a calibrated machine"),
        ({"changes": {"accumulation": "1000000"}}, "must be <= 64"),
        ({"changes": {"bucket_cap": "1B"}}, "must be >= 1 MiB"),
    ],
)
def test_what_the_page_does_not_offer_is_refused(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        answers().answer(asked(**changes))


def test_only_paths_below_the_working_folder_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(Path("runs/profile.json")) == "runs/profile.json"
    assert typed(tmp_path / "runs" / "profile.json") == "runs/profile.json"
    assert typed(Path("/srv/secret/profile.json")) == "profile.json"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A calibrated machine, a traced workload and a cluster, as ``perfmodel serve`` reads them."""
    (tmp_path / "runs").mkdir()
    machine = replace(NOISY, operators=calibrated().operators)
    as_file(machine).write(tmp_path / "runs" / "profile.json")
    WorkloadDocument(workload=WORKLOAD, trace=traced_step()).write(
        tmp_path / "runs" / "traced.json"
    )
    (tmp_path / "ethernet.toml").write_bytes(ETHERNET.read_bytes())
    monkeypatch.chdir(tmp_path)
    machines = read_machines(
        [Path("runs/profile.json")],
        ["runs/traced.json"],
        validation=None,
        clusters=[Path("ethernet.toml")],
    )
    return Answers(machines)


def asked_of(answers: Answers, **changes: object) -> PageQuestion:
    [profile] = answers.catalogue["profiles"]
    return asked(**{"profile": profile["name"], "layout": "dp=32"} | changes)


def test_a_cluster_is_that_of_predict_and_ends_the_curve(served: Answers) -> None:
    answer = served.answer(asked_of(served, cluster="ethernet"))
    machine = pm.read_profile("runs/profile.json")
    counts = (1, 2, 4, 8, 16, 32)
    document = pm.predict(machine, "heavy", devices=counts, batch=16, cluster=ETHERNET)
    assert answer["step_s"] == document.points[-1].step_s
    curve = served.detail(asked_of(served, cluster="ethernet"))["curve"]
    assert [point["devices"] for point in curve] == list(counts)
    assert [point["value"] for point in curve] == [p.speedup for p in document.points]
    assert answer["contrast"] is not None
    assert any("cluster file" in caveat for caveat in answer["caveats"])
    with pytest.raises(NotFeasible, match="at most 32"):
        served.answer(asked_of(served, cluster="ethernet", layout="dp=64"))


def test_the_command_names_the_file_and_prints_the_same(served: Answers, run: Run) -> None:
    changes = {"cluster.bandwidth": "400Gb/s", "network.link": "eth-100", "gradients": "bf16"}
    answer = served.answer(asked_of(served, cluster="ethernet", changes=changes))
    program, *words = shlex.split(answer["command"])
    assert program == "perfmodel"
    assert "cluster=ethernet.toml" in words
    result = run(*words, "--json")
    told = WhatIfDocument.of_text(result.stdout).scenarios[-1]
    assert told.point.step_s == answer["step_s"]
    assert told.contrast == answer["contrast"]


def test_a_device_that_is_not_present_can_be_chosen_for_what_was_traced(served: Answers) -> None:
    changes = {"device": "h100-sxm5"}
    here = served.answer(asked_of(served, workload=WORKLOAD.name, layout="dp=1"))
    there = served.answer(asked_of(served, workload=WORKLOAD.name, layout="dp=1", changes=changes))
    assert there["step_s"].nominal < here["step_s"].nominal
    assert there["evidence"]["compute"] == "assumed"
    entries = {e["name"]: e["no_devices"] for e in served.catalogue["profiles"][0]["workloads"]}
    assert entries[WORKLOAD.name] == ""
    assert "perfmodel trace" in entries["heavy"]
    with pytest.raises(UsageError, match="whole steps of another device cannot be scaled"):
        served.answer(asked_of(served, changes=changes))


def test_the_catalogue_of_the_page_holds_what_can_be_chosen(served: Answers) -> None:
    found = served.catalogue
    [cluster] = found["clusters"]
    assert (cluster["name"], cluster["devices"]) == ("ethernet", 32)
    assert [tier["name"] for tier in cluster["tiers"]] == ["rack", "uplink"]
    assert {"nvlink4", "pcie5-x16", "eth-800"} <= {link["id"] for link in found["links"]}
    assert "h100-sxm5" in {device["id"] for device in found["devices"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "/etc/passwd"}, "cluster: must be one of ethernet"),
        ({"cluster": "ethernet.toml"}, "cluster: must be one of ethernet"),
        ({"changes": {"cluster": "/etc/passwd"}}, "cluster must be asked by its own field"),
        ({"changes": {"cluster.bandwidth": "1Gb/s"}}, "needs a cluster file"),
    ],
)
def test_no_file_can_be_named(served: Answers, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        served.answer(asked_of(served, **changes))


@pytest.fixture(scope="module")
def shipped() -> Answers:
    """The page as it starts where nothing was measured."""
    return Answers(read_machines(unmeasured_machines(), [], validation=None))


def test_it_starts_without_torch_and_knows_the_memory_of_its_devices() -> None:
    """A GPU's trace ships, so that the default install has something to show."""
    script = (
        "import sys; sys.modules['torch'] = None; from perfmodel import page as m;"
        "from perfmodel.page import answers as a;"
        "from perfmodel.page.server import start;"
        "s = a.Answers(m.read_machines(m.unmeasured_machines(), [], validation=None));"
        "print(s.answer(start(s.catalogue))['setting']);"
        "print(s.catalogue['profiles'][0]['memory_bytes'] / 2**30)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert told.stdout.startswith("torchvision:resnet50, devices x micro-batch 8 x 128")
    assert told.stdout.split()[-1] == "80.0"


@pytest.mark.parametrize(("precision", "machine"), MACHINES.items())
def test_the_trace_that_ships_is_the_one_of_today(precision: str, machine: str) -> None:
    now = retraced(machine)
    kept = WorkloadDocument.read(SHIPPED_TRACES / f"torchvision-resnet50-{precision}.json.gz")
    assert (kept.workload, kept.trace, kept.memory) == (now.workload, now.trace, now.memory)


def test_beyond_one_node_the_page_and_the_command_assume_the_same_links(
    shipped: Answers, run: Run
) -> None:
    question = start(shipped.catalogue).model_copy(update={"layout": "dp=16"})
    found = shipped.answer(question)
    nodes = shipped.catalogue["profiles"][0]["nodes"]["name"]
    assert nodes == "200 Gb/s InfiniBand per GPU"
    assert any(nodes in caveat for caveat in found["caveats"])
    words = ("--machine", "dgx-a100", "--workload", "torchvision:resnet50", "--batch", "128")
    told = PredictionDocument.of_text(run("predict", *words, "--devices", "16", "--json").stdout)
    assert (told.cluster, told.points[0].step_s) == (nodes, found["step_s"])


def test_a_logged_speed_is_judged_as_diagnose_does(shipped: Answers, run: Run) -> None:
    asked = start(shipped.catalogue).model_copy(update={"batch": 32})
    predicted = shipped.answer(asked)["step_s"]
    assert shipped.detail(asked)["diagnosis"] is None

    def judged(value: float, unit: str) -> dict[str, Any]:
        logged = {"value": value, "unit": unit}
        found = shipped.detail(type(asked).model_validate(asked.model_dump() | {"logged": logged}))
        return existing(found["diagnosis"])

    normal = judged(8 * 32 / predicted.nominal, "samples/s")
    assert normal["logged_s"] == pytest.approx(predicted.nominal)
    assert (normal["verdict"], normal["causes"]) == ("normal", [])
    slow = judged(5e3 * predicted.p95, "ms")
    assert (slow["verdict"], slow["share_slower"]) == ("slower than normal", 0.0)
    told = json.loads(run(*shlex.split(slow["command"])[1:], "--json").stdout)
    odds = {cause["cause"]: cause["odds"] for cause in told["causes"]}
    # The command traces as a processor runs the model; the page has the trace of a GPU.
    assert {fit.cause: fit.odds for fit in slow["causes"]} == {
        fit.cause: pytest.approx(odds[fit.cause], abs=0.05) for fit in slow["causes"]
    }
    assert slow["causes"][0].odds > 0.2
    assert slow["next_name"]
    with pytest.raises(UsageError, match="must be in ms, s or samples/s"):
        judged(1.0, "tokens/s")


def test_a_logged_speed_of_a_large_model_is_judged_too(shipped: Answers) -> None:
    [large] = [p for p in shipped.catalogue["profiles"] if p["name"] == "dgx-a100 (LLMs)"]
    assert large["memory_bytes"] == 80 * 2**30
    question = PageQuestion(
        profile=large["name"],
        workload="llama2-7b",
        layout="dp=16 zero=3",
        batch=64,
        logged=LoggedSpeed(value=1000, unit="tokens/s"),
    )
    found = existing(shipped.detail(question)["diagnosis"])
    assert found["logged_s"] == pytest.approx(64 * 4096 / 1000)
    assert found["verdict"] == "slower than normal"
    assert found["causes"]


def test_without_a_data_sheet_diagnose_says_more(served: Answers, run: Run) -> None:
    logged = {"value": 1e4, "unit": "ms"}
    found = existing(served.detail(asked_of(served, layout="dp=2", logged=logged))["diagnosis"])
    assert (found["verdict"], found["causes"]) == ("slower than normal", [])
    assert "10 s" in run(*shlex.split(found["command"])[1:]).stdout
