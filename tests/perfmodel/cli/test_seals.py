"""An edited document is refused, and used only where the answer says so."""

import json
from pathlib import Path
from socket import socket

import pytest

import perfmodel as pm
from perfmodel.documents import check_file, file_sha256, kinds
from perfmodel.documents.acceptance import AcceptanceTerms
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import (
    EXIT_CALIBRATION,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    InvalidDocument,
)
from perfmodel.page import server
from perfmodel.page.answers import Answers
from perfmodel.page.server import start
from tests.benchmarks.seal import seal
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.profiles import Machine, as_file, profile
from tests.played_worker import REPLAY, append

RECORDS = Path(__file__).parents[3] / "docs" / "records"
EDITED = "was changed after it was written: its seal does not fit"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    as_file(profile(Machine(dispatch_s=0.001))).write(path)
    return path


@pytest.fixture
def edited(stored: Path) -> Path:
    stored.write_text(stored.read_text().replace("0.001", "0.004", 1))
    return stored


def test_a_file_that_lost_its_seal_is_refused(stored: Path) -> None:
    raw = json.loads(stored.read_text())
    del raw["seal"]
    stored.write_text(json.dumps(raw))
    with pytest.raises(ProfileDocument.unreadable, match="carries no seal"):
        ProfileDocument.read(stored)


def test_order_and_white_space_may_change(stored: Path) -> None:
    before = ProfileDocument.read(stored)
    raw = json.loads(stored.read_text())
    stored.write_text(json.dumps(raw, indent=4, sort_keys=True))
    assert ProfileDocument.read(stored).digest == before.digest
    stored.write_text(json.dumps(dict(reversed(raw.items()))))
    assert ProfileDocument.read(stored).digest == before.digest


def test_an_answer_from_an_edited_file_says_so(run: Run, edited: Path, tmp_path: Path) -> None:
    asked = ("predict", "--profile", edited, "--workload", "light", "--unsealed")
    note = f"unsealed: {edited} was edited, or never sealed"
    assert note in run(*asked).stdout.splitlines()
    answer = tmp_path / "answer.json"
    printed = run(*asked, "--json", "--output", answer)
    for text in (printed.stdout, answer.read_text()):
        assert json.loads(text)["unsealed"] == [str(edited)]
        assert note in json.loads(text)["caveats"]
    with pytest.raises(PredictionDocument.unreadable, match="made from files that were edited"):
        PredictionDocument.read(answer)


def test_pages_and_tables_say_so(run: Run, edited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = f"unsealed: {edited} was edited, or never sealed"
    said: list[str] = []

    def serve(answers: Answers, on: socket) -> None:
        on.close()
        said.extend(answers.answer(start(answers.catalogue))["caveats"])

    monkeypatch.setattr(server, "serve", serve)
    run("serve", "--profile", edited, "--unsealed", "--port", "0")
    assert note in said
    table = run("predict", "--profile", edited, "--workload", "light", "--unsealed", "--csv")
    assert note not in table.stdout
    assert table.stderr == f"{note}\n"


def test_python_reads_edited_files_in_a_block(edited: Path) -> None:
    with pytest.raises(ProfileDocument.unreadable):
        pm.read_profile(edited)
    with pm.unsealed():
        answer = pm.predict(edited, "light", devices=(1, 2))
        assert json.loads(answer.text())["unsealed"] == [str(edited)]


def test_a_whole_file_needs_no_word(run: Run, stored: Path) -> None:
    result = run("predict", "--profile", stored, "--workload", "light", "--unsealed", "--json")
    assert "unsealed" not in json.loads(result.stdout)
    assert result.stderr == ""
    PredictionDocument.of_text(result.stdout)


def test_a_judgement_believes_no_edited_file(run: Run, stored: Path, tmp_path: Path) -> None:
    clauses = tmp_path / "clauses.toml"
    assert run("acceptance", "write", "--profile", stored, "--output", clauses).exit_code == EXIT_OK
    judge = ("acceptance", "judge", clauses, "--profile", stored)
    assert "No such option: --unsealed" in complaint(run(*judge, "--unsealed"), EXIT_USAGE)
    text = clauses.read_text()
    limit = next(line for line in text.splitlines() if line.startswith("at_"))
    clauses.write_text(text.replace(limit, f"{limit[:-1]}1", 1))
    said = complaint(run(*judge), EXIT_FAILURE)
    assert said.endswith(f"{EDITED}; perfmodel acceptance write makes it new")
    clauses.write_text(text)
    AcceptanceTerms.read(clauses)
    stored.write_text(stored.read_text().replace("0.001", "0.004", 1))
    assert EDITED in complaint(run(*judge), EXIT_CALIBRATION)


def test_a_judgement_takes_no_other_observations(run: Run, stored: Path, tmp_path: Path) -> None:
    clauses = tmp_path / "clauses.toml"
    run("acceptance", "write", "--profile", stored, "--output", clauses)
    beside = tmp_path / "observations.jsonl"
    beside.write_text('{"task":"a","round":0,"kind":"processor","steal_s":0.0,"busy_s":1.0}\n')
    judge = ("acceptance", "judge", clauses, "--profile", stored)
    said = complaint(run(*judge), EXIT_FAILURE)
    assert "must be what the profile was fitted from" in said
    as_file(profile(Machine()), sha256=file_sha256(beside)).write(stored)
    assert "must be what" not in run(*judge).stderr


def test_a_task_that_two_campaigns_wrote_is_found(tmp_path: Path) -> None:
    path = append(tmp_path / "observations.jsonl", REPLAY)
    assert check_file(path)[1] == EXIT_OK
    with pytest.raises(InvalidDocument, match="one"):
        check_file(append(path, REPLAY))


def test_recorded_documents_are_sealed() -> None:
    """``python -m tests.benchmarks.seal docs/records`` seals those of an older version."""
    found = [path for path in RECORDS.rglob("*.json") if '"provenance"' in path.read_text()]
    assert found
    for path in found:
        assert check_file(path)[1] == EXIT_OK, path


def test_a_file_is_sealed_again_without_other_changes_but_folders_of_others(edited: Path) -> None:
    before = json.loads(edited.read_text())
    for word, kept in (("/home/me/runs/a", "runs/a"), ("runs/b", "runs/b")):
        before["provenance"]["command_line"] = ["perfmodel", "fit", word]
        edited.write_text(json.dumps(before))
        assert seal(edited) == f"sealed: {edited}"
        assert seal(edited) == ""
        after = json.loads(edited.read_text())
        before["provenance"]["command_line"][2] = kept
        assert before.pop("seal") != after.pop("seal")
        assert after == before
        before = after | {"seal": ""}
    assert ProfileDocument in kinds()
