"""perfmodel batch: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from calibrate.noise import with_noise
from perfmodel.documents.goodput import BatchDocument
from perfmodel.errors import EXIT_CALIBRATION, EXIT_OK
from tests.calibrate.test_noise import training
from tests.perfmodel.cli.command import Result, Run, complaint
from tests.perfmodel.profiles import Machine, as_file, profile

#: 100 (1 + B / 1000) epochs.
POINTS = "250=125,500=150,1000=200,2000=300"


def test_json_holds_the_speed_up_that_counts(run: Run) -> None:
    """From 250 to 2,000: 7 times the samples/s, 300 / 125 = 2.4 times the samples: 2.9 times."""
    result = run(
        *("batch", "--points", POINTS, "--samples-per-s", "250=100,2000=700", "--json"),
        *("--samples-per-unit", 1000),
    )
    document = BatchDocument.model_validate(json.loads(result.stdout))
    largest = document.outlooks[-1]
    assert largest.batch == 2000
    assert largest.throughput_speedup == pytest.approx(7)
    assert largest.target_speedup is not None
    assert largest.target_speedup.nominal == pytest.approx(7 / 2.4, rel=0.05)
    assert largest.time_to_target_s is not None
    assert largest.time_to_target_s.nominal == pytest.approx(300_000 / 700, rel=0.05)
    assert largest.is_beyond_critical
    assert not largest.is_extrapolated
    assert document.critical_batch.p5 < 1000 < document.critical_batch.p95


def test_the_table_warns_beyond_the_critical_batch_and_beyond_the_data(run: Run) -> None:
    result = run("batch", "--points", POINTS, "--batches", "100,9000")
    assert result.exit_code == EXIT_OK
    assert "2000, 9000; each device more adds little" in result.stdout
    assert "beyond the largest batch that was run (2000): 9000" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:14])) <= 80


def test_two_points_are_said_to_tell_little(run: Run) -> None:
    assert "mostly the prior's" in run("batch", "--points", "64=10,128=11").stdout


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """A profile with a noise scale of 96 for its workload light, trained at batch 32 in 80 steps."""
    path = tmp_path / "profile.json"
    trainings = [training(seed=seed, name="light") for seed in (0, 1)]
    as_file(with_noise(profile(Machine()), trainings)).write(path)
    return path


def document_of(result: Result) -> BatchDocument:
    assert result.exit_code == EXIT_OK, result
    return BatchDocument.model_validate(json.loads(result.stdout))


def test_a_noise_scale_stands_for_runs_at_other_batches(run: Run, noisy: Path) -> None:
    """80 steps of 32 samples at a scale of 96: 20 steps at least, 20 (1 + 96 / 384) = 25 at 384."""
    document = document_of(
        run("batch", "--workload", "light", "--profile", noisy, "--batches", 384, "--json")
    )
    assert document.noise_scale == pytest.approx(96)
    first, last = document.outlooks
    assert first.batch == 32
    assert first.samples.nominal == pytest.approx(2560, rel=0.01)
    # the exponent is a nuisance: the median law is a little flatter than this one
    assert last.steps.nominal == pytest.approx(25, rel=0.15)
    assert last.steps.p5 < 22
    assert last.is_beyond_critical
    assert last.learning_rate_factor == pytest.approx(3.2, rel=0.05)
    assert document.caveats[0].startswith("the noise scale is of light learning ten")


def test_devices_are_priced_by_the_profile(run: Run, noisy: Path) -> None:
    """Samples per second are those of predict; the speed-up that counts is smaller."""
    document = document_of(
        run(
            *("batch", "--workload", "light", "--profile", noisy, "--devices", "2,8"),
            *("--micro-batch", 16, "--json"),
        )
    )
    assert [entry.batch for entry in document.outlooks] == [32, 128]
    last = document.outlooks[-1]
    assert last.throughput_speedup is not None
    assert last.target_speedup is not None
    assert last.throughput_speedup > 1.5 * last.target_speedup.nominal
    assert last.time_to_target_s is not None


def test_norms_of_a_training_give_its_scale(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "norms.csv"
    rows = f"2,16,{1 + 96 / 16},{1 + 96 / 32}\n" * 40
    path.write_text(f"ranks,local_batch,mean_square,square_of_mean\n{rows}")
    document = document_of(
        run("batch", "--gradient-norms", path, "--points", "32=10", "--batches", 96, "--json")
    )
    assert document.noise_scale == pytest.approx(96)
    assert document.outlooks[-1].samples_ratio.nominal == pytest.approx(1.5, rel=0.05)


def test_a_workload_without_a_noise_scale_is_refused(run: Run, noisy: Path) -> None:
    line = complaint(run("batch", "--workload", "lihgt", "--profile", noisy), EXIT_CALIBRATION)
    assert "must hold the noise scale of 'lihgt', got that of light; did you mean light?" in line


def test_predict_warns_beyond_the_critical_batch(run: Run, noisy: Path) -> None:
    """Batch 128 at a scale of 96: (128 + 96) / (32 + 96) = 1.75; a little less in the median."""
    asked = (
        "predict",
        "--profile",
        noisy,
        "--workload",
        "light",
        "--batch",
        16,
        "--verbose",
        "--devices",
    )
    assert "critical batch" not in run(*asked, 4).stdout
    words = run(*asked, 8).stdout
    assert "global batches up to 128 pass the critical batch of about 96 samples" in words
    assert "128 needs about 1.6 times the samples [1.3 - " in words
    more = run(
        *("whatif", "--profile", noisy, "--workload", "light", "--batch", 16, "--devices", 4),
        *("--set", "devices=8"),
    )
    assert "critical batch of about 96" in more.stdout
