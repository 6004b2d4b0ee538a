"""A calibration that other guests of the host disturbed is repeated, then refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from perfmodel.documents.testbed import Run, TrainingRun, read_runs
from perfmodel.errors import MeasurementFailed
from tests.validate.testbed.played import PlayedCluster, serve
from validate.testbed import cluster as player
from validate.testbed import ddp, plan, testbed
from validate.testbed.disturbance import cost_uncertainty, disturbed, quietest_of_each


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> PlayedCluster:
    played = PlayedCluster()
    serve(played, monkeypatch)
    monkeypatch.setattr(plan, "judged", lambda *_, **__: (plan.plain()[0], plan.hard()[0]))
    monkeypatch.setattr(ddp, "NUM_DRAWS", 10)
    return played


def run(folder: Path, **changes: object) -> None:
    request = testbed.TestbedRequest(folder=folder, **changes)  # type: ignore[arg-type]
    testbed.validate_testbed(request, on_progress=lambda _: None)


def calibrated(folder: Path) -> list[Run]:
    return read_runs(folder / "calibration.jsonl")


def rush(name: str, *, own_cpu_s: float, steal: float = 0.0) -> TrainingRun:
    """One step in a second of two cores."""
    setting = plan.machine_costs(0)[-1]
    found = player.play_training(PlayedCluster(), setting)  # type: ignore[arg-type]
    host = found.host.model_copy(
        update={"window_s": 1.0, "num_cores": 2, "own_cpu_s": own_cpu_s, "steal_cpu_s": 2 * steal}
    )
    return found.model_copy(
        update={
            "setting": found.setting.model_copy(update={"name": name}),
            "step_s": (1.0,),
            "host": host,
        }
    )


def test_costs_of_the_same_work_at_three_moments() -> None:
    """1, e and e^2 seconds: variance of the logarithms 1, error of their median 1.2533 / sqrt 3."""
    runs = [rush(str(n), own_cpu_s=float(np.exp(n))) for n in range(3)]
    assert cost_uncertainty(runs) == pytest.approx(1.2533 / np.sqrt(3), rel=1e-4)
    assert cost_uncertainty(runs[:1]) == 0.0


def test_of_runs_with_one_name_the_quietest_counts() -> None:
    runs = [rush("a", own_cpu_s=9.0, steal=0.3), rush("a", own_cpu_s=1.0, steal=0.01)]
    assert quietest_of_each([*runs, rush("b", own_cpu_s=1.0)]) == [
        runs[1],
        rush("b", own_cpu_s=1.0),
    ]
    assert disturbed(runs) == []
    assert disturbed(runs[:1]) == runs[:1]


def test_disturbed_settings_are_run_again_before_anything_is_predicted(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    """Three attempts at each of the first two settings are disturbed; later repeats are quiet."""
    cluster.disturbed = 6
    run(tmp_path)
    names = [found.setting.name for found in calibrated(tmp_path)]
    assert names == [s.name for s in plan.calibration()] + [s.name for s in plan.calibration()[:2]]
    assert disturbed(calibrated(tmp_path)) == []


def test_a_calibration_that_stays_disturbed_is_refused_and_can_be_continued(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    cluster.disturbed = 10_000
    with pytest.raises(
        MeasurementFailed, match=r"lost 15% at its quietest; continue with --resume"
    ):
        run(tmp_path)
    assert not (tmp_path / "plan.json").exists()
    cluster.disturbed = 0
    run(tmp_path, resume=True)
    assert (tmp_path / "testbed.json").exists()


def test_the_same_work_that_differs_makes_predictions_uncertain(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    """Waking costs drift by 1.4 % a setting."""
    cluster.drift = 0.014
    run(tmp_path)
    uncertain = ddp.calibrate(calibrated(tmp_path))
    assert uncertain.cost_uncertainty > 0.02
    setting = plan.hard()[-1]
    found, sure = (
        ddp.predict(setting, c).step_s
        for c in (uncertain, dataclasses.replace(uncertain, cost_uncertainty=0.0))
    )
    assert found.p95 / found.p5 > sure.p95 / sure.p5


def test_costs_that_contradict_each_other_are_refused(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    cluster.drift = 0.1
    with pytest.raises(MeasurementFailed, match="same work must cost the machine the same"):
        run(tmp_path)
