"""The judge: predicts first, measures then, and never fits."""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from calibrate.campaign import PLAN, write_plan
from calibrate.environment import describe_environment
from calibrate.launch import Launch, LaunchFlags
from calibrate.processes import usable_cores
from calibrate.task import WorkOrder, failure_of, setting_of
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.errors import InvalidDocument, MeasurementFailed, UsageError
from perfmodel.layout import RunSetting
from perfmodel.machine.measured import MeasuredMachine
from perfmodel.report.validation import summary_lines
from tests.existing import existing
from tests.fakes import FakeLauncher
from tests.perfmodel.profiles import Machine, profile
from tests.played_worker import PlayedWorker, append
from tests.validate.samples import calibrated_step, four_workloads
from validate.validate import VALIDATION, ValidationRequest, judge_recorded, validate

pytestmark = pytest.mark.skipif(
    usable_cores() < 2 or find_spec("torch") is None,
    reason="the profile that is judged has two ranks: needs 2 cores and torch",
)


@pytest.fixture(scope="session")
def here() -> str:
    return str(describe_environment(observe_s=0.0)["host"]["fingerprint"])


def measured_here(machine: MeasuredMachine, here: str) -> MeasuredMachine:
    return replace(machine, origin=replace(machine.origin, fingerprint=here))


@pytest.fixture
def request_(tmp_path: Path, here: str) -> ValidationRequest:
    """A machine known to 2 % with two workloads, and two calibrated settings to repeat."""
    machine = replace(
        profile(Machine(relative_error=0.02)),
        steps=(calibrated_step("light", 1, 16), calibrated_step("light", 2, 16)),
    )
    return ValidationRequest(
        profile=measured_here(machine, here), folder=tmp_path / "run", budget="quick"
    )


def as_predicted(folder: Path, *, slower: float = 1.0) -> Callable[[RunSetting], float]:
    """Step time that the plan predicts, for the held-out settings; 10 ms for the repeated ones."""

    def step_s(setting: RunSetting) -> float:
        predicted = json.loads((folder / PLAN).read_text())["predicted_s"]
        return slower * float(predicted.get(setting.label, {"nominal": 0.01})["nominal"])

    return step_s


def run(request: ValidationRequest, behave: Callable[[Launch], None]) -> ValidationDocument:
    return validate(request, FakeLauncher(behave=behave), on_progress=lambda _progress: None)


def plan_of(request: ValidationRequest) -> Any:
    return json.loads((request.folder / PLAN).read_text())


def test_predictions_and_gates_are_on_disk_before_the_first_run(
    request_: ValidationRequest,
) -> None:
    class Seen(Exception):
        pass

    plans = []

    def look(_call: Launch) -> None:
        plans.append(plan_of(request_))
        raise Seen

    with pytest.raises(Seen):
        run(request_, look)
    plan = plans[0]
    gates = plan["gates"]
    assert gates["step_mape"] == pytest.approx(gates["expected_noise"] + 0.0433, abs=1e-4)
    assert plan["profile_digest"] == request_.profile.digest
    assert len(plan["predicted_s"]) == 8
    assert set(plan["predicted_s"]["light n=2 micro_batch=8 accumulation=2 ddp cap=default"]) == {
        "p5",
        "nominal",
        "p95",
    }


def test_a_machine_that_does_as_predicted_passes_without_error(request_: ValidationRequest) -> None:
    document = run(request_, PlayedWorker(step_s=as_predicted(request_.folder)))
    assert plan_of(request_)["predicted_s"] == {
        row.setting.label: asdict(row.predicted_s) for row in document.settings
    }
    assert document.passed
    assert document.coverage_of_runs == 1.0
    assert document.summary.num_settings == 8
    assert document.summary.mape == pytest.approx(0, abs=1e-9)
    assert document.speedup_summary is not None
    assert document.speedup_summary.num_settings == 6
    # A median of ratios is not quite the ratio of medians.
    assert document.speedup_summary.mape == pytest.approx(0, abs=0.01)
    assert {repeat.setting.world_size for repeat in document.repeats} == {1, 2}
    assert document == ValidationDocument.read(request_.folder / VALIDATION)


def test_single_runs_are_counted_beside_their_means(request_: ValidationRequest) -> None:
    as_said, calls = as_predicted(request_.folder), itertools.count()

    def one_in_two_is_slow(setting: RunSetting) -> float:
        return as_said(setting) * (1.0 if next(calls) % 2 else 100.0)

    document = run(request_, PlayedWorker(step_s=one_in_two_is_slow))
    assert document.coverage_of_runs is not None
    assert 0.25 <= document.coverage_of_runs <= 0.75
    assert document.coverage < 0.25
    (gate,) = (gate for gate in document.gates if gate.name == "coverage of single runs")
    assert gate.value == document.coverage_of_runs
    assert existing(document.speedup_coverage) < 0.75


def test_what_memory_does_not_hold_is_named_and_not_judged(request_: ValidationRequest) -> None:
    worker = PlayedWorker(
        step_s=as_predicted(request_.folder),
        holds=lambda setting: setting.workload != "heavy" or setting.world_size == 1,
    )
    document = run(request_, worker)
    assert {label[:9] for label in document.too_large} == {"heavy n=2"}
    assert document.summary.num_settings == 8 - len(document.too_large)
    assert document.too_large == judge_recorded(request_.profile, request_.folder).too_large


def test_what_fails_in_every_run_is_counted_and_not_judged(request_: ValidationRequest) -> None:
    def fails(setting: RunSetting) -> bool:
        return setting.workload == "heavy" and setting.accumulation > 1

    played = PlayedWorker(step_s=as_predicted(request_.folder), skips=fails)

    def ranks(call: Launch) -> None:
        played(call)
        order = WorkOrder.read(Path(call.arguments[0]))
        for task in order.tasks:
            if fails(setting_of(task)):
                append(Path(order.output), failure_of(task, "AcceleratorError: CUDA error"))

    document = run(request_, ranks)
    assert [entry.reason for entry in document.failed] == ["AcceleratorError: CUDA error"]
    assert document.failed[0].name.startswith("heavy n=2")
    assert document.summary.num_settings == 7
    assert document.failed == judge_recorded(request_.profile, request_.folder).failed
    assert "Failed in every run: 1 settings, not judged" in summary_lines(document)


def test_records_are_judged_as_they_were_there(request_: ValidationRequest) -> None:
    there = run(request_, PlayedWorker(step_s=as_predicted(request_.folder, slower=1.1)))
    home = judge_recorded(request_.profile, request_.folder)
    assert home.model_copy(update={"provenance": there.provenance}) == there
    other = replace(request_.profile, origin=replace(request_.profile.origin, digest="other"))
    with pytest.raises(InvalidDocument, match="must be of the profile beside it"):
        judge_recorded(other, request_.folder)
    plan = plan_of(request_)
    for broken, words in (
        (plan | {"predicted_s": {"alexnet": plan["predicted_s"].popitem()[1]}}, "got alexnet"),
        (plan | {"gates": {}, "budget": 3}, "budget"),
        # Those of older versions were of means, and do not say so.
        ({k: v for k, v in plan.items() if k != "intervals_of"}, "judge with the version that"),
    ):
        write_plan(request_.folder, broken)
        with pytest.raises(InvalidDocument, match=words):
            judge_recorded(request_.profile, request_.folder)


def test_a_machine_that_is_slower_than_predicted_fails(request_: ValidationRequest) -> None:
    """Every step takes 1.3 times as long as predicted: errors of -23 %, the same speed-ups."""
    document = run(request_, PlayedWorker(step_s=as_predicted(request_.folder, slower=1.3)))
    assert not document.passed
    assert document.summary.bias == pytest.approx(1 / 1.3 - 1)
    # They were calibrated at 10 ms.
    assert [repeat.signed_error for repeat in document.repeats] == pytest.approx([1 / 1.3 - 1] * 2)
    assert {gate.name for gate in document.gates if not gate.passed} == {
        "step-time MAPE",
        "worst step-time error",
        "coverage of single runs",
    }
    assert {name: entry.bias for name, entry in document.summary_by_workload.items()} == {
        "light": pytest.approx(1 / 1.3 - 1),
        "heavy": pytest.approx(1 / 1.3 - 1),
    }


def test_a_setting_that_was_not_run_is_missed_and_can_be_resumed(
    request_: ValidationRequest, here: str
) -> None:
    worker = PlayedWorker(
        step_s=as_predicted(request_.folder),
        fingerprint=here,
        skips=lambda setting: setting.accumulation == 2,
    )
    with pytest.raises(MeasurementFailed, match="2 predicted settings were not run, such as light"):
        run(request_, worker)
    assert not (request_.folder / VALIDATION).exists()
    worker.skips = lambda _setting: False
    assert run(replace(request_, resume=True), worker).passed
    assert len(worker.finished) == len(set(worker.finished))


def test_four_workloads_are_enough_to_judge_both_ends_of_the_coverage(
    request_: ValidationRequest, here: str
) -> None:
    machine = measured_here(four_workloads(Machine(relative_error=0.02)), here)
    document = run(
        ValidationRequest(profile=machine, folder=request_.folder),
        PlayedWorker(step_s=as_predicted(request_.folder)),
    )
    coverage = next(gate for gate in document.gates if gate.name.startswith("coverage"))
    # Accuracy is promised inside the calibrated range; eight settings lie beyond it.
    assert document.summary.num_settings == 32
    assert existing(document.summary_extrapolated).num_settings == 8
    assert len(document.settings) == 40
    assert document.speedup_summary is not None
    assert existing(document.speedup_summary_extrapolated).num_settings == 4
    assert document.speedup_summary.num_settings == len(document.speedups) - 4
    speedup = next(gate for gate in document.gates if gate.name == "speed-up MAPE")
    assert speedup.value == document.speedup_summary.mape
    assert coverage.at_most == 0.97


def test_a_profile_of_two_nodes_is_judged_on_two_and_not_on_one(
    request_: ValidationRequest,
) -> None:
    """Two ranks, one on each node."""
    machine = replace(request_.profile, num_nodes=2, ranks_per_node=1)
    flags = LaunchFlags(nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=29_517)
    with pytest.raises(UsageError, match="--nnodes: must be 2, as in the profile, got 1"):
        run(replace(request_, profile=machine), PlayedWorker())
    assert not request_.folder.exists()
    launcher = FakeLauncher(behave=PlayedWorker(step_s=as_predicted(request_.folder)))
    request = replace(request_, profile=machine, flags=flags)
    validate(request, launcher, on_progress=lambda _progress: None)
    (topology,) = {call.topology for call in launcher.calls}
    assert (topology.num_nodes, topology.ranks_per_node) == (2, 1)
    assert (request_.folder / VALIDATION).exists()
