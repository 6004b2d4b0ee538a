"""perfmodel batch and validate-convergence: what they print, and what they refuse."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from perfmodel.documents.batch import BatchDocument
from perfmodel.errors import EXIT_FAILURE, EXIT_OK, EXIT_OUT_OF_TOLERANCE, EXIT_USAGE
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


HEAD = "benchmark,round,global_batch,mean,olympic_mean\n"


def table(path: Path, rows: Sequence[tuple[str, str, float, object, object]]) -> Path:
    path.write_text(HEAD + "".join(",".join(map(str, row)) + "\n" for row in rows), "utf-8")
    return path


def test_a_table_that_follows_the_law_passes(run: Run, tmp_path: Path) -> None:
    rows = [
        (name, round_name, batch, 100 * (1 + batch / critical), "")
        for name, critical in (("a", 900), ("b", 4000))
        for round_name in ("1.0", "2.0")
        for batch in (128, 256, 512, 1024, 2048, 4096)
    ]
    result = run("validate-convergence", table(tmp_path / "points.csv", rows), "--json")
    verdict = json.loads(result.stdout)
    assert result.exit_code == EXIT_OK
    judged = verdict["summaries"][0]
    # the second round repeats the first: two series, two unseen batches each
    assert (judged["num_series"], judged["num_predictions"]) == (2, 4)
    # the prior of the width pulls a little: six points do not settle it
    assert judged["mape"] < 0.08
    assert judged["mape_constant"] > 0.3


def test_a_table_that_no_law_explains_is_out_of_tolerance(run: Run, tmp_path: Path) -> None:
    rows = [
        ("odd", "1.0", batch, samples, "")
        for batch, samples in ((64, 100), (128, 101), (256, 900), (512, 5))
    ]
    result = run("validate-convergence", table(tmp_path / "points.csv", rows))
    assert "FAILED on smaller two thirds" in result.stdout
    assert "out of tolerance" in complaint(result, EXIT_OUT_OF_TOLERANCE)


def test_a_broken_table_names_the_line(run: Run, tmp_path: Path) -> None:
    bad = table(tmp_path / "bad.csv", [("a", "1.0", 64, "many", "")])
    assert "bad.csv: line 2: could not convert" in complaint(
        run("validate-convergence", bad), EXIT_FAILURE
    )
    negative = table(tmp_path / "negative.csv", [("a", "1.0", -64, 3, "")])
    assert "line 2: batch must be finite and > 0" in complaint(
        run("validate-convergence", negative), EXIT_FAILURE
    )
    (tmp_path / "columns.csv").write_text("benchmark,round\n", "utf-8")
    assert "must have the columns" in complaint(
        run("validate-convergence", tmp_path / "columns.csv"), EXIT_FAILURE
    )
    assert "cannot be read" in complaint(
        run("validate-convergence", tmp_path / "none.csv"), EXIT_FAILURE
    )
    assert "must hold a benchmark with three batches" in complaint(
        run("validate-convergence", table(tmp_path / "few.csv", [("a", "1", 64, 3, "")])),
        EXIT_FAILURE,
    )
