"""perfmodel goodput: what it prints, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.documents.goodput import GoodputDocument
from perfmodel.errors import EXIT_OK
from perfmodel.machine.measured import CheckpointProfile, CurvePoint
from tests.perfmodel.cli.command import Run
from tests.perfmodel.profiles import Machine, as_file, profile

ASKED = ("--devices", 100, "--work-days", 10)
JOB = (*ASKED, "--replicas", 5)
FAILING = (*JOB, "--mtbf-device-hours", 2400, "--checkpoint-s", 60)


def test_the_table_says_where_the_time_goes(run: Run) -> None:
    result = run("goodput", *FAILING, "--restart-s", 600, "--deadline-days", 99)
    assert result.exit_code == EXIT_OK
    for words in ("restart", "Effective training time", "exact formula", "Done within 99 d: 100 %"):
        assert words in result.stdout
    assert "the mean time between failures is taken as exact" in result.stdout


def test_json_is_a_document_with_the_same_job(run: Run) -> None:
    result = run(
        "goodput",
        *("--devices", 8, "--work-days", 2, "--replicas", 3, "--cause", "gpu=100,replace"),
        *("--cause", "net=50", "--spares", 1, "--replacement-hours", 5, "--checkpoint-s", 30),
        *("--best-interval", "--json"),
    )
    document = GoodputDocument.model_validate(json.loads(result.stdout))
    assert [cause.takes_node for cause in document.job.causes] == [True, False]
    assert document.job.mtbf_s == pytest.approx(3600 / (8 / 100 + 8 / 50))
    assert document.job.replacement_s == 5 * 3600
    assert document.intervals is not None
    assert document.intervals.simulated


def test_a_job_that_never_fails_takes_its_work_and_one_checkpoint(run: Run) -> None:
    arguments = (*JOB, "--mtbf-device-hours", "inf", "--checkpoint-s", 3600)
    document = GoodputDocument.model_validate(
        json.loads(run("goodput", *arguments, "--json").stdout)
    )
    assert document.elapsed_s.p5 == document.elapsed_s.p95 == 10 * 86400 + 3600
    assert document.unplanned_stops.p95 == 0
    told = run("goodput", *arguments).stdout
    assert "Best interval: none, as nothing ever fails" in told
    assert "no failure is drawn, as asked" in told
    assert "clusters" not in told


def test_free_checkpoints_have_no_best_interval(run: Run) -> None:
    arguments = ("--mtbf-device-hours", 2400, "--checkpoint-interval-s", 600, "--best-interval")
    told = run("goodput", *JOB, *arguments)
    assert told.exit_code == EXIT_OK
    assert "Best interval: the shorter the better, as a checkpoint costs nothing" in told.stdout
    (row,) = [line for line in told.stdout.splitlines() if line.startswith("checkpoint ")]
    assert row.split() == ["checkpoint", "0", "s", "0.0", "%"]


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """A profile whose storage takes 0.1 s and 10 ns per byte to write, half of it to read."""
    points = tuple(
        CurvePoint(at=size, time_s=0.1 + size * 1e-8, relative_error=0.02) for size in (1e6, 1e8)
    )
    halves = tuple(replace(p, time_s=p.time_s / 2) for p in points)
    path = tmp_path / "profile.json"
    document = profile(Machine())
    checkpoint = CheckpointProfile(write=points, read=halves)
    as_file(replace(document, checkpoint=checkpoint)).write(path)
    return path


def test_a_checkpoint_costs_what_the_calibration_timed(run: Run, timed: Path) -> None:
    """800 GB by 8: 0.1 s + 100 GB at 100 MB/s = 1,000.1 s to write, 500.05 s to read."""
    asked = (*JOB, "--mtbf-device-hours", 24000, "--profile", timed, "--json")
    sized = (*asked, "--checkpoint-size", "800GB", "--checkpoint-writers", 8)
    document = GoodputDocument.model_validate(json.loads(run("goodput", *sized).stdout))
    assert document.job.checkpoint_write_s == pytest.approx(1000.1)
    assert document.job.restart_s == pytest.approx(500.05)
    assert "by 8 processes, said not to slow each other (assumed)" in document.caveats[0]
    restarted = run("goodput", *sized, "--restart-s", 70)
    assert GoodputDocument.model_validate(json.loads(restarted.stdout)).job.restart_s == 70
