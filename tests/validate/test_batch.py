"""The judge of the batch: trainings that follow a law exactly, and what is reported of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.noise import with_noise
from perfmodel.documents.observation import TrainingObservation
from perfmodel.errors import CalibrationUnavailable, MeasurementFailed, UsageError
from perfmodel.machine.measured import MeasuredMachine
from tests.calibrate.test_noise import training
from tests.fakes import FakeLauncher
from tests.perfmodel.profiles import Machine, profile
from validate.batch import BUDGETS, BatchRequest, judge_batches, planned_tasks, validate_batch

#: Steps of the law with a critical batch of 96: 40 (1 + 96 / B), so that batch 32 takes 160.
FEWEST, CRITICAL = 40, 96


def calibrated() -> MeasuredMachine:
    return with_noise(
        profile(Machine()), [training(steps=160, seed=seed, scale=CRITICAL) for seed in (0, 1)]
    )


def run(batch: int, rate: float, steps: int | None, *, seed: int) -> TrainingObservation:
    """One rank; ``None``: the target was not reached."""
    return TrainingObservation(
        task=f"{batch} {rate} {seed}",
        round=0,
        workload="lenet",
        samples="ten patterns",
        world_size=1,
        micro_batch=batch,
        learning_rate=rate,
        seed=seed,
        target_loss=0.4,
        mean_squares=(),
        squares_of_mean=(),
        evaluated_steps=(1, steps or 999),
        losses=(2.3, 0.4 if steps else 2.0),
    )


def by_the_law(batch: int) -> int:
    return round(FEWEST * (1 + CRITICAL / batch))


def campaign(batches: tuple[int, ...]) -> list[TrainingObservation]:
    """Rate 1 is best everywhere; 0.5 takes twice as long, and 2 never arrives."""
    return [
        run(batch, rate, None if factor is None else factor * by_the_law(batch), seed=seed)
        for batch in batches
        for rate, factor in ((0.5, 2), (1.0, 1), (2.0, None))
        for seed in (0, 1, 2)
    ]


@pytest.fixture
def request_(tmp_path: Path) -> BatchRequest:
    return BatchRequest(profile=calibrated(), folder=tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "observations.jsonl"
    found.write_text("")
    return found


def test_trainings_that_follow_the_law_are_predicted(request_: BatchRequest, path: Path) -> None:
    found = judge_batches(request_, campaign((8, 32, 96, 384)), path)
    assert [row.batch for row in found.batches] == [8, 32, 96, 384]
    assert {row.learning_rate for row in found.batches} == {1.0}
    assert not any(row.is_rate_at_edge for row in found.batches)
    assert found.batches[0].measured_steps == by_the_law(8) == 520
    assert found.summary.num_settings == 3
    # the exponent is a nuisance: the median law is a little flatter than that of the trainings
    assert found.summary.worst_absolute < 0.15
    assert found.coverage == 1
    # 32 x 160 samples at 8 would be 640 steps, 520 are measured
    assert found.same_samples.worst_absolute == pytest.approx(1 - 5120 / 384 / 50, abs=0.01)
    assert found.summary.mape < found.same_samples.mape < found.same_steps.mape


def test_a_wrong_noise_scale_shows_as_an_error(request_: BatchRequest, path: Path) -> None:
    wrong = with_noise(
        profile(Machine()), [training(steps=160, seed=seed, scale=2000) for seed in (0, 1)]
    )
    found = judge_batches(replace(request_, profile=wrong), campaign((8, 32, 96, 384)), path)
    assert found.batches[-1].signed_error < -0.3
    assert found.measured_critical_batch.p5 < CRITICAL < found.measured_critical_batch.p95


def test_a_wrong_level_is_told_from_a_wrong_law(request_: BatchRequest, path: Path) -> None:
    """All trainings of the campaign take a quarter longer than those of the calibration did."""
    slower = [
        run(batch, 1.0, round(1.25 * by_the_law(batch)), seed=seed)
        for batch in (8, 32, 96, 384)
        for seed in (0, 1, 2)
    ]
    found = judge_batches(request_, slower, path)
    exact = judge_batches(request_, campaign((8, 32, 96, 384)), path)
    assert found.summary.bias < exact.summary.bias - 0.15
    assert found.from_own_reference is not None
    assert exact.from_own_reference is not None
    assert found.from_own_reference.mape == pytest.approx(exact.from_own_reference.mape, abs=0.02)
    without = judge_batches(request_, [e for e in slower if e.micro_batch != 32], path)
    assert without.from_own_reference is None


def test_batches_that_never_arrive_and_rates_at_the_edge_are_named(
    request_: BatchRequest, path: Path
) -> None:
    trainings = [
        *(run(8, 1.0, 500 + seed, seed=seed) for seed in range(3)),
        *(run(32, 1.0, 160, seed=seed) for seed in range(3)),
        *(run(999, 1.0, None, seed=seed) for seed in range(3)),
    ]
    found = judge_batches(request_, trainings, path)
    assert found.not_reached == (999,)
    assert all(row.is_rate_at_edge for row in found.batches)
    assert found.batches[0].measured_steps == 501


def test_a_start_that_never_arrives_counts_as_longer_than_any(
    request_: BatchRequest, path: Path
) -> None:
    """Of 100, 300 and never the median is 300, slower than another rate's 200, 200 and 200."""
    trainings = [
        *(run(32, 1.0, 160, seed=seed) for seed in range(3)),
        *(run(8, 1.0, steps, seed=seed) for seed, steps in enumerate((100, None, 300))),
        *(run(8, 0.5, 200, seed=seed) for seed in range(3)),
    ]
    at_8 = judge_batches(request_, trainings, path).batches[0]
    assert (at_8.batch, at_8.learning_rate, at_8.measured_steps) == (8, 0.5, 200)
    alone = judge_batches(request_, trainings[:6], path).batches[0]
    assert (alone.steps, alone.measured_steps) == ((100, 300), 300)


def test_one_batch_tells_nothing(request_: BatchRequest, path: Path) -> None:
    with pytest.raises(MeasurementFailed, match="must hold at least two batches that reached"):
        judge_batches(request_, campaign((32,)), path)


def test_every_task_differs_and_starts_are_not_those_of_the_calibration() -> None:
    scale = calibrated().noise_scale("lenet")
    assert scale is not None
    tasks = planned_tasks(scale, BUDGETS["quick"], seed=1)
    assert len({task.name for task in tasks}) == len(tasks) == 18
    assert {task.world_size for task in tasks} == {1}
    assert min(task.seed for task in tasks) > 100
    # a larger batch is given fewer steps
    assert max(t.max_steps for t in tasks if t.micro_batch == 256) < 4 * 160


def test_what_cannot_be_judged_is_refused_before_anything_runs(request_: BatchRequest) -> None:
    def judged(request: BatchRequest) -> None:
        validate_batch(request, FakeLauncher(), on_progress=lambda _: None)

    with pytest.raises(UsageError, match="--budget: must be one of quick, standard, thorough"):
        judged(replace(request_, budget="endless"))
    with pytest.raises(CalibrationUnavailable, match="must describe this machine"):
        judged(request_)
