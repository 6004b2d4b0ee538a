"""perfmodel goodput: what it prints, and what it refuses."""

import json

import pytest

from perfmodel.documents.goodput import GoodputDocument
from perfmodel.errors import EXIT_NOT_FEASIBLE, EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint

JOB = ("--devices", 100, "--work-days", 10, "--replicas", 5)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 0, "--work-days", 1), "--devices: must be >= 1, got 0"),
        (("--devices", 1, "--work-days", -1), "--work-days: must be finite and > 0, got -1"),
        (("--devices", 1, "--work-days", "nan"), "--work-days: must be finite and > 0, got nan"),
        (("--devices", 1), "Missing option '--work-days'"),
        ((*FAILING, "--restart-s", -3), "--restart-s: must be finite and >= 0, got -3"),
        (
            (*FAILING, "--checkpoint-interval-s", 0),
            "--checkpoint-interval-s: must be finite and > 0",
        ),
        ((*FAILING, "--cause", "gpu=9"), "--cause: excludes --mtbf-device-hours"),
        (
            ("--devices", 1, "--work-days", 1, "--cause", "gpu"),
            "--cause: must look like gpu=140000",
        ),
        (("--devices", 1, "--work-days", 1, "--cause", "gpu=0"), "got 'gpu=0'"),
        (JOB, "--mtbf-device-hours: must be given, or --cause for each kind of failure"),
        ((*JOB, "--mtbf-device-hours", 0), "must be > 0, or inf if nothing ever fails, got 0.0"),
        ((*JOB, "--mtbf-device-hours", "nan"), "or inf if nothing ever fails, got nan"),
        ((*JOB, "--mtbf-device-hours", 9), "--checkpoint-s: must be > 0 for a best interval"),
        ((*JOB, "--cause", "gpu=9"), "give the time of one write, or --checkpoint-interval-s"),
        (
            (*FAILING, "--replacement-hours", 4),
            "--replacement-hours: means nothing without --spares",
        ),
        ((*FAILING, "--maintenance-hours", 4), "--maintenance-hours: means nothing without"),
        ((*FAILING, "--replicas", 1), "replicas must be >= 2, got 1"),
        ((*FAILING, "--deadline-days", -1), "deadline_s must be finite and > 0"),
    ],
)
def test_bad_flags_are_one_line(run: Run, arguments: tuple[object, ...], message: str) -> None:
    assert message in complaint(run("goodput", *arguments), EXIT_USAGE)


def test_a_job_that_never_ends_is_not_feasible(run: Run) -> None:
    line = complaint(run("goodput", *FAILING, "--devices", 10**9), EXIT_NOT_FEASIBLE)
    assert "fewer devices" in line


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
