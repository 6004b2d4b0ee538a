"""A campaign's stages: each has its time, the next call runs what is left; ``test_virtual`` runs a whole one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.documents.verdicts import CampaignDocument, StageRun
from perfmodel.errors import EXIT_FAILURE, EXIT_OUT_OF_TOLERANCE, UsageError
from tests.fakes import FakeLauncher
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
    with pytest.raises(UsageError, match=r"was begun with models = lenet,resnet18, got mlp"):
        carried_out(replace(request_, models=("mlp",)))
