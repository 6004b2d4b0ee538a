"""Documents in and out: what is refused, in which words, what survives a full disk, and what an edited one is worth."""

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from socket import socket
from typing import Any

import pytest

import perfmodel as pm
from perfmodel import documents
from perfmodel.documents import (
    STALE_AFTER_DAYS,
    Document,
    Record,
    age_notes,
    asked_by,
    check_file,
    command_line,
    file_sha256,
    kinds,
)
from perfmodel.documents.acceptance import AcceptanceTerms, RankRun, read_run
from perfmodel.documents.hardware import open_cluster
from perfmodel.documents.observation import (
    IsolatedOperator,
)
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import (
    EXIT_CALIBRATION,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    InvalidDocument,
)
from perfmodel.machine import Cluster
from perfmodel.page import server
from perfmodel.page.answers import Answers
from perfmodel.page.server import start
from perfmodel.workload import Operator, Phase
from tests.benchmarks.seal import seal
from tests.perfmodel.cli.command import Run, complaint
from tests.perfmodel.operators import spec
from tests.perfmodel.profiles import PROVENANCE, Machine, as_file, profile
from tests.perfmodel.report.samples import plain_validation

VERSION = ProfileDocument.current_version()


def refusal(path: Path, kind: type[Document] = ProfileDocument) -> str:
    with pytest.raises(kind.unreadable) as caught:
        kind.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def with_version(kind: type[Document], version: int) -> str:
    is_toml = kind is AcceptanceTerms
    return f"schema_version = {version}" if is_toml else json.dumps({"schema_version": version})


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_old_and_missing_files_of_every_kind_name_the_command_that_makes_one(
    kind: type[Document], tmp_path: Path
) -> None:
    assert kind.made_by.startswith("perfmodel ")
    assert refusal(tmp_path / "none.json", kind) == (
        f"{kind.title} cannot be read: No such file or directory; {kind.made_by} writes one"
    )
    path = tmp_path / "old.json"
    path.write_text(with_version(kind, kind.current_version() - 1))
    assert refusal(path, kind) == (
        f"schema_version of a {kind.title} must be {kind.current_version()}, "
        f"got {kind.current_version() - 1}; {kind.remade_by or kind.made_by} makes it new"
    )
    path.write_text(with_version(kind, kind.current_version()))
    assert "must be given" in refusal(path, kind)


def test_a_version_refuses_every_file_of_another() -> None:
    """Whoever raises one takes files from their users, and says so here."""
    found = sorted(f"{kind.title} {kind.current_version()}" for kind in kinds())
    assert ", ".join(found) == (
        "acceptance 4, acceptance terms 2, batch outlook 3, calibration from runs 4, campaign 1, cost 1, "
        "goodput 4, network verdict 1, plan 5, plan of the parallelism 2, prediction 5, prediction from runs 1, "
        "profile 5, profile difference 2, published verdict 1, rank's run 1, validation 3, validation of models 4, "
        "verdict on strategies 3, what-if 5, workload 2"
    )


def test_what_files_leave_out_means_what_it_meant() -> None:
    """Whoever changes a default changes what files of users say, and says so here."""
    modules = (each.name for each in iter_modules(documents.__path__, "perfmodel.documents."))
    records = {
        kind
        for module in modules
        for kind in vars(import_module(module)).values()
        if isinstance(kind, type) and issubclass(kind, Record)
    }
    found = {
        f"{kind.__name__}.{name}={field.default}"
        for kind in records
        for name, field in kind.model_fields.items()
        if isinstance(field.default, int | float) and name != "schema_version"
    }
    assert " ".join(sorted(found)) == (
        "CollectiveObservation.stride=1 CountRange.step=1 DataSheet.link_joins_pairs=False "
        "Failures.detection_s=0.0 Failures.restart_s=0.0 HostSteps.num_gradients=0 "
        "IsolatedOperator.num_calls=1 Limits.probability=0.9 ModelsValidationDocument.steal=0.0 "
        "Option.pue=1.0 PublishedSeries.num_beyond=0 Purchase.residual_fraction=0.0 "
        "Purchase.spare_fraction=0.0 Purchase.upkeep_fraction=0.0 Rental.effective_fraction=1.0 "
        "ReplayObservation.world_size=1 StackSpec.head=0 StackSpec.tokens=1 "
        "TierEntry.in_switch_reduction=0.0 TierEntry.links=1 TierEntry.oversubscription=1.0 "
        "ValidationDocument.steal=0.0 Work.accumulation=1"
    )


@pytest.mark.parametrize("cluster", [None, open_cluster("2 nvlink4, 2 eth-100")])
def test_a_profile_that_was_written_reads_back_the_same(
    cluster: Cluster | None, tmp_path: Path
) -> None:
    """Also as text: what a machine does not have is not written."""
    machine = profile(Machine(noise=(0.9, 1.0, 1.1), dispatch_s=1 / 3))
    written = as_file(replace(machine, cluster=cluster))
    path = tmp_path / "new" / "profile.json"
    written.write(path)
    assert ("cluster" in json.loads(path.read_text())["machine"]) is (cluster is not None)
    assert asdict(ProfileDocument.read(path).machine) == asdict(written.machine)
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_variants_of_a_machine_keep_the_digest_of_its_file() -> None:
    machine = profile(Machine())
    faster = replace(machine, dispatch_s=1e-9)
    assert len(machine.digest) == 64
    assert faster.digest == machine.digest == profile(Machine()).digest
    assert as_file(faster).digest != machine.digest


def negative_forward(raw: dict[str, Any]) -> None:
    raw["workloads"][1]["phases"][0]["forward"][2]["time_s"] = -1.5


@pytest.mark.parametrize(
    ("change", "start", "end"),
    [
        (lambda raw: raw["ddp"].update(colour="red"), "ddp.colour: unknown key, got red", ""),
        (lambda raw: raw["ddp"].update(nmaes=["x"]), "ddp.nmaes: ", "; did you mean names?"),
        (lambda raw: raw.update(dispatch_s=float("nan")), "dispatch_s: must be", "got nan"),
        (lambda raw: raw.update(dispatch_s=True), "dispatch_s: ", ""),
        (lambda raw: raw.update(dispatch_s="0.1"), "dispatch_s: ", ""),
        (lambda raw: raw.update(ranks_per_node=2.5), "ranks_per_node: ", ""),
        (negative_forward, "workloads.1.phases.0.forward.2.time_s: ", "got -1.5"),
        (lambda raw: raw.update(dispatch_s=-1, num_rounds=0), "", "1 more: machine.dispatch_s)"),
        (lambda raw: raw.update(dispatch_s="7" * 99), "dispatch_s: ", f"got {'7' * 80}"),
        (
            lambda raw: raw.update(dict.fromkeys("abcdefg", 1)),
            "a: unknown key, got 1",
            "(and 6 more: machine.b, machine.c, machine.d, machine.e)",
        ),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_place(
    change: Callable[[dict[str, Any]], None], start: str, end: str, tmp_path: Path
) -> None:
    raw = json.loads(as_file(profile(Machine())).model_dump_json())
    change(raw["machine"])
    path = tmp_path / "p.json"
    path.write_text(json.dumps(raw))
    assert refusal(path).startswith(f"machine.{start}")
    assert refusal(path).endswith(end)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b'{"schema_version": 3, "machi', "profile cannot be read: "),
        (b"\xff\xfe\x00\x01", "profile cannot be read: "),
        (b"[1, 2]", f"schema_version of a profile must be {VERSION}, got None"),
        (b'{"schema_version": "3"}', f"schema_version of a profile must be {VERSION}, got '3'"),
    ],
)
def test_what_is_no_profile_is_refused(content: bytes, start: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    assert refusal(path).startswith(start)


def test_a_run_is_that_of_all_its_ranks(tmp_path: Path) -> None:
    of_rank = {"provenance": PROVENANCE, "ranks_per_node": 1, "host": "one", "step_s": (0.1,)}
    for rank, world_size, problem in ((1, 2, "got 1 of 2"), (0, 3, "got 2 of 2 and 3"), (0, 2, "")):
        document = RankRun.model_validate(of_rank | {"rank": rank, "world_size": world_size})
        document.write(tmp_path / f"rank-{rank}.json")
        if problem:
            with pytest.raises(InvalidDocument, match=f"every rank of one run, {problem}$"):
                read_run(tmp_path)
    assert [each.rank for each in read_run(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/home/me/perfmodel/.venv/bin/perfmodel", ".venv/bin/perfmodel"),
        ("/home/me/elsewhere/perfmodel/__main__.py", "perfmodel"),
        ("/usr/bin/perfmodel", "perfmodel"),
        ("perfmodel/__main__.py", "perfmodel"),
        ("/usr/lib/notebook.py", "notebook.py"),
    ],
)
def test_a_recorded_command_does_not_say_where_its_program_lies(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs, such as a notebook, are recorded by their name alone."""
    folder = Path("/home/me/perfmodel")
    argv = (called, "fit", "/home/me/perfmodel/runs/a", "/data/b")
    assert command_line(argv, folder=folder) == (name, "fit", "runs/a", "/data/b")
    assert command_line((), folder=folder) == ()
    monkeypatch.setattr("sys.argv", [called, "fit", "a"])
    assert asked_by() == (("perfmodel", "fit", "a") if "perfmodel" in called else (name,))


def test_a_calibration_is_old_after_half_a_year() -> None:
    made = "2026-01-31T23:59:59+00:00"
    last = dt.date(2026, 1, 31) + dt.timedelta(days=STALE_AFTER_DAYS)
    assert age_notes(made, today=last) == ()
    (note,) = age_notes(made, today=last + dt.timedelta(days=1))
    assert note.startswith("made 181 days ago (2026-01-31); old after 180, calibrate again")


def test_errors_of_a_validation_widen_predictions_in_both_directions() -> None:
    """Of four settings on two ranks, each 30 % off; the calibration's own are 3 %."""
    machine, before = profile(Machine(residual=0.03)), plain_validation()
    rows = tuple(row.model_copy(update={"signed_error": 0.3}) for row in before.settings)
    judged = before.model_copy(update={"settings": rows, "provenance": PROVENANCE})
    usual, wide = (
        pm.predict(machine, "light", devices=(2,), batch=16, validation=each).points[0].step_s
        for each in (None, judged)
    )
    assert usual.p95 / usual.p5 < 1.1
    assert wide.nominal / wide.p5 == pytest.approx(1.3, rel=0.05)
    assert wide.p95 / wide.nominal == pytest.approx(1.3, rel=0.05)


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


def test_records_of_operators_have_the_traffic_that_traces_count() -> None:
    """Fits compare both; earlier versions wrote that a bag reads its whole table."""
    table, indices = spec(1000, 5), replace(spec(4), dtype="int64")
    bags = Operator.of("aten._embedding_bag.default", (table, indices), (spec(2, 5),), "[[], {}]")
    earlier = replace(bags, read_bytes=20_032)
    read = IsolatedOperator(operator=earlier, phase=Phase.FORWARD, times_s=(1.0,))
    assert read.operator == bags
