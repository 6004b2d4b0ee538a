"""perfmodel goodput: what it prints, and what it refuses."""

import json

import pytest

from perfmodel.documents.goodput import GoodputDocument
from perfmodel.errors import EXIT_NOT_FEASIBLE, EXIT_OK, EXIT_USAGE
from tests.perfmodel.cli.command import Run, complaint

FAILING = ("--devices", 100, "--work-days", 10, "--mtbf-device-hours", 2400, "--replicas", 5)


def test_the_table_says_where_the_time_goes(run: Run) -> None:
    result = run(
        "goodput", *FAILING, "--checkpoint-s", 60, "--restart-s", 600, "--deadline-days", 99
    )
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
    line = complaint(run("goodput", "--devices", 10**9, *FAILING[2:]), EXIT_NOT_FEASIBLE)
    assert "fewer devices" in line
