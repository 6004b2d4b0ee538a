"""Documents in and out: what is refused, in which words, and what survives a full disk."""

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from perfmodel.documents.base import Document, command_line, write_atomically
from perfmodel.documents.observation import (
    CollectiveObservation,
    EnvironmentObservation,
    ProcessorObservation,
    read_observations,
    tasks_done,
)
from perfmodel.documents.prediction import PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import ValidationDocument
from perfmodel.errors import CalibrationUnavailable, InvalidDocument, PerfModelError
from perfmodel.statistics.interval import Interval
from tests.perfmodel.profiles import Machine, as_file, profile

LINE = CollectiveObservation(
    task="all_reduce-2",
    round=0,
    collective="all_reduce",
    world_size=2,
    size_bytes=1024,
    durations_s=((0.1,), (0.2,)),
).model_dump_json()


def written(path: Path, change: Callable[[dict[str, Any]], object] = lambda _raw: None) -> Path:
    """A good profile with one change to its JSON."""
    raw = json.loads(as_file(profile(Machine())).model_dump_json())
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CalibrationUnavailable) as caught:
        ProfileDocument.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_profile_that_was_written_reads_back_the_same(tmp_path: Path) -> None:
    document = profile(Machine(noise=(0.9, 1.0, 1.1), dispatch_s=1 / 3))
    path = tmp_path / "new" / "profile.json"
    as_file(document).write(path)
    assert asdict(ProfileDocument.read(path).machine) == asdict(document)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_an_unknown_key_is_named_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", lambda raw: raw["machine"]["ddp"].update(colour="red"))
    assert refusal(path) == "machine.ddp.colour: unknown key, got red"


def test_not_a_number_is_named_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", lambda raw: raw["machine"].update(dispatch_s=float("nan")))
    message = refusal(path)
    assert message.startswith("machine.dispatch_s: Input should be")
    assert message.endswith("got nan")


def test_a_value_out_of_range_deep_inside_is_named_with_its_place(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["machine"]["workloads"][1]["phases"][0]["forward"][2]["time_s"] = -1.5

    message = refusal(written(tmp_path / "p.json", change))
    assert message.startswith("machine.workloads.1.phases.0.forward.2.time_s: ")
    assert message.endswith("got -1.5")


def test_more_than_one_problem_is_counted(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.json",
        lambda raw: raw["machine"].update(dispatch_s=-1, speed_probe_s={"1": 0}),
    )
    assert refusal(path).endswith("(and 1 more)")


def test_a_pipe_is_written_through_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(max_workers=1) as pool:
        read = pool.submit(pipe.read_text)
        write_atomically(pipe, "words")
        assert read.result(timeout=10) == "words"
    assert pipe.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", "words")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "words"


def test_the_target_of_a_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A reader that opened the old file reads it to its end."""
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old words")
    link.symlink_to(Path("elsewhere") / "file")
    with target.open() as reader:
        write_atomically(link, "new")
        assert reader.read() == "old words"
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(tmp_path / other)
    with pytest.raises(PerfModelError, match="cannot be written"):
        write_atomically(tmp_path / "a", "words")


def test_a_validation_of_an_older_version_says_to_validate_again(tmp_path: Path) -> None:
    path = tmp_path / "validation.json"
    path.write_text('{"schema_version": 1, "gates": []}', encoding="utf-8")
    with pytest.raises(InvalidDocument) as caught:
        ValidationDocument.read(path)
    assert str(caught.value).endswith("perfmodel validate makes it new")


def test_a_misspelt_key_that_need_not_be_there_is_recognised(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.json", lambda raw: raw["machine"]["ddp"].update(nmaes=["bucket_s"])
    )
    assert refusal(path).endswith("; did you mean names?")


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_schema_version_is_refused_with_what_to_do(tmp_path: Path, version: object) -> None:
    path = written(tmp_path / "p.json", lambda raw: raw.update(schema_version=version))
    assert refusal(path) == (
        f"schema_version of a profile must be 2, got {version!r}; perfmodel fit FOLDER makes it new"
    )


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json")
    path.write_bytes(path.read_bytes()[:-40])
    assert refusal(path).startswith("profile cannot be read: ")


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert refusal(path).startswith("profile cannot be read: ")


def test_a_list_is_not_a_document(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("[1, 2]", encoding="utf-8")
    assert refusal(path).startswith("schema_version of a profile must be 2, got None")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == (
        "profile cannot be read: No such file or directory; perfmodel calibrate writes one"
    )


@pytest.mark.parametrize("kind", [PredictionDocument, ValidationDocument])
def test_other_documents_are_invalid_rather_than_a_lack_of_calibration(
    tmp_path: Path, kind: type[Document]
) -> None:
    with pytest.raises(InvalidDocument, match=f"{kind.title} cannot be read"):
        kind.read(tmp_path / "none.json")


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    document = profile(Machine())
    path = tmp_path / "profile.json"
    as_file(document).write(path)
    assert ProfileDocument.read(path).machine.digest == document.digest == profile(Machine()).digest
    assert len(document.digest) == 64
    assert as_file(replace(document, dispatch_s=1e-9)).digest != document.digest


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old", encoding="utf-8")

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PerfModelError, match=r"cannot be written: No space left on device; free"):
        write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PerfModelError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "profile.json", "new")


def test_an_interval_must_be_in_order() -> None:
    with pytest.raises(ValueError, match=r"p5 <= nominal <= p95 must hold, got 2.0, 1.0, 3.0"):
        Interval(p5=2.0, nominal=1.0, p95=3.0)


def test_a_last_line_without_its_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{LINE}\n{LINE}\n{LINE[:-9]}", encoding="utf-8")
    observations = read_observations(path)
    assert len(observations) == 2
    assert tasks_done(observations) == {"all_reduce-2"}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (LINE[:-9], "line 2: "),
        (
            LINE.replace('"round":0', '"round":0,"colour":1'),
            "line 2: collective.colour: unknown key",
        ),
        (LINE.replace("0.2", "NaN"), r"line 2: collective.durations_s.1.0: .* got nan"),
        (LINE.replace('"collective",', '"rumour",', 1), "line 2: document: .*'rumour'"),
        (
            LINE.replace('"kind":"collective",', ""),
            "line 2: document: must have the key 'kind', got none",
        ),
    ],
)
def test_a_broken_line_in_the_middle_is_named_by_its_number(
    tmp_path: Path, broken: str, problem: str
) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{LINE}\n{broken}\n{LINE}\n", encoding="utf-8")
    with pytest.raises(InvalidDocument, match=problem) as caught:
        read_observations(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert "\n" not in str(caught.value)


def test_missing_observations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="observations cannot be read"):
        read_observations(tmp_path / "none.jsonl")


def test_observations_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(InvalidDocument):
        read_observations(path)


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    """JSON leaves other line separators of Unicode as they are."""
    fact = EnvironmentObservation(task="e", round=0, facts={"name": f"a{separator}b"})
    path = tmp_path / "observations.jsonl"
    path.write_text(f"{fact.model_dump_json()}\n{LINE}\n", encoding="utf-8")
    assert len(read_observations(path)) == 2


def test_a_recorded_command_does_not_say_where_the_checkout_lies() -> None:
    argv = ("/home/me/perfmodel/.venv/bin/perfmodel", "fit", "/home/me/perfmodel/runs/a", "/data/b")
    folder = Path("/home/me/perfmodel")
    assert command_line(argv, folder=folder) == (".venv/bin/perfmodel", "fit", "runs/a", "/data/b")
    assert command_line(argv, folder=Path("/")) == tuple(word.removeprefix("/") for word in argv)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/home/me/perfmodel/perfmodel/__main__.py", "perfmodel"),
        ("/home/me/.venv/bin/perfmodel", "perfmodel"),
        ("/usr/lib/python3/site-packages/pytest/__main__.py", "pytest"),
        ("perfmodel/__main__.py", "perfmodel/__main__.py"),
    ],
)
def test_a_recorded_command_does_not_say_where_its_program_lies(called: str, name: str) -> None:
    folder = Path("/home/me/elsewhere")
    assert command_line((called, "fit", "/data/b"), folder=folder) == (name, "fit", "/data/b")
    assert command_line((), folder=folder) == ()


def test_durations_are_stored_finer_than_any_clock_ticks_and_no_finer() -> None:
    observed = ProcessorObservation(task="t", round=0, busy_s=0.1234567891234, steal_s=0.1 + 0.2)
    stored = observed.model_dump_json()
    assert '"busy_s":0.1234567891,"steal_s":0.3' in stored
    assert ProcessorObservation.model_validate_json(stored).model_dump_json() == stored
