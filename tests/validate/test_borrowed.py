"""A campaign's stages: each has its time, the next call runs what is left; ``test_virtual`` runs a whole one."""

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfmodel.documents.verdicts import CampaignDocument, StageRun
from perfmodel.errors import EXIT_FAILURE, EXIT_OUT_OF_TOLERANCE, InvalidDocument, UsageError
from tests.fakes import FakeLauncher
from tests.perfmodel.cli.command import Run, complaint
from validate.borrowed import (
    ARCHIVE,
    CAMPAIGN,
    BorrowedRequest,
    Stage,
    carry_out,
    pack,
    unfinished,
    unpack,
)

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


def test_what_a_stage_leaves_is_for_those_after_it(
    request_: BorrowedRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an H100 took: memory, which starts over when it is cut, has half as much again; models have all the rest."""
    took_s = {"doctor": 6.0, "calibration": 260.0, "memory": 35.0, "steps": 80.0, "models": 241.0}
    now_s = [0.0]

    def run(stage: Stage, log: Path, *, limit_s: float) -> StageRun:
        is_cut = took_s[stage.name] > limit_s
        spent_s = min(took_s[stage.name], limit_s)
        now_s[0] += spent_s
        return StageRun(
            name=stage.name,
            command=stage.arguments,
            exit_code=None if is_cut else 0,
            limit_s=limit_s,
            took_s=spent_s,
            words=str(log),
        )

    monkeypatch.setattr("validate.borrowed._run", run)
    monkeypatch.setattr("validate.borrowed.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    campaign, _ = carried_out(replace(request_, limit_s=516))
    limit_s = {stage.name: stage.limit_s for stage in campaign.stages}
    assert limit_s["memory"] >= 1.5 * took_s["memory"]
    assert limit_s["models"] == 516 - 6 - 260 - 35 - 80
    assert unfinished(request_, campaign) == ("models",)


def test_a_call_that_its_time_cuts_ends_with_1(
    request_: BorrowedRequest, stages_end: Callable[[Ended], list[str]], run: Run
) -> None:
    stages_end({"models": None})
    carried_out(request_)
    words = ("--campaign", request_.folder, "--device-kind", "cpu", "--nproc", 1, "--minutes", 9)
    line = complaint(run("calibrate", *words), EXIT_FAILURE)
    assert "must be done within 9 min, got no end of models" in line
    assert line.endswith("repeat the command to go on")


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


# Archives: what is packed comes back, what no campaign packs is refused in one line.
@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    folder = tmp_path / "campaign"
    document = CampaignDocument(version="1", device_kind="cpu", models=("lenet",), num_ranks=1)
    document.write(folder / CAMPAIGN)
    (folder / "steps").mkdir()
    line = '{"task": "a", "round": 0, "kind": "processor", "busy_s": 0.1, "steal_s": 0.0}'
    (folder / "steps" / "observations.jsonl").write_text(f"{line}\n")
    (folder / "steps" / "core.dump").write_text("not ours")
    return folder


Member = tuple[str, bytes, bytes]


def packed(path: Path, *members: Member) -> Path:
    """Members by name, content or target, and type."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.SYMTYPE:
                member.linkname = content.decode()
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_what_is_packed_comes_back(campaign: Path, tmp_path: Path) -> None:
    path, left_out = pack(campaign)
    assert (path, left_out) == (campaign / ARCHIVE, ())
    found = unpack(path, tmp_path / "home")
    assert found == CampaignDocument.read(campaign / CAMPAIGN)
    files = {str(f.relative_to(tmp_path / "home")) for f in (tmp_path / "home").rglob("*.*")}
    assert files == {CAMPAIGN, "steps/observations.jsonl"}


def test_what_is_too_large_stays_behind(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (campaign / "models" / "in-place").mkdir(parents=True)
    random = bytes((index * index * 7919) % 251 for index in range(60_000))
    (campaign / "models" / "in-place" / "observations.jsonl").write_bytes(random)
    monkeypatch.setattr("validate.borrowed.MOST_PACKED_BYTES", 900)
    path, left_out = pack(campaign)
    assert left_out[0] == "models/in-place/observations.jsonl"
    assert path.stat().st_size <= 900


FILE, LINK, HEADER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.XHDTYPE


@pytest.mark.parametrize(
    ("member", "times", "says"),
    [
        *(
            ((name, b"{}", FILE), 1, "files of a campaign alone")
            for name in ("../profile.json", "/calibration/profile.json", "a/b/c/d/profile.json")
        ),
        (("steps/setup.py", b"{}", FILE), 1, "files of a campaign alone"),
        (("steps/plan.json", b"/etc/passwd", LINK), 1, "regular file"),
        (("plan.json", b"1" * 10**6, HEADER), 1, "a header must be short"),
        (("plan.json", b"12 path=abc\n", HEADER), 3000, "one header a member"),
        ((CAMPAIGN, b"{}", FILE), 2, "every member once"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_strange_members_are_refused(tmp_path: Path, member: Member, times: int, says: str) -> None:
    path = packed(tmp_path / "odd.tar.gz", *[member] * times)
    with pytest.raises(InvalidDocument, match=says):
        unpack(path, tmp_path / "home")
    assert not any(tmp_path.rglob("p*.*"))


def test_archives_that_are_none_are_one_line(campaign: Path, tmp_path: Path, run: Run) -> None:
    def said(path: Path) -> str:
        return complaint(run("validate", "--from", path), 1)

    whole, _ = pack(campaign)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole.read_bytes()[:150])
    assert "damaged or truncated" in said(cut)
    assert "No such file" in said(tmp_path / "none.tar.gz")
    (tmp_path / "text.tar").write_text("no archive\n" * 100)
    assert "must be a whole archive" in said(tmp_path / "text.tar")
    assert f"must hold {CAMPAIGN}" in said(packed(tmp_path / "empty.tar.gz"))
    old = packed(tmp_path / "old.tar.gz", (CAMPAIGN, b'{"schema_version": 0}', FILE))
    line = said(old)
    assert f"{old}: {CAMPAIGN}: schema_version of a campaign must be 1, got 0" in line
    assert "leave it out" in complaint(run("validate", "--from", whole, "--soon"), 2)


def test_a_campaign_without_a_profile_says_so(campaign: Path, run: Run) -> None:
    path, _ = pack(campaign)
    result = run("validate", "--from", path)
    assert "must hold a profile and runs to judge" in complaint(result, 1)
    assert "no profile: nothing to judge" in result.stdout
