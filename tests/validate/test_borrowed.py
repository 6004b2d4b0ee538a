"""A campaign's stages: each has its time, the next call runs what is left; ``test_virtual`` runs a whole one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.documents.verdicts import CampaignDocument, StageRun
from perfmodel.errors import EXIT_FAILURE, EXIT_OUT_OF_TOLERANCE, EXIT_USAGE, UsageError
from tests.fakes import FakeLauncher
from tests.perfmodel.cli.command import Run, complaint
from validate.borrowed import CAMPAIGN, BorrowedRequest, Stage, carry_out, unfinished

Ended = dict[str, int | None]


@pytest.fixture
def request_(tmp_path: Path) -> BorrowedRequest:
    folder = tmp_path / "lent"
    return BorrowedRequest(folder=folder, limit_s=600, device="cpu", num_ranks=1)


@pytest.fixture
def stages_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ended], list[str]]:
    """Stages end with these codes at once; the names of those that ran."""

    def play(codes: Ended) -> list[str]:
        ran: list[str] = []

        def run(stage: Stage, log: Path, *, limit_s: float) -> StageRun:
            log.write_text("words\n")
            ran.append(stage.name)
            code = codes.get(stage.name, 0)
            return StageRun(
                name=stage.name,
                command=stage.arguments,
                exit_code=code,
                limit_s=limit_s,
                took_s=0.0,
                words="last words",
            )

        monkeypatch.setattr("validate.borrowed._run", run)
        return ran

    return play


def carried_out(request: BorrowedRequest) -> tuple[CampaignDocument, list[str]]:
    lines: list[str] = []
    campaign, archive = carry_out(request, FakeLauncher(), on_line=lines.append)
    assert archive.exists()
    return campaign, lines


def test_the_next_call_runs_what_is_left(
    request_: BorrowedRequest, stages_end: Callable[[Ended], list[str]]
) -> None:
    ran = stages_end({"steps": EXIT_OUT_OF_TOLERANCE, "models": None, "memory": EXIT_FAILURE})
    campaign, lines = carried_out(request_)
    assert ran == ["doctor", "calibration", "memory", "steps", "models"]
    assert unfinished(request_, campaign) == ("memory", "models")
    assert any("memory: failed with exit code 1" in line and "last words" in line for line in lines)
    assert sum(stage.limit_s for stage in campaign.stages) >= 600
    ran = stages_end({})
    campaign, _ = carried_out(request_)
    assert ran == ["memory", "models"]
    assert unfinished(request_, campaign) == ()
    assert campaign == CampaignDocument.read(request_.folder / CAMPAIGN)


def test_without_a_profile_nothing_is_judged(
    request_: BorrowedRequest, stages_end: Callable[[Ended], list[str]]
) -> None:
    ran = stages_end({"calibration": None})
    carried_out(request_)
    assert ran == ["doctor", "calibration"]


def test_other_options_are_refused(
    request_: BorrowedRequest, stages_end: Callable[[Ended], list[str]]
) -> None:
    stages_end({})
    carried_out(request_)
    other = BorrowedRequest(
        folder=request_.folder, limit_s=60, device="cpu", num_ranks=1, models=("mlp",)
    )
    with pytest.raises(UsageError, match=r"was begun with models = lenet,resnet18, got mlp"):
        carried_out(other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minutes", 9), "must come with --campaign"),
        (("--campaign", "lent", "--budget", "quick"), "a campaign is quick"),
        (("--campaign", "lent", "--resume"), "the same command goes on"),
        (("--campaign", "lent", "--nnodes", 2), "runs on one node"),
        (("--campaign", "lent", "--minutes", 0), "--minutes: must be finite and > 0"),
        (("--campaign", "lent", "--device-kind", "cpu", "--nproc", 4000), "ranks per node must be"),
    ],
)
def test_options_that_make_no_sense(run: Run, arguments: tuple[object, ...], words: str) -> None:
    assert words in complaint(run("calibrate", *arguments), EXIT_USAGE)
