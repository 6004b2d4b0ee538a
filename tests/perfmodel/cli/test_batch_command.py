"""perfmodel batch: what it prints, and what it refuses."""

import json

import pytest

from perfmodel.documents.batch import BatchDocument
from perfmodel.errors import EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint

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
    assert largest.target_speedup.p50 == pytest.approx(7 / 2.4, rel=0.05)
    assert largest.time_to_target_s is not None
    assert largest.time_to_target_s.p50 == pytest.approx(300_000 / 700, rel=0.05)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--points", "64=10"), "--points: must name at least two batches, got '64=10'"),
        (("--points", ""), "--points: must name at least two batches"),
        (("--points", "64,128"), "--points: must look like 256=4.0,512=5.0, got '64'"),
        (("--points", "64=10,64=11"), "--points: must name each batch once, got 64 twice"),
        (("--points", "64=10,128=-1"), "--points: numbers must be finite and > 0, got '-1'"),
        (("--points", "64=10,128=nan"), "got 'nan'"),
        (("--points", POINTS, "--batches", "x"), "--batches: numbers must be finite and > 0"),
        (("--points", POINTS, "--samples-per-s", "9"), "--samples-per-s: must look like"),
        (
            ("--points", POINTS, "--samples-per-unit", 0),
            "--samples-per-unit: must be finite and > 0",
        ),
    ],
)
def test_bad_flags_are_one_line(run: Run, arguments: tuple[object, ...], message: str) -> None:
    assert message in complaint(run("batch", *arguments), EXIT_USAGE)
