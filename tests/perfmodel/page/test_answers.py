"""The page's numbers are those of the command line, and its extras follow by hand."""

import json
import shlex
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.documents.page import LayoutQuestion, Spending, StepQuestion
from perfmodel.documents.prediction import PredictionDocument, WhatIfDocument
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.page.answers import Answers
from perfmodel.page.machines import read_session, typed
from tests.perfmodel.cli.command import runner
from tests.perfmodel.cli.test_memory_command import document as traced
from tests.perfmodel.cost.large_samples import document
from tests.perfmodel.page.sessions import NOISY, answers, layout_answers
from tests.perfmodel.profiles import as_file


def asked(**changes: object) -> StepQuestion:
    fields = {"kind": "step", "profile": "here", "workload": "heavy", "devices": 8, "batch": 16}
    return StepQuestion.model_validate(fields | changes)


def test_an_answer_is_that_of_whatif() -> None:
    changes = {"network.bandwidth": "0.25x", "gradients": "bf16"}
    [before, after] = pm.whatif(NOISY, "heavy", changes, devices=8, batch=16).scenarios
    answer = answers().answer(asked(changes=changes))
    assert answer.step_s == after.point.step_s
    assert answer.speedup == after.point.speedup
    assert answer.throughput == after.point.samples_per_s
    assert answer.exposed_comm_s == after.point.exposed_comm_s
    assert answer.breakdown_s == {c.value: s for c, s in after.point.breakdown_s.items()}
    assert answer.evidence == after.point.evidence
    assert answer.contrast == after.contrast
    assert answer.step_s != before.point.step_s


def test_the_curve_is_that_of_predict() -> None:
    answer = answers().answer(asked(devices=6))
    counts = [point.devices for point in answer.curve]
    assert counts == sorted({6, *(2**power for power in range(11))})
    document = pm.predict(NOISY, "heavy", devices=counts, batch=16)
    assert [p.value for p in answer.curve] == [p.speedup for p in document.points]


def test_strong_scaling_leaves_out_what_cannot_be_split() -> None:
    answer = answers().answer(asked(devices=2, batch=8, scaling="strong"))
    assert [point.devices for point in answer.curve] == [1, 2, 4, 8]
    with pytest.raises(NotFeasible, match="multiple of devices"):
        answers().answer(asked(devices=3, batch=8, scaling="strong"))


def test_the_command_below_an_answer_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    as_file(NOISY).write(tmp_path / "runs" / "profile.json")
    monkeypatch.chdir(tmp_path)
    changes = {"network.latency": "0.5x", "device.speed": "2x", "accumulation": "2"}
    answer = answers().answer(asked(scaling="strong", batch=64, changes=changes))
    program, *words = shlex.split(answer.command)
    assert program == "perfmodel"
    result = runner(monkeypatch, capsys)(*words, "--json")
    told = WhatIfDocument.model_validate_json(result.stdout).scenarios[-1]
    assert told.point.step_s == answer.step_s
    assert told.point.speedup == answer.speedup
    assert told.contrast == answer.contrast


def test_the_timeline_covers_the_step_in_order() -> None:
    answer = answers().answer(asked())
    assert {lane.name for lane in answer.timeline} >= {"compute", "communication"}
    ends = []
    for lane in answer.timeline:
        for before, after in zip(lane.spans, lane.spans[1:], strict=False):
            assert before.end_s <= after.start_s + 1e-12
        ends.append(lane.spans[-1].end_s)
    assert max(ends) == pytest.approx(answer.timeline_step_s)


def test_money_is_device_hours_times_price() -> None:
    """3 EUR an hour on 8 devices at r samples/s: 1e6 samples cost 24 * 1e6 / r / 3600."""
    spending = Spending(per_device_hour=3, currency="EUR", work=1e6)
    answer = answers().answer(asked(spending=spending))
    assert answer.spent is not None
    assert answer.spent.cost.nominal == pytest.approx(24 * 1e6 / answer.throughput.nominal / 3600)
    assert answer.spent.cost.p95 == pytest.approx(24 * 1e6 / answer.throughput.p5 / 3600)


def test_a_layout_is_answered_as_predict_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document().write(tmp_path / "inferred.json")
    monkeypatch.chdir(tmp_path)
    question = LayoutQuestion(
        kind="layout",
        profile="inferred",
        workload="gpt2-xl",
        layout="dp=4 tp=5 pp=2 zero=1",
        batch=64,
        capacity_bytes=80 * 2**30,
    )
    answer = layout_answers().answer(question)
    result = runner(monkeypatch, capsys)(*shlex.split(answer.command)[1:], "--json")
    [told] = PredictionDocument.model_validate_json(result.stdout).points
    assert told.large_model is not None
    assert (answer.step_s, answer.throughput) == (told.step_s, told.large_model.tokens_per_s)
    assert answer.efficiency == told.large_model.mfu
    assert answer.memory is not None
    assert answer.memory.fit_probability == told.fit_probability
    assert sum(answer.memory.parts_bytes.values()) == pytest.approx(answer.memory.needed_bytes)
    [here] = [point for point in answer.curve if point.devices == 40]
    assert here.value.nominal == pytest.approx(answer.throughput.nominal)
    assert {lane.name.partition(":")[0] for lane in answer.timeline} == {"stage 0", "stage 1"}


def test_memory_is_that_of_the_memory_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile, workload = tmp_path / "profile.json", tmp_path / "light.json"
    as_file(NOISY).write(profile)
    traced().write(workload)
    session = read_session([profile], [workload], validation=None, budget=None)
    [name] = session.machines
    changes = {"profile": name, "workload": "light", "devices": 2, "batch": 8}
    answer = Answers(session).answer(asked(**changes, capacity_bytes=2**30))
    words = ("--workload", workload, "--device-memory", "1GiB", "--micro-batch", 8, "--devices", 2)
    told = json.loads(runner(monkeypatch, capsys)("memory", *words, "--json").stdout)
    assert answer.memory is not None
    assert answer.memory.needed_bytes == told["needed_bytes"]
    assert answer.memory.verdict == told["verdict"] == "fits"
    assert answer.memory.fit_probability == told["fit_probability"]
    assert sum(answer.memory.parts_bytes.values()) == answer.memory.needed_bytes


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workload": "nobody"}, "workload: must be one of"),
        ({"profile": "../../etc/passwd"}, "profile: must be one of here, got"),
        ({"changes": {"workload": "/etc/hosts.json"}}, "workload must be asked by its own field"),
        ({"changes": {"devices": "3"}}, "devices must be asked by its own field"),
        ({"changes": {"network.speed": "2x"}}, "no field is named"),
        ({"changes": {"accumulation": "1000000"}}, "must be <= 64"),
        ({"changes": {"bucket_cap": "1B"}}, "must be >= 1 MiB"),
    ],
)
def test_what_is_not_on_the_desk_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        answers().answer(asked(**changes))


def test_only_paths_below_the_working_folder_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(Path("runs/profile.json")) == "runs/profile.json"
    assert typed(tmp_path / "runs" / "profile.json") == "runs/profile.json"
    assert typed(Path("/srv/secret/profile.json")) == "profile.json"
