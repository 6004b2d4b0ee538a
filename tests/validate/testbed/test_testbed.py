"""The campaign: calibrated on two ranks, predictions before runs, resumable, judged."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calibrate.campaign import write_plan
from calibrate.locks import LOCK_VARIABLE
from calibrate.processes import usable_cores
from perfmodel.documents.verdicts import TestbedDocument
from perfmodel.errors import (
    InvalidDocument,
    MeasurementFailed,
    UsageError,
)
from perfmodel.layout import RunSetting
from perfmodel.report import validation as tables
from perfmodel.step.stages import gradient_buckets
from tests.turns import machine_is_held
from tests.validate.testbed.played import PlayedCluster, serve
from validate.testbed import campaign as player
from validate.testbed import ddp, plan
from validate.testbed.campaign import CampaignRequest
from validate.testbed.links import STEAL
from validate.testbed.records import Job, TrainingRun, read_runs


def few(patch: pytest.MonkeyPatch) -> PlayedCluster:
    """A few settings of each kind are enough to see the campaign work."""
    played = PlayedCluster()
    serve(played, patch)
    patch.setattr(plan, "judged", lambda *_, **__: plan.plain()[::12])
    patch.setattr(ddp, "NUM_DRAWS", 10)
    return played


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> PlayedCluster:
    return few(monkeypatch)


def run(folder: Path, **changes: object) -> TestbedDocument:
    request = CampaignRequest(folder=folder, **changes)  # type: ignore[arg-type]
    return ddp.validate_testbed(request, on_progress=lambda _: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole campaign, during which nobody else measured."""
    folder, held = tmp_path_factory.mktemp("testbed"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_VARIABLE, str(folder / "measuring.lock"))
        played = few(patch)
        ddp.validate_testbed(
            CampaignRequest(folder=folder),
            on_progress=lambda _: held.append(machine_is_held()),
        )
        assert not machine_is_held()
    assert len(held) == len(played.played) == len(set(played.played))
    assert all(held)
    return folder


def test_a_cluster_that_obeys_the_model_is_predicted_almost_exactly(finished: Path) -> None:
    document = TestbedDocument.read(finished / "testbed.json")
    assert max(abs(step.signed_error) for step in document.settings) < 1e-3
    assert document.families[-1].summary.num_settings == len(document.settings)


def test_tables_name_every_setting_and_mark_what_was_missed(finished: Path) -> None:
    document = TestbedDocument.read(finished / "testbed.json")
    grid, families = tables.testbed_tables(document)
    assert {row[0] for row in grid.rows} == {step.name for step in document.settings}
    missed = document.settings[0].model_copy(update={"is_covered": False})
    changed = document.model_copy(update={"settings": (missed,)})
    (row,) = tables.testbed_tables(changed)[0].rows
    assert row[-1] == "NO"
    assert [row[0] for row in families.rows] == ["4 ranks", "8 ranks", "16 ranks", "all"]
    assert len(document.gates) == 4


def test_predictions_are_on_disk_before_runs_and_a_campaign_continues_where_it_stopped(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    cluster.at_most = len(plan.calibration())
    with pytest.raises(MeasurementFailed):
        run(tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["gates"]["mape"] == 0.01
    assert content["predicted_s"]
    assert not (tmp_path / "runs.jsonl").exists()
    cluster.at_most += 2
    with pytest.raises(MeasurementFailed):
        run(tmp_path, resume=True)
    # What a killed writer leaves of a line is measured again.
    for name in ("calibration.jsonl", "runs.jsonl"):
        path = tmp_path / name
        if path.exists():
            path.write_text(path.read_text() + '{"kind": "trai')
    with pytest.raises(UsageError, match="--resume"):
        run(tmp_path)
    cluster.at_most = 10_000
    document = run(tmp_path, resume=True)
    assert len(cluster.played) == len(set(cluster.played))
    assert len(document.settings) == len(read_runs(tmp_path / "runs.jsonl"))


def test_another_seed_cannot_continue_a_plan_of_other_settings(
    cluster: PlayedCluster, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "plan.json").read_text())
    raw["predicted_s"].popitem()
    write_plan(tmp_path, raw)
    with pytest.raises(UsageError, match="--budget and --seed"):
        run(tmp_path, resume=True)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(InvalidDocument, match="plan cannot be read"):
        run(tmp_path, resume=True)
    assert not cluster.played


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"kind": "training"}\n')
    with pytest.raises(InvalidDocument, match=r"line 1: training\.started_utc"):
        read_runs(path)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert player.obstacle() == "no ip, tc, unshare, setpriv, mount"


def test_calibration_never_sees_more_than_two_ranks() -> None:
    assert {setting.fabric.num_ranks for setting in plan.calibration()} == {1, 2}
    assert {setting.fabric.num_ranks for setting in plan.plain()} == {4, 8, 16}


def test_there_are_enough_settings_and_all_have_names_of_their_own() -> None:
    assert len(plan.plain()) >= 40
    names = [s.name for s in (*plan.calibration(), *plan.plain())]
    assert len(names) == len(set(names))


def test_the_product_sees_layers_in_the_order_of_their_gradients() -> None:
    model = plan.emulated("lenet", compute_s=0.3)
    workload = plan.as_workload(model)
    assert workload.parameters[0].num_elements == 850
    assert workload.parameters[-1].ready_fraction == 1.0
    buckets = gradient_buckets(
        workload,
        RunSetting(workload="lenet", world_size=4, micro_batch=1, bucket_cap_mb=0.1).layout,
    )
    assert [b.size_bytes for b in buckets] == [4 * (850 + 10_164 + 48_120), 4 * (2_416 + 156)]


def test_what_other_guests_disturbed_is_run_again_and_the_quietest_is_kept() -> None:
    """Two cores and an attempt: 50 % CPU steal time, then 1 %; or 50, 30 and 40 % and no more attempts."""

    @dataclass
    class Disturbed:
        steal: list[float]

        def play(self, job: Job) -> dict[str, Any]:
            reply = PlayedCluster().play(job)
            after = reply["ranks"][0]["after"]
            after["counters"][STEAL] = self.steal.pop(0) * after["at_s"] * usable_cores()
            return reply

    for steal, attempts, kept in (([0.5, 0.01], 2, 0.01), ([0.5, 0.3, 0.4], 3, 0.3)):
        found = player.play(Disturbed(steal), plan.plain()[0])
        assert isinstance(found, TrainingRun)
        assert found.attempts == attempts
        assert found.host.steal_share == pytest.approx(kept)
